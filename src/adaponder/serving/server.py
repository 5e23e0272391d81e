"""Serves the app on a socket: limits on headers, and a shutdown that lets running requests finish.

This module does not import torch, so Ray's proxy can use :class:`BoundedConnection`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from adaponder.errors import InputError
from adaponder.serving.fairness import Places

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from adaponder.serving.settings import Settings
    from adaponder.serving.worker import Worker

_KEEP_ALIVE_SECONDS = 30
# Time for clients to receive the error of a request that outlasted the drain.
_LAST_WORDS_SECONDS = 2
# Time after the drain at which the process is ended, whatever still runs.
_LAST_SECONDS = 2.9
# Python's switch interval between threads. The default of 5 ms is nearly as long as a step of a small model.
_SWITCH_SECONDS = 0.0005
# How long data of a refused connection is discarded before it is closed.
_DISCARD_SECONDS = 1.0


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes any free port. Raises :class:`InputError` if it cannot listen."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as problem:  # UnicodeError: a name that cannot be looked up
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"--host {host}: there is no such address here ({reason})") from None
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(address[:2], family=family, backlog=2048, dualstack_ipv6=dual)
    except OSError as problem:
        reason = os.strerror(problem.errno or 0)
        message = f"--port {port}: cannot listen on {host} ({reason}); choose another --port, or 0 for any free one"
        if problem.errno == errno.EADDRNOTAVAIL:
            message = f"--host {host}: this machine has no such address; use 0.0.0.0 for all of its addresses"
        raise InputError(message) from None
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """Returns the URL of a listening socket, to open in a browser."""
    host, port = listening.getsockname()[:2]
    return url_of("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)


def url_of(host: str, port: int) -> str:
    """Returns the URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: ASGIApp, worker: Worker, listening: socket.socket, settings: Settings, *, started: Callable[[], None]
) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets running requests finish; a second signal ends at once.

    ``started`` is called once the server accepts requests. Raises :class:`KeyboardInterrupt` after Ctrl-C.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = Server(config_of(app, settings), worker, started, drain_seconds=settings.limits.drain_seconds)
    server.run(sockets=[listening])
    server.deadline.cancel()
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


def config_of(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """Returns uvicorn's config for an app with these settings."""
    return uvicorn.Config(
        app,
        http=bounded(settings),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=round(settings.limits.drain_seconds) + _LAST_WORDS_SECONDS,
        # From this many open connections on, uvicorn answers every request with 503.
        limit_concurrency=settings.limits.connections + 1,
    )


class Server(uvicorn.Server):
    """A uvicorn server that drains after a signal and then returns, where uvicorn would raise the signal again.

    Requests that outlast the drain get an error; a second signal ends the process at once.

    Attributes:
        signal: the signal that stopped the server; ``None`` while it runs.
        deadline: timer, started by the signal, that ends the process if the shutdown takes too long.
    """

    def __init__(
        self, config: uvicorn.Config, worker: Worker, started: Callable[[], None], *, drain_seconds: float = 30.0
    ):
        super().__init__(config)
        self.signal: int | None = None
        self._worker, self._on_start, self._drain_seconds = worker, started, drain_seconds
        self.deadline = threading.Timer(drain_seconds + _LAST_SECONDS, self._exit)
        self.deadline.daemon = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end_of_drain = asyncio.create_task(self._stop_after_drain())
        await super().shutdown(sockets)
        end_of_drain.cancel()

    async def _stop_after_drain(self) -> None:
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
            os._exit(128 + sig)  # a second signal ends the process at once
        self.signal, self.should_exit = sig, True
        self.deadline.start()
        if self._worker.state in ("starting", "ready"):
            self._worker.state = "draining"

    def _exit(self) -> None:
        os._exit(0 if self.signal == signal.SIGTERM else 130)


class BoundedConnection(HttpToolsProtocol):
    """A connection that limits the length and duration of headers, and the time in which a client reads nothing.

    The numbers come from :class:`adaponder.serving.settings.Limits`. ``places`` counts the connections of each client,
    so that no client can hold all ``most_connections``. ``holder_of`` maps an address to the name of its client, or to
    ``None`` (the default) if connections from this address are not counted. The class works around faults of uvicorn
    0.54 with httptools:

    - uvicorn does not limit the length or duration of headers, so a client could fill memory or hold connections
      (CVE-2025-48956);
    - uvicorn waits forever for a client that does not read its answer;
    - when a client with several pipelined requests disconnects, uvicorn marks only the last one as disconnected.
    """

    header_bytes: ClassVar[int] = 1 << 15
    header_seconds: ClassVar[float] = 10.0
    stall_seconds: ClassVar[float] = 30.0
    most_connections: ClassVar[int] = 2048
    places: ClassVar[Places]
    holder_of: ClassVar[Callable[[str], str | None]] = staticmethod(lambda address: None)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._head_bytes: int | None = 0  # None while a body arrives
        self._running: Any = None
        self._head_timer = self._stall_timer = None
        self._holder: str | None = None
        self._refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()
        holder = self.holder_of(self.client[0]) if self.client else None
        if holder is None:
            return
        if self.places.missing(holder, 1, room=self.most_connections, at_once=0):
            self.connections.discard(self)  # else it would count towards uvicorn's limit until it is closed
            self._refuse("429 Too Many Requests")
        else:
            self._holder = holder
            self.places.take(holder)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._holder is not None:
            self.places.give_back(self._holder)
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        cycles = [self._running, *(cycle for cycle, _ in self.pipeline)]
        self.pipeline.clear()
        for cycle in cycles:
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and self._head_bytes is not None and self._is_open():
            room = self.header_bytes + 1 - self._head_bytes
            self._head_bytes += len(data[:room])
            super().data_received(data[:room])
            data = data[room:]
            if self._head_bytes is not None and self._head_bytes > self.header_bytes:
                self._refuse("431 Request Header Fields Too Large")
        if data and self._is_open():
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Suppresses uvicorn's advice to install a WebSocket library; this server has no WebSocket routes."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self.header_seconds, self._refuse, "408 Request Timeout")

    def _is_open(self) -> bool:
        return not (self._refused or self.transport.is_closing())

    def _refuse(self, status: str) -> None:
        """Answers with an error, discards for a moment what the client still sends, then closes the connection.

        Without discarding, closing the connection with unread data would reset it, and the client could lose the
        response.
        """
        if not self._is_open():
            return
        self._refused = True
        self.transport.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
        if self._running is not None and not self._running.response_complete:
            self.transport.close()  # an earlier request's response would be written after the end
            return
        self.transport.write_eof()
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(_DISCARD_SECONDS, self.transport.close)


def bounded(settings: Settings) -> type[BoundedConnection]:
    """Returns a subclass of :class:`BoundedConnection` with the limits of ``settings``.

    Its connections are counted by client, so that a client can hold only a fair share of them.
    """
    limits = settings.limits
    shares = {"places": Places(), "most_connections": limits.connections, "holder_of": settings.access.holder_of}
    return type("BoundedConnection", (BoundedConnection,), limits.of_connections() | shares)
