"""Connections on which headers come in few bytes and in time; what no app sees.

Importing this imports neither torch nor the rest of the server: a proxy of somebody else's can use it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Bounded(HttpToolsProtocol):
    """A connection whose headers must come in time and in few bytes.

    Attributes:
        header_bytes: longest request line and headers together.
        header_seconds: time in which they must have come.
    """

    header_bytes: ClassVar[int] = 1 << 15
    header_seconds: ClassVar[float] = 10.0

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._head_bytes, self._in_head, self._running, self._timer = 0, True, None, None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        # Of several requests sent at once the server marks only the last as left.
        cycles = [self._running, *(cycle for cycle, _ in self.pipeline)]
        self.pipeline.clear()
        for cycle in cycles:
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # Bytes of a body that came with its head were counted too: they do not matter once the head is complete.
        if self._in_head and self._head_bytes > self.header_bytes and not self.transport.is_closing():
            self._refuse(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:  # a further request on the same connection
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(name) + len(value) > self.header_bytes:
            self._head_bytes = self.header_bytes + 1

    def on_headers_complete(self) -> None:
        self._stop_timer()
        too_long = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
        if too_long > self.header_bytes:
            self._refuse(431, "Request Header Fields Too Large")
            return
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._in_head:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._in_head:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._stop_timer()
        self._timer = self.loop.call_later(self.header_seconds, self._late)

    def _late(self) -> None:
        if self._in_head and not self.transport.is_closing():
            self._refuse(408, "Request Timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, words: str) -> None:
        self.transport.write(
            f"HTTP/1.1 {status} {words}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode("ascii")
        )
        self.transport.close()
