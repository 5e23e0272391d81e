"""A request's body, read within its limits and taken apart by the parser of its schema."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest

from adaponder.serving.errors import ApiError, invalid
from adaponder.serving.settings import Limits

_Body = TypeVar("_Body", bound=BaseModel)
# What a client whose body was not read to its end is told: its next bytes are no request.
_CLOSE = {"connection": "close"}


async def read_bytes(request: HttpRequest, limits: Limits) -> bytes:
    """The body; raises 413 where it is too long, and 408 where it does not come."""
    declared = request.headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit() or len(declared) > 18:
        raise ApiError(400, "Content-Length: a whole number is needed", headers=_CLOSE)
    if int(declared) > limits.body_bytes:
        raise _too_long(limits)
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await request.receive()
                if message["type"] != "http.request":
                    raise ApiError(400, "the client left before its request had come", headers=_CLOSE)
                part = message.get("body", b"")
                size += len(part)
                if size > limits.body_bytes:
                    raise _too_long(limits)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {limits.body_seconds:g} seconds; send it at once", headers=_CLOSE
        ) from None


async def read_body(request: HttpRequest, schema: type[_Body], limits: Limits) -> _Body:
    """The body as ``schema`` says, or the error to be answered."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Content-Type: application/json is needed", headers=_CLOSE, code="unsupported_media_type")
    content = await read_bytes(request, limits)
    try:
        return schema.model_validate_json(content)
    except ValidationError as problem:
        raise invalid(problem) from None


def _too_long(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is longer than {limits.body_bytes:,} bytes; shorten it", headers=_CLOSE)
