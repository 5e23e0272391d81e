"""Sends broken HTTP for minutes, beside silent, slow and unreading clients: others get their answers, nothing leaks.

``python tests/serving/fuzz.py`` runs it; ``--record`` writes ``fuzz.json`` beside this file.
"""

import argparse
import asyncio
import random
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("src", "", "tests")]

from soak import same_as_alone

from serving_support import request_bytes
from soak_support import NAME, run_parts, serving, steady_memory

RECORD = Path(__file__).with_suffix(".json")
_PIECES = (
    *(b"\r\n\r\n", b"\x00", b"\xff\xfe", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n"),
    *(b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Transfer-Encoding: chunked, identity\r\n", b"Expect: 100-continue\r\n"),
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    *(b"Range: bytes=" + b"0-," * 200 + b"\r\n", b"Host: a\r\nHost: b\r\n", b"X: " + b"y" * 40_000 + b"\r\n"),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"FFFFFFFFFFFFFFFF\r\n"),
    *(b"HTTP/9.9", b"GET " + b"/" * 30_000, b"{" * 2_000),
)


def good_request(draw: random.Random, host: str) -> bytes:
    """Returns a valid request, from which broken ones are made."""
    if draw.random() < 0.3:
        path = draw.choice(["/health", "/ready", "/metrics", "/v1/models", "/", "/page/x", "/openapi.json"])
        return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/score"])
    body = {"model": NAME, "prompt": "past the mill", "max_tokens": 4, "stream": draw.random() < 0.5}
    return request_bytes(body, path)


def broken(draw: random.Random, host: str) -> bytes:
    """Returns a request with bytes changed, cut out, doubled or inserted, or noise alone."""
    if draw.random() < 0.05:
        return draw.randbytes(draw.randint(1, 3000))
    data = bytearray(good_request(draw, host))
    for _ in range(draw.randint(1, 4)):
        place, kind = draw.randrange(len(data) + 1), draw.random()
        if kind < 0.4:
            data[place:place] = draw.choice(_PIECES)
        elif kind < 0.7:
            data[place : place + draw.randint(1, 20)] = draw.randbytes(draw.randint(0, 12))
        elif kind < 0.85:
            del data[place:]
            data += b"x" * draw.randint(0, 3)
        else:
            data += data[place:]
        if not data:
            data += b"\r"
    return bytes(data)


async def throw(host: str, port: int, data: bytes, patience: float) -> list[int]:
    """Sends bytes and returns the statuses of what comes back within so many seconds."""
    try:
        incoming, writer = await asyncio.open_connection(host, port)
    except OSError:
        return [-1]
    answer = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(patience):
            writer.write(data)
            await writer.drain()
            while part := await incoming.read(65536):
                answer += part
    writer.transport.abort()
    return [int(line[9:12]) for line in answer.split(b"\r\n") if line[:9] == b"HTTP/1.1 " and line[9:12].isdigit()]


async def linger(host: str, port: int, data: bytes, seconds: float, *, slowly: bool) -> None:
    """Sends bytes one by one or at once, reads nothing, and leaves after so many seconds."""
    with suppress(OSError, TimeoutError):
        _, writer = await asyncio.open_connection(host, port, limit=1)
        writer.transport.pause_reading()
        async with asyncio.timeout(seconds):
            for place in range(len(data) if slowly else 0):
                writer.write(data[place : place + 1])
                await asyncio.sleep(0.1)
            writer.write(b"" if slowly else data)
            await asyncio.sleep(seconds)
        writer.transport.abort()


def attack(url: str, *, requests: int, idlers: int, seed: int, good: int, seconds: float = 3.0) -> dict[str, Any]:
    """Sends broken requests beside idle, slow and unreading clients, and checks streams of other clients meanwhile."""
    place = urlsplit(url)
    host, port = place.hostname or "", place.port or 0
    draw = random.Random(seed)
    thrown = [broken(draw, place.netloc) for _ in range(requests)]
    statuses: Counter[int] = Counter()
    # It asks for much, but not for so much that the queue is full, which is 429.
    greedy = {"model": NAME, "prompt": ["a", "b", "c"], "n": 8, "max_tokens": 60, "stream": True}
    greedy |= {"adaponder": {"depth": True, "gates": True, "iteration_top": 20, "ignore_eos": True}}
    nuisances = [b""] * idlers + [request_bytes(greedy)] * max(1, idlers // 4)

    async def throw_all() -> None:
        gate = asyncio.Semaphore(20)

        async def throw_one(data: bytes) -> None:
            async with gate:
                statuses.update(await throw(host, port, data, 0.5) or [0])

        slow = good_request(random.Random(seed), place.netloc)
        await asyncio.gather(
            *(linger(host, port, data, seconds, slowly=False) for data in nuisances),
            *(linger(host, port, slow, seconds, slowly=True) for _ in range(idlers)),
            *(throw_one(data) for data in thrown),
        )

    attacker = threading.Thread(target=lambda: asyncio.run(throw_all()))
    attacker.start()
    found = same_as_alone(url, good, seed, over=attacker.join)
    assert not any(status >= 500 for status in statuses), statuses
    assert statuses[-1] == 0, f"{statuses[-1]} connections were not taken"
    return {
        "thrown": requests,
        "answers_by_status": {str(status): count for status, count in sorted(statuses.items())},
        "silent_or_slow": idlers + len(nuisances),
        "good_streams": good,
        "equal_to_solo": found["equal_to_solo"],
    }


def bytes_at_the_socket(options: argparse.Namespace) -> dict[str, Any]:
    sizes = {name: getattr(options, name) for name in ("requests", "idlers", "seed", "good")}
    with serving() as server:
        attack(server.url, requests=200, idlers=4, seed=options.seed + 1, good=4)
        with steady_memory(server, 64) as memory:
            found = attack(server.url, **sizes)
            assert server.process.poll() is None
        return found | memory


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--idlers", type=int, default=60)
    parser.add_argument("--good", type=int, default=100)


if __name__ == "__main__":
    sys.exit(run_parts({"bytes at the socket": bytes_at_the_socket}, RECORD, add_options, __doc__ or ""))
