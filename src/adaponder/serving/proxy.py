"""What Ray's proxy puts before every app: bounded headers, and none by which a client would steer Ray.

Ray calls :func:`layers` in the proxy's process, which imports no more than this needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

# Longest headers in bytes, and seconds in which they must come; as in ``32768,10``.
VARIABLE = "ADAPONDER_PROXY_HEADERS"
# With these a client could tell Ray to go on generating after it has left, or for how long.
_RAYS_OWN = frozenset({b"x-request-disconnect-disabled", b"x-request-timeout-seconds"})

Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


def layers() -> list[Any]:
    """Starlette's description of :class:`Guard`; the proxy's own HTTP server is bounded, too.

    Ray gives its server no protocol, so it takes the one called ``auto``. This runs before the server is made.
    """
    import uvicorn.config
    from starlette.middleware import Middleware

    from adaponder.serving.connections import Bounded

    longest, _, seconds = os.environ.get(VARIABLE, f"{Bounded.header_bytes},{Bounded.header_seconds}").partition(",")
    Bounded.header_bytes, Bounded.header_seconds = int(longest), float(seconds)
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "adaponder.serving.connections:Bounded"
    return [Middleware(Guard, header_bytes=Bounded.header_bytes)]


class Guard:
    """The innermost layer before Ray; also where a server of another kind has read the headers."""

    def __init__(self, app: ASGIApp, header_bytes: int) -> None:
        self.app, self.header_bytes = app, header_bytes

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            return  # no route takes one
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
            if size + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > self.header_bytes:
                await _refuse(send, self.header_bytes)
                return
            scope["headers"] = [pair for pair in scope["headers"] if pair[0].lower() not in _RAYS_OWN]
        await self.app(scope, receive, send)


async def _refuse(send: Any, most: int) -> None:
    message = f"the headers are longer than {most} bytes"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "headers_too_large"}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 431, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
