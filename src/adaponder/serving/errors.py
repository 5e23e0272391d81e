"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from adaponder.errors import in_one_line

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Fields of the engine's request that have another name or place in a body.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "log_probabilities": "logprobs",
    "samples": "n",
    "stop_ids": "stop",
    "min_new_tokens": "adaponder.min_tokens",
    "depths": "adaponder.depths",
    "top_k": "adaponder.top_k",
    "min_p": "adaponder.min_p",
    "repetition_penalty": "adaponder.repetition_penalty",
    "policy": "adaponder.policy",
    "tau": "adaponder.tau",
    "max_iterations": "adaponder.max_iterations",
    "iteration_top": "adaponder.iteration_top",
}
_UNSHOWABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class ErrorText(BaseModel):
    """What went wrong: in words, of which kind, and in which field."""

    model_config = ConfigDict(title="Error")
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """What every answer but a good one holds."""

    error: ErrorText


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one line that names the field, the value and the cure.
        param: the field, by OpenAI's name.
        code: a word for programs.
        headers: further ones of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an answer of this status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": _UNSHOWABLE.sub("�", message), "type": kind, "param": param, "code": code}}


def refused(problem: Exception, *, param: str | None = None) -> ApiError:
    """What an :class:`adaponder.errors.AdaPonderError` about a request is answered."""
    said = in_one_line(problem)
    field = re.match(r"([a-z_.]+)(?=[=:\[ ])", said)
    found = param or (None if field is None else _FIELDS.get(field[1], field[1]))
    if field is not None:
        said = _body_name(field[1]) + said[len(field[1]) :]
    said = re.sub("[a-z_]+(?==)", lambda other: _body_name(other[0]), said)
    too_long = found in ("prompt", "max_tokens") and ("positions end" in said or "leaves room" in said)
    return ApiError(400, said, param=found, code="context_length_exceeded" if too_long else None)


def _body_name(field: str) -> str:
    """What a body calls a field of the engine's request."""
    return _FIELDS.get(field, field).removeprefix("adaponder.")


def invalid(problem: ValidationError) -> ApiError:
    """What is wrong with a body, by the field's name; where a field may be several things, of the nearest of them.

    Nearest is what goes wrong deepest inside, and there what is of the right type.
    """
    wrong = problem.errors(include_url=False, include_context=False, include_input=False)
    first = max(wrong, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    place = [str(part) for part in first["loc"] if not _of_union(part)]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON that can be read: {in_one_line(ValueError(first['msg']))}")
    name = ".".join(place)[:200] or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name}: there is no such field here; leave it out", param=name, code="unknown_field")
    if first["type"] == "none_required":
        return ApiError(400, f"{name}: this server does not support it; leave it out", param=name, code="unsupported")
    return ApiError(400, f"{name or 'the body'}: {in_one_line(ValueError(first['msg']))}", param=name)


def _of_union(part: int | str) -> bool:
    """Whether this part of a place names a kind of value and not a field."""
    return isinstance(part, str) and not re.fullmatch(r"(?!(str|int|float|bool|none)$)\w+", part)
