"""The app on a socket: limits that no app sees, and an end that lets what is under way finish."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from adaponder.errors import InputError
from adaponder.serving.settings import Limits
from adaponder.serving.worker import Worker

_log = logging.getLogger("adaponder.serving")
_KEEP_ALIVE_SECONDS = 30
# How long the two threads may keep the interpreter from each other; Python's own 5 ms are most of a small model's step.
_SWITCH_SECONDS = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any that is free. Raises :class:`InputError` where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as problem:
        raise InputError(f"--host {host}: there is no such address here ({problem.strerror or problem})") from None
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as problem:
        made.close()
        cure = "choose another --port, or 0 for any that is free"
        raise InputError(f"--port {port}: {host} cannot be listened at ({problem.strerror}); {cure}") from None
    made.setblocking(False)
    return made


def address_of(listening: socket.socket) -> str:
    """The address to open in a browser."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: ASGIApp, worker: Worker, listening: socket.socket, limits: Limits, *, started: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets what is under way finish; a second signal ends at once.

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
        timeout_graceful_shutdown=max(1, round(limits.drain_seconds)),
        limit_concurrency=limits.connections,
    )
    server = Server(config, worker, started)
    server.run(sockets=[listening])
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


class Server(uvicorn.Server):
    """Ends by a signal with exit code 0, after a drain.

    Attributes:
        signal: the one that ended it.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker, started: Callable[[], None]):
        super().__init__(config)
        self.signal: int | None = None
        self._worker, self._tell = worker, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + sig)  # whatever still hangs, the user has waited enough
        self.signal, self.should_exit = sig, True
        if self._worker.state in ("starting", "ready"):
            self._worker.state = "draining"


class Bounded(HttpToolsProtocol):
    """A connection whose headers must come in time and in few bytes."""

    limits: ClassVar[Limits] = Limits()

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
        if self._in_head and self._head_bytes > self.limits.header_bytes and not self.transport.is_closing():
            self._refuse(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:  # a further request on the same connection
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(name) + len(value) > self.limits.header_bytes:
            self._head_bytes = self.limits.header_bytes + 1

    def on_headers_complete(self) -> None:
        self._stop_timer()
        too_long = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
        if too_long > self.limits.header_bytes:
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
        self._timer = self.loop.call_later(self.limits.header_seconds, self._late)

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


def bounded(limits: Limits) -> type[Bounded]:
    """Connections with these limits."""
    return type("Bounded", (Bounded,), {"limits": limits})
