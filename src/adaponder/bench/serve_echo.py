"""A server with nothing behind it: it sends prepared events, so that what a load shows is the client's own limit.

``python -m adaponder.bench.serve_echo PORT TICK`` listens on 127.0.0.1 and prints its address. Every request gets
``max_tokens`` events, one to each stream per tick, or as fast as they are taken where the tick is 0.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"cache-control: no-store\r\n\r\n"
)


def framed(event: bytes) -> bytes:
    """One event as a chunk of a chunked answer."""
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def _chunk(**fields: Any) -> bytes:
    head = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_700_000_000, "model": "echo"}
    return framed(json.dumps(head | fields).encode())


_TOKEN = _chunk(choices=[{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}])


class Stream:
    """One answer under way."""

    def __init__(self, transport: asyncio.Transport, tokens: int) -> None:
        self.transport, self.tokens, self.left = transport, tokens, tokens

    def advance(self) -> bool:
        """Sends the next event; returns whether more are to come."""
        if self.left == self.tokens:
            self.transport.write(_HEAD)
        self.left -= 1
        self.transport.write(_TOKEN)
        if self.left > 0:
            return True
        usage = {"prompt_tokens": 1, "completion_tokens": self.tokens, "adaponder": {"mean_depth": 2.5}}
        done = _chunk(choices=[], usage=usage) + framed(b"[DONE]") + b"0\r\n\r\n"
        self.transport.write(done)
        return False


class Echo(asyncio.Protocol):
    """Reads requests and adds their streams to the list that the ticking loop serves."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams, self.buffer, self.transport = streams, bytearray(), None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0 or self.transport is None:
            return
        head = bytes(self.buffer[:end]).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(self.buffer) < end + 4 + length:
            return
        body = json.loads(self.buffer[end + 4 : end + 4 + length] or b"{}")
        self.buffer.clear()
        self.streams.append(Stream(self.transport, body.get("max_tokens", 16)))


async def serve(port: int, tick: float) -> None:
    """Serves until it is ended; prints the address first."""
    streams: list[Stream] = []
    server = await asyncio.get_running_loop().create_server(lambda: Echo(streams), "127.0.0.1", port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    loop, due = asyncio.get_running_loop(), 0.0
    while True:
        due = max(due + tick, loop.time())
        await asyncio.sleep(due - loop.time() if tick else 0 if streams else 0.001)
        streams[:] = [one for one in streams if not one.transport.is_closing() and one.advance()]


def main() -> None:
    """The command line."""
    running = serve(int(sys.argv[1]), float(sys.argv[2]))
    try:
        import uvloop
    except ImportError:
        asyncio.run(running)
    else:
        uvloop.run(running)


if __name__ == "__main__":
    main()
