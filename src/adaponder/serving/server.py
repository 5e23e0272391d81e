"""The app on a socket: limits that no app sees, and an end that lets what is under way finish."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from adaponder.errors import InputError
from adaponder.serving.connections import Bounded
from adaponder.serving.settings import Limits
from adaponder.serving.worker import Worker

_log = logging.getLogger("adaponder.serving")
_KEEP_ALIVE_SECONDS = 30
# How long clients may take to read that they were broken off at the end of the drain.
_LAST_WORDS_SECONDS = 3
# How long the two threads may keep the interpreter from each other; Python's own 5 ms are most of a small model's step.
_SWITCH_SECONDS = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any that is free. Raises :class:`InputError` where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as problem:  # the second: a name that no name server could be asked for
        said = getattr(problem, "strerror", None) or problem
        raise InputError(f"--host {host}: there is no such address here ({said})") from None
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as problem:
        made.close()
        if problem.errno == errno.EADDRNOTAVAIL:
            raise InputError(f"--host {host}: this machine has no such address; 0.0.0.0 is all that it has") from None
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
        timeout_graceful_shutdown=round(limits.drain_seconds) + _LAST_WORDS_SECONDS,
        limit_concurrency=limits.connections,
    )
    server = Server(config, worker, started, drain_seconds=limits.drain_seconds)
    server.run(sockets=[listening])
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


class Server(uvicorn.Server):
    """Ends by a signal with exit code 0, after a drain; what is not done by then is told so.

    Attributes:
        signal: the one that ended it.
    """

    def __init__(
        self, config: uvicorn.Config, worker: Worker, started: Callable[[], None], *, drain_seconds: float = 30.0
    ):
        super().__init__(config)
        self.signal: int | None = None
        self._worker, self._tell, self._drain_seconds = worker, started, drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.create_task(self._stop_late())
        await super().shutdown(sockets)
        late.cancel()

    async def _stop_late(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._worker.stop()

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


def bounded(limits: Limits) -> type[Bounded]:
    """Connections with these limits."""
    return type("Bounded", (Bounded,), {"header_bytes": limits.header_bytes, "header_seconds": limits.header_seconds})
