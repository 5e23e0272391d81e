"""The client of a load, in a process of its own: raw sockets, one small parser, no library between it and the bytes.

``python -m adaponder.bench.serve_client`` reads a plan from standard input and writes the answers to standard output,
both as JSON. A process of its own, so that neither the server nor whoever measures takes time from it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from adaponder.bench.serve_load import Answer
from adaponder.errors import EvaluationError, InputError

# Idle connections that are kept for later requests.
_MOST_IDLE = 1024


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    secure: bool
    prefix: str
    key: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Target:
        """The target that a URL names; raises :class:`InputError` where it names none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise InputError(f"--url {url}: http://HOST:PORT is needed")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise InputError(f"--url {url}: its port is no number from 1 to 65535") from None
        return cls(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"), key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of one request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Exchange(asyncio.Protocol):
    """One connection; ``begin`` sends a request and returns a future that is done when its answer is complete."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.transport, self.answer = clock, None, None
        self.done: asyncio.Future[None] | None = None
        self.buffer, self.body, self.head, self.left = bytearray(), bytearray(), False, -1
        self.chunked = self.streams = False
        self.keep = True

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def begin(self, request: bytes, answer: Answer) -> asyncio.Future[None]:
        assert self.transport is not None
        self.answer, self.done = answer, asyncio.get_running_loop().create_future()
        self.buffer, self.body, self.head, self.left, self.keep = bytearray(), bytearray(), True, -1, True
        answer.sent = self.clock.now()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if self.answer is None:
            self.keep = False  # bytes nobody asked for
            return
        self.buffer += data
        try:
            if self.head and not self._read_head():
                return
            if self._read_body():
                self._finish(None)
        except (ValueError, IndexError, KeyError, AttributeError, TypeError) as problem:
            self._finish(f"not an answer: {type(problem).__name__}: {problem}"[:200])

    def connection_lost(self, exc: Exception | None) -> None:
        self.keep = False
        if self.answer is not None:
            unbounded = not self.head and not self.chunked and self.left < 0
            self._finish(None if unbounded and exc is None else "the connection was closed before the answer's end")

    def _read_head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0 or self.answer is None:
            return False
        first, *lines = bytes(self.buffer[:end]).decode("latin-1").split("\r\n")
        del self.buffer[: end + 4]
        self.answer.status = int(first.split(" ")[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.answer.served_by = headers.get("x-served-by")
        self.chunked = "chunked" in headers.get("transfer-encoding", "")
        self.streams = headers.get("content-type", "").startswith("text/event-stream")
        self.left = int(headers.get("content-length", -1))
        self.keep = headers.get("connection", "").lower() != "close"
        self.head = False
        return True

    def _read_body(self) -> bool:
        """Takes what has come of the body; returns whether it is complete."""
        complete = False
        if self.chunked:
            complete = self._unframe()
        else:
            self.body += self.buffer
            self.buffer.clear()
            complete = self.left >= 0 and len(self.body) >= self.left
        if self.streams:
            self._read_events()
        return complete

    def _unframe(self) -> bool:
        """Moves whole chunks from ``buffer`` to ``body``; returns whether the last one has come."""
        buffer, start = self.buffer, 0
        try:
            while (line := buffer.find(b"\r\n", start)) >= 0:
                size = int(buffer[start:line].split(b";")[0], 16)
                if len(buffer) < line + 4 + size:
                    return False
                if size == 0:
                    return True
                self.body += buffer[line + 2 : line + 2 + size]
                start = line + 4 + size
            return False
        finally:
            del buffer[:start]

    def _read_events(self) -> None:
        """Counts the tokens of the whole events in ``body``."""
        answer = self.answer
        end = self.body.rfind(b"\n\n")
        if end < 0 or answer is None:
            return
        events = bytes(self.body[:end]).split(b"\n\n")
        del self.body[: end + 2]
        tokens = 0
        for event in events:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                tokens += _tokens_of(json.loads(event[6:]), answer)
        if tokens:
            answer.arrivals.append((self.clock.now(), tokens))

    def _finish(self, error: str | None) -> None:
        answer, self.answer = self.answer, None
        if answer is None:
            return
        answer.ended = self.clock.now()
        answer.error = error or answer.error
        if answer.status == 200 and answer.error is None and self.streams and not answer.tokens:
            answer.error = "the stream ended without usage"
        if answer.status != 200 and error is None:
            answer.error = f"status {answer.status}: {bytes(self.body[:120]).decode('utf-8', 'replace')}"
        self.keep = self.keep and error is None
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


def _tokens_of(chunk: dict[str, Any], answer: Answer) -> int:
    """Tokens whose text a chunk of a stream carries; its usage and error are noted."""
    if "error" in chunk:
        answer.error = str(chunk["error"])[:200]
        return 0
    if usage := chunk.get("usage"):
        answer.tokens = usage["completion_tokens"]
        answer.mean_depth = (usage.get("adaponder") or {}).get("mean_depth")
    tokens = 0
    for choice in chunk.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        told = (choice.get("adaponder") or {}).get("tokens")
        tokens += len(told) if told else bool(text)
    return tokens


class Clock:
    """Seconds since the load began."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.began


class Client:
    """Sends each request when it is due, on an idle connection or another one."""

    def __init__(self, target: Target) -> None:
        self.target, self.clock = target, Clock()
        self.idle: list[Exchange] = []

    async def run(self, bodies: Sequence[dict[str, Any]], due: Sequence[float], *, timeout: float) -> list[Answer]:
        """The answers in the order of the bodies; one that takes longer than ``timeout`` seconds has failed."""
        requests = [self.target.request("POST", "/v1/completions", json.dumps(body).encode()) for body in bodies]
        self.clock = Clock()
        answers = [Answer(due=when) for when in due]
        tasks = []
        for request, answer in zip(requests, answers, strict=True):
            if (wait := answer.due - self.clock.now()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self._one(request, answer, timeout)))
        if tasks:
            await asyncio.wait(tasks)
        for exchange in self.idle:
            if exchange.transport is not None:
                exchange.transport.close()
        return answers

    async def _one(self, request: bytes, answer: Answer, timeout: float) -> None:
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(timeout):
                exchange = await self._connection()
                await exchange.begin(request, answer)
        except TimeoutError:
            answer.error = f"no answer within {timeout:g} s"
        except OSError as problem:
            answer.error = f"no connection: {type(problem).__name__}"
        if exchange is None or exchange.transport is None:
            return
        if answer.error is None and exchange.keep and len(self.idle) < _MOST_IDLE:
            self.idle.append(exchange)
        else:
            exchange.answer = None
            exchange.transport.abort()

    async def _connection(self) -> Exchange:
        while self.idle:
            exchange = self.idle.pop()
            if exchange.keep and exchange.transport is not None and not exchange.transport.is_closing():
                exchange.clock = self.clock
                return exchange
        target = self.target
        context = ssl.create_default_context() if target.secure else None
        _, exchange = await asyncio.get_running_loop().create_connection(
            lambda: Exchange(self.clock), target.host, target.port, ssl=context
        )
        return exchange


def run_client(
    url: str, bodies: Sequence[dict[str, Any]], due: Sequence[float], *, key: str | None, timeout: float
) -> list[Answer]:
    """The answers to a load, sent by a process of its own."""
    plan = {"url": url, "bodies": list(bodies), "due": list(due), "key": key, "timeout": timeout}
    command = [sys.executable, "-m", "adaponder.bench.serve_client"]
    longest = (max(due) if due else 0.0) + timeout + 60.0
    done = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, check=False, timeout=longest)
    if done.returncode != 0:
        raise EvaluationError(f"the client of the load failed: {done.stderr.strip().splitlines()[-1:]}")
    return [
        Answer(**(one | {"arrivals": [(when, count) for when, count in one["arrivals"]]}))
        for one in json.loads(done.stdout)
    ]


def main() -> None:
    """Reads the plan, runs it, writes the answers."""
    plan = json.load(sys.stdin)
    client = Client(Target.of(plan["url"], plan["key"]))
    running = client.run(plan["bodies"], plan["due"], timeout=plan["timeout"])
    try:
        import uvloop
    except ImportError:
        answers = asyncio.run(running)
    else:
        answers = uvloop.run(running)
    json.dump([asdict(one) for one in answers], sys.stdout)


if __name__ == "__main__":
    main()
