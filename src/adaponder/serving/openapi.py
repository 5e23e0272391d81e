"""The OpenAPI document: bodies are read by hand, so their schemas are said here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from adaponder.serving.errors import ErrorAnswer
from adaponder.serving.protocol import ChatBody, CompletionBody, DetokenizeBody, ScoreBody, TokenizeBody

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


def describe(app: FastAPI) -> None:
    """Adds the schemas of bodies and errors to the document that the app makes of its routes."""
    plain = app.openapi
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            made = plain()
            wanted: list[Any] = [(one, "validation") for one in (*_BODIES, ErrorAnswer)]
            _, schemas = models_json_schema(wanted, ref_template=_REF)
            components = made.setdefault("components", {})
            components["schemas"] = schemas["$defs"]
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path in made["paths"].values():
                for one in path.values():
                    one["responses"] = {status: said for status, said in one["responses"].items() if status != "422"}
            document.update(made)
        return document

    app.openapi = openapi
