"""Serves the app on a socket: limits on headers, and a shutdown that lets running requests finish.

Importing this imports neither torch nor the rest of the server, so Ray's proxy can use its connections.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from adaponder.errors import InputError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from adaponder.serving.settings import Limits
    from adaponder.serving.worker import Worker

_KEEP_ALIVE_SECONDS = 30
# How long clients may take to read that their request was cut off at the end of the drain.
_LAST_WORDS_SECONDS = 3
# How long one thread may hold the interpreter; Python's default of 5 ms is most of a small model's step.
_SWITCH_SECONDS = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes any free port. Raises :class:`InputError` if that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as problem:  # UnicodeError: a name that cannot be looked up
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"--host {host}: there is no such address here ({reason})") from None
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as problem:
        listening.close()
        if problem.errno == errno.EADDRNOTAVAIL:
            message = f"--host {host}: this machine has no such address; use 0.0.0.0 for all of its addresses"
            raise InputError(message) from None
        cure = "choose another --port, or 0 for any free one"
        raise InputError(f"--port {port}: cannot listen on {host} ({problem.strerror}); {cure}") from None
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """Returns the address to open in a browser."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: ASGIApp, worker: Worker, listening: socket.socket, limits: Limits, *, started: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets running requests finish; a second signal ends at once.

    ``started`` is called once requests are answered. Raises :class:`KeyboardInterrupt` after Ctrl-C.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    config = uvicorn.Config(
        app,
        http=bounded(limits),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=round(limits.drain_seconds) + _LAST_WORDS_SECONDS,
        limit_concurrency=limits.connections,
    )
    server = Server(config, worker, started, drain_seconds=limits.drain_seconds)
    server.run(sockets=[listening])
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


class Server(uvicorn.Server):
    """Exits with code 0 after a signal and a drain; requests that outlast the drain get an error.

    Attributes:
        signal: the signal that ended it.
    """

    def __init__(
        self, config: uvicorn.Config, worker: Worker, started: Callable[[], None], *, drain_seconds: float = 30.0
    ):
        super().__init__(config)
        self.signal: int | None = None
        self._worker, self._on_start, self._drain_seconds = worker, started, drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.create_task(self._stop_late())
        await super().shutdown(sockets)
        late.cancel()

    async def _stop_late(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._worker.stop()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + sig)  # a second signal ends the process whatever still hangs
        self.signal, self.should_exit = sig, True
        if self._worker.state in ("starting", "ready"):
            self._worker.state = "draining"


class BoundedConnection(HttpToolsProtocol):
    """A connection whose headers must be short and arrive in time.

    uvicorn 0.54 limits neither the bytes nor the time of headers with httptools, so one client could fill memory or
    hold connections (CVE-2025-48956). Of pipelined requests it marks only the last as disconnected.

    Attributes:
        header_bytes: longest request line and headers together.
        header_seconds: time in which they must arrive.
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
        # Bytes of a body that came with the head were counted too; they do not matter once the head is complete.
        if self._in_head and self._head_bytes > self.header_bytes and not self.transport.is_closing():
            self._refuse("431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:  # a further request on the same connection
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        size = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
        if size > self.header_bytes:
            self._refuse("431 Request Header Fields Too Large")
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
        self._timer = self.loop.call_later(self.header_seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        if self._in_head and not self.transport.is_closing():
            self._refuse("408 Request Timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: str) -> None:
        self.transport.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode("ascii"))
        self.transport.close()


def bounded(limits: Limits) -> type[BoundedConnection]:
    """Returns connections with these limits."""
    bounds = {"header_bytes": limits.header_bytes, "header_seconds": limits.header_seconds}
    return type("BoundedConnection", (BoundedConnection,), bounds)
