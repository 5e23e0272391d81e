"""The OpenAPI document: bodies are read by hand, so their schemas are said here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from adaponder.serving.errors import ErrorAnswer
from adaponder.serving.protocol import ChatBody, CompletionBody, DetokenizeBody, ScoreBody, TokenizeBody
from adaponder.serving.served import Served
from adaponder.serving.settings import Limits

_REF = "#/components/schemas/{model}"
_BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, ScoreBody)
_SAID = {
    400: "Something in the request cannot be honoured; `param` names it.",
    401: "An API key is needed.",
    403: "A page elsewhere may not call this server.",
    404: "There is no such model, file or route.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    421: "The server does not have this name.",
    429: "Too much is under way; `Retry-After` says when to try again.",
    500: "The server failed to make this answer.",
    503: "The server is starting or draining; `Retry-After` says when to try again.",
}


def operation(
    about: str,
    body: type[BaseModel] | None,
    errors: tuple[int, ...],
    *,
    kind: str = "application/json",
    streams: bool = False,
    closed: bool = True,
) -> dict[str, Any]:
    """Arguments of ``add_api_route`` that say what a route takes and answers."""
    kinds = {kind: {}} | ({"text/event-stream": {}} if streams else {})
    told: dict[int | str, dict[str, Any]] = {200: {"description": about, "content": kinds}}
    every = {400, 403, 421, *errors} | ({401} if closed else set())
    for status in sorted(every):
        content = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorAnswer.__name__)}}}
        told[status] = {"description": _SAID[status], "content": content}
    extra: dict[str, Any] = {"responses": {str(status): one for status, one in told.items()}}
    if closed:
        extra["security"] = [{"key": []}, {}]
    if body is not None:
        schema = {"schema": {"$ref": _REF.format(model=body.__name__)}}
        extra["requestBody"] = {"required": True, "content": {"application/json": schema}}
    return {"summary": about, "response_class": Response, "response_model": None, "openapi_extra": extra}


def describe(app: FastAPI, served: Served, limits: Limits) -> None:
    """Adds the schemas of bodies and errors to the document that the app makes of its routes.

    They name the model that is served, its vocabulary and this server's limits.
    """
    plain = app.openapi
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            made = plain()
            wanted: list[Any] = [(one, "validation") for one in (*_BODIES, ErrorAnswer)]
            _, schemas = models_json_schema(wanted, ref_template=_REF)
            components = made.setdefault("components", {})
            components["schemas"] = schemas["$defs"]
            for name, schema in schemas["$defs"].items():
                if name != TokenizeBody.__name__:  # any text has tokens, and none has none
                    _narrow(schema.get("properties", {}), served, limits)
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path in made["paths"].values():
                for one in path.values():
                    one["responses"] = {status: said for status, said in one["responses"].items() if status != "422"}
            document.update(made)
        return document

    app.openapi = openapi


def _narrow(fields: dict[str, Any], served: Served, limits: Limits) -> None:
    """Says of a body's fields what this server takes of them."""
    bounds = _bounds(served, limits)
    for name, field in fields.items():
        for kind in _kinds(field):
            kind.update(bounds.get((name, kind.get("type", "")), {}))
            if name == "prompt" and kind.get("type") == "string":
                kind.pop("maxLength", None)  # a body of several long prompts is too long before any of them is
            if name == "depths" and "patternProperties" in kind:
                kind["additionalProperties"] = False
                for slots in kind["patternProperties"].values():
                    slots["maximum"] = served.iterations


def _bounds(served: Served, limits: Limits) -> dict[tuple[str, str], dict[str, Any]]:
    """What a schema says more of a field of this name and type."""
    tokens = limits.max_tokens or served.tokens
    most = {
        "n": limits.n,
        "best_of": limits.best_of,
        "max_iterations": served.iterations,
        "prompt": served.vocabulary - 1,
        "tokens": served.vocabulary - 1,
        **dict.fromkeys(("logprobs", "top_logprobs", "iteration_top"), limits.logprobs),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), tokens),
    }
    return {(name, "integer"): {"maximum": value} for name, value in most.items()} | {
        ("model", "string"): {"enum": [served.name]},
        ("prompt", "string"): {"minLength": 1},
        ("budget", "number"): {"maximum": served.iterations},
        ("budget", "string"): {"enum": list(served.profiles)} if served.profiles else {},
        ("logit_bias", "object"): {
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "maxProperties": limits.logit_bias,
        },
        ("stop", "array"): {"maxItems": limits.stops},
        ("stop", "string"): {"maxLength": limits.stop_characters},
    }


def _kinds(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema of a field, and those of what it may be or hold."""
    yield field
    for kind in field.get("anyOf", ()):
        yield from _kinds(kind)
    if "items" in field:
        yield from _kinds(field["items"])
