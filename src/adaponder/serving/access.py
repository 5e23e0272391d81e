"""Who may come in: Host, Origin and key, asked of every request before any route sees it.

Closed by default: without a key only ``/health`` and the form that takes one are answered. What is judged is the path
that the router will match (the scope's), never a URL put together from headers.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaponder.serving.bodies import read_bytes
from adaponder.serving.context import SALT
from adaponder.serving.errors import ApiError
from adaponder.serving.settings import Key, Settings
from adaponder.serving.worker import Worker

COOKIE = "adaponder_key"
REQUEST_ID = "adaponder.request_id"
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: with it browsers send the form's Origin as null, which is nobody's.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>AdaPonder: key</title></head>
<body><main><h1>AdaPonder</h1><form method="post" action="login">
<p><label for="key">API key</label></p>
<p><input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Open</button></p><p role="status">{said}</p></form></main></body></html>
"""
# A wrong key is answered a little later: guessing gets slower, and a typing mistake costs nothing.
_WRONG_SECONDS = 0.2


class AccessControl:
    """The outermost layer of the app.

    Args:
        app: everything behind it.
        settings: who may come in, and limits of the form's body.
        worker: what runs behind the app, for whoever holds the app itself.
    """

    def __init__(self, app: ASGIApp, settings: Settings, worker: Worker):
        self.app, self.access, self.limits, self.worker = app, settings.access, settings.limits, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no route takes anything else
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        number = given if _ID.fullmatch(given) else secrets.token_hex(16)
        origin = headers.get("origin")
        scope[REQUEST_ID] = number

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    answer.setdefault(name, value)
                answer.setdefault("cache-control", "no-store")
                answer["x-request-id"] = number
                if origin is not None and origin in self.access.origins:
                    answer["access-control-allow-origin"] = origin
                    answer["access-control-expose-headers"] = "x-request-id, retry-after"
                    answer["cross-origin-resource-policy"] = "cross-origin"
                    answer.add_vary_header("Origin")
            await send(message)

        try:
            answer = await self._answer(scope, receive, headers, origin)
        except ApiError as problem:
            answer = JSONResponse(problem.body(), status_code=problem.status, headers=problem.headers)
        await (self.app if answer is None else answer)(scope, receive, dressed)

    async def _answer(self, scope: Scope, receive: Receive, headers: Headers, origin: str | None) -> Response | None:
        """What is answered here; ``None``: the routes may see the request."""
        self._check_host(headers)
        self._check_origin(headers, origin)
        if origin in self.access.origins and scope["method"] == "OPTIONS":
            allowed = {"access-control-allow-methods": "GET, POST", "access-control-max-age": "600"}
            allowed["access-control-allow-headers"] = "authorization, content-type, x-request-id"
            return Response(status_code=204, headers=allowed)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == "/health":
            return None
        if not self.access.keys:
            return None
        if path == "/login":
            return await self._login(scope, receive)
        key = self._key(headers)
        if key is not None:
            scope[SALT] = key.salt
            return None
        if path == "/" and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            return _form(401, "")
        raise ApiError(
            401,
            "an API key is needed: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer", "connection": "close"},
        )

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        match = _HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        if match is None:
            raise ApiError(400, "Host: one name or address is needed", code="invalid_host", headers=_CLOSE)
        if not self.access.knows_host(match[1]):
            raise ApiError(
                421,
                f"Host: {match[1][:100]} is not a name of this server; adaponder serve --allow-host adds one",
                code="invalid_host",
                headers=_CLOSE,
            )

    def _check_origin(self, headers: Headers, origin: str | None) -> None:
        if origin is None or origin in self.access.origins:
            return
        parts = urlsplit(origin) if origin.isascii() and len(origin) < 300 else None
        if parts is None or parts.scheme not in ("http", "https") or parts.netloc.lower() != headers["host"].lower():
            raise ApiError(
                403,
                "Origin: pages elsewhere may not call this server; adaponder serve --allow-origin lets one",
                code="invalid_origin",
                headers=_CLOSE,
            )

    def _key(self, headers: Headers) -> Key | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.access.key_of(given.strip())
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return None
        return None if morsel is None else self.access.key_of_cookie(morsel.value)

    async def _login(self, scope: Scope, receive: Receive) -> Response:
        """The form that takes a key, and the cookie that a right one is answered with."""
        if scope["method"] == "GET":
            return _form(200, "")
        if scope["method"] != "POST":
            raise ApiError(405, "/login takes GET and POST", headers={"allow": "GET, POST"})
        content = await read_bytes(HttpRequest(scope, receive), self.limits)
        fields: dict[str, Any] = {}
        if len(content) <= 4096:
            fields = parse_qs(content.decode("ascii", "replace"), max_num_fields=4, strict_parsing=False)
        key = self.access.key_of(fields.get("key", [""])[0])
        if key is None:
            await asyncio.sleep(_WRONG_SECONDS)
            return _form(401, "That is not a key of this server.")
        answer = RedirectResponse(".", status_code=303)
        answer.set_cookie(
            COOKIE, key.cookie, httponly=True, samesite="strict", secure=scope.get("scheme") == "https", path="/"
        )
        return answer


_CLOSE = {"connection": "close"}


def _form(status: int, said: str) -> HTMLResponse:
    return HTMLResponse(_FORM.format(said=said), status_code=status)
