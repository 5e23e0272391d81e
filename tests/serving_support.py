"""A server over a tiny model, on a socket of its own, for tests that speak HTTP."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from adaponder import AdaPonderForCausalLM, Engine
from adaponder.serving.routes import make_app
from adaponder.serving.served import Served
from adaponder.serving.server import address_of, config_of, listen
from adaponder.serving.settings import Settings
from adaponder.serving.worker import Worker
from adaponder.text import pieces
from support import tiny
from word_support import small_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


class Running:
    """Holds a running server: its address, worker and engine."""

    def __init__(self, address: str, worker: Worker, loop: asyncio.AbstractEventLoop, server: uvicorn.Server):
        self.address, self.worker, self.loop, self.server = address, worker, loop, server
        self.engine: Any = None
        self._client = self.client()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=30, verify=False, **options)  # there is no TLS to verify

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self._client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._client.get(path, **options)

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Returns the values of ``/metrics`` by name and labels."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}

    def close(self) -> None:
        self._client.close()

    def settled(self, seconds: float = 10.0) -> dict[str, int]:
        """Returns the engine's statistics once nothing is under way."""

        async def wait() -> dict[str, int]:
            async with asyncio.timeout(seconds):
                while self.worker.sequences or self.worker.jobs or self.engine.busy:
                    await asyncio.sleep(0.01)
            return self.engine.statistics

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(seconds + 1)


def tiny_served(model: AdaPonderForCausalLM | None = None, *, template: str | None = None, **options: Any) -> Served:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = template
    return Served(model or tiny(), tokenizer, name="tiny", **options)


def text_of(ids: Sequence[int]) -> str:
    return "".join(pieces(small_tokenizer(), ids))


def request_bytes(body: dict[str, Any], path: str = "/v1/completions", *, client: str = "") -> bytes:
    """Returns a POST as it is written to a socket, forwarded for a client."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: {client}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


def connect(server: Running, *, source: str = "127.0.0.1") -> socket.socket:
    address = urlsplit(server.address)
    return socket.create_connection((address.hostname, address.port), timeout=10, source_address=(source, 0))


@contextmanager
def serving(
    served: Served | None = None,
    settings: Settings | None = None,
    *,
    engine: Callable[[], Any] | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Runs a server in a thread; ``options`` are the engine's."""
    served, settings = served or tiny_served(), settings or Settings(lanes=4)
    made: list[Any] = []

    def open_engine() -> Any:
        made.append(Engine(served.model, **({"lanes": settings.lanes} | options)) if engine is None else engine())
        return made[0]

    worker = Worker(open_engine, served)
    listening = listen("127.0.0.1", 0)
    config = config_of(make_app(worker, settings), settings)
    config.timeout_graceful_shutdown = 5
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    while not (server.started and worker.state != "starting"):
        thread.join(0.01)
    running = Running(address_of(listening), worker, loops[0], server)
    running.engine = made[0] if made else None
    try:
        yield running
    finally:
        running.close()
        server.should_exit = True
        thread.join(20)
        listening.close()
