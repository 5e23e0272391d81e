"""Decides which requests reach the routes: checks Host, Origin and API key, then the body's type, length and duration.

If the server has API keys, a request without a valid one gets only ``/health`` and the login form. The path is read
from the ASGI scope, where the router reads it too. A URL built from headers could name another path, because the client
chooses the headers.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaponder.serving.protocol import ApiError
from adaponder.serving.settings import Key, Limits, Settings
from adaponder.serving.worker import Worker

COOKIE = "adaponder_key"
# The key in the ASGI scope under which a request's :class:`adaponder.serving.settings.Client` is stored.
CLIENT = "adaponder.client"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: with it browsers send the form's Origin as null, which is refused.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
# Header of a refusal that is sent before the body is read. The connection must be closed, because the next bytes are
# the rest of this body and not a new request.
_CLOSE = {"connection": "close"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>AdaPonder: key</title></head>
<body><main><h1>AdaPonder</h1><form method="post" action="login">
<p><label for="key">API key</label></p>
<p><input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Open</button></p><p role="status">{status}</p></form></main></body></html>
"""
# Delay of the answer to a wrong key, to slow down guessing.
_WRONG_SECONDS = 0.2
# Maximum bytes of a refused body that are still read, and the time for reading them.
_DISCARDED_BYTES, _DISCARD_SECONDS = 1 << 22, 1.0


def route_path(scope: Scope) -> str:
    """Returns the path that the router matches."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


class AccessControl:
    """The outermost ASGI layer: checks Host, Origin and key, and adds security headers to every answer.

    This layer does not use ``worker``; a Ray replica, which has only the app, checks the engine's health through it.
    """

    def __init__(self, app: ASGIApp, settings: Settings, worker: Worker):
        self.app, self.access, self.limits, self.worker = app, settings.access, settings.limits, worker
        self._with_cors = CORSMiddleware(
            self._checked,
            allow_origins=self.access.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "x-request-id"),
            expose_headers=("x-request-id", "retry-after"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no routes of other types
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    answer.setdefault(name, value)
                answer.setdefault("cache-control", "no-store")
                answer["x-request-id"] = request_id
            await send(message)

        await self._with_cors(scope, receive, send_with_headers)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive, Headers(scope=scope))
        except ApiError as problem:
            answer = problem.response()
        await (self.app if answer is None else answer)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, headers: Headers) -> Response | None:
        """Returns the response if it is the login form or its redirect; ``None`` passes the request on to the app.

        Stores the client in the scope. Raises :class:`ApiError` if the request is refused.
        """
        self._check_host(headers)
        self._check_origin(headers)
        path = route_path(scope)
        if path == "/health":
            return None
        if not self.access.keys:
            address = scope.get("client") or ("",)
            scope[CLIENT] = self.access.client_of(address[0], headers.getlist("x-forwarded-for"))
            return None
        if path == "/login":
            return await self._login(scope, receive, headers)
        if (key := self._key(headers)) is not None:
            scope[CLIENT] = key.client
            return None
        if "authorization" in headers or COOKIE in headers.get("cookie", ""):
            await asyncio.sleep(_WRONG_SECONDS)
        if path == "/" and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            return _form(401, "")
        raise ApiError(
            401,
            "an API key is needed: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer", **_CLOSE},
        )

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        match = _HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        if match is None:
            raise ApiError(400, "Host must be one name or address", code="invalid_host", headers=_CLOSE)
        if not self.access.knows_host(match[1]):
            name = match[1][:100]
            message = f"Host {name} is not a name of this server; add it with adaponder serve --allow-host"
            raise ApiError(421, message, code="invalid_host", headers=_CLOSE)

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        same_origin = {f"{scheme}://{headers['host'].lower()}" for scheme in ("http", "https")}
        if origin is not None and origin not in self.access.origins and origin.lower() not in same_origin:
            message = "pages of this Origin may not call the server; allow it with adaponder serve --allow-origin"
            raise ApiError(403, message, code="invalid_origin", headers=_CLOSE)

    def _key(self, headers: Headers) -> Key | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.access.key_of(key.strip())
        # http.cookies would drop all cookies behind one that it cannot read, such as another program's on localhost.
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        return None if cookie is None else self.access.key_of_cookie(cookie)

    async def _login(self, scope: Scope, receive: Receive, headers: Headers) -> Response:
        """Returns the login form, or for a valid key a redirect that sets the login cookie."""
        if scope["method"] == "GET":
            return _form(200, "")
        if scope["method"] != "POST":
            raise ApiError(405, "/login takes GET and POST", headers={"allow": "GET, POST"})
        content = await read_body(receive, headers, self.limits)
        form = content.decode("ascii", "replace") if len(content) <= 4096 else ""
        if (key := self.access.key_of(parse_qs(form).get("key", [""])[0])) is None:
            await asyncio.sleep(_WRONG_SECONDS)
            return _form(401, "That is not a key of this server.")
        answer = RedirectResponse(".", status_code=303)
        answer.set_cookie(
            COOKIE, key.cookie, httponly=True, samesite="strict", secure=scope.get("scheme") == "https", path="/"
        )
        return answer


def _form(status: int, message: str) -> HTMLResponse:
    return HTMLResponse(_FORM.format(status=message), status_code=status)


class BodyLimits:
    """An ASGI layer that reads the whole body of a POST to one of ``paths`` before the app runs.

    Refuses a body that is too long or too slow, or whose Content-Type is not JSON.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str], limits: Limits):
        self.app, self.paths, self.limits = app, paths, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in self.paths:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                message = "Content-Type must be application/json"
                raise ApiError(415, message, code="unsupported_media_type", headers=_CLOSE)
            body = await read_body(receive, headers, self.limits)
        except ApiError as problem:
            response = problem.response()
            await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
            await send({"type": "http.response.body", "body": response.body, "more_body": True})
            await _discard_body(receive)
            await send({"type": "http.response.body"})
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)


async def _discard_body(receive: Receive) -> None:
    """Discards the rest of a refused body, up to a fixed number of bytes and seconds.

    Without discarding, closing the connection with unread data would reset it, and the client could lose the response.
    """
    remaining = _DISCARDED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while remaining > 0 and (message := await receive()).get("more_body", False):
                remaining -= len(message["body"])


async def read_body(receive: Receive, headers: Headers, limits: Limits) -> bytes:
    """Returns the body; raises :class:`ApiError` if it is too long (413), too slow (408) or the client leaves (400)."""
    too_long = ApiError(413, f"the body is longer than {limits.body_bytes:,} bytes; shorten it", headers=_CLOSE)
    if int(headers.get("content-length", "0")) > limits.body_bytes:  # the HTTP parser has checked that it is a number
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ApiError(400, "the client disconnected before its request was complete", headers=_CLOSE)
                body += message.get("body", b"")
                if len(body) > limits.body_bytes:
                    raise too_long
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_seconds:g} seconds; send it at once"
        raise ApiError(408, message, headers=_CLOSE) from None
