"""The ASGI app: every route, its schema and its errors."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaponder.errors import AdaPonderError
from adaponder.inference.config import PAGE
from adaponder.serving.access import AccessControl
from adaponder.serving.bodies import read_body
from adaponder.serving.completions import chat_completions, completions
from adaponder.serving.context import Context, salt_of
from adaponder.serving.depths import depth_of
from adaponder.serving.errors import ApiError
from adaponder.serving.metrics import Metrics
from adaponder.serving.openapi import describe, operation
from adaponder.serving.pages import page_answer, page_files
from adaponder.serving.protocol import ChatBody, CompletionBody, DetokenizeBody, ScoreBody, TokenizeBody
from adaponder.serving.requests import check_model, encoded
from adaponder.serving.scores import Scores
from adaponder.serving.settings import Settings
from adaponder.serving.streams import CLIENT_LEFT, error_response, unless_left
from adaponder.serving.texts import as_api_error, refuse_unready
from adaponder.serving.words import detokenize, tokenize
from adaponder.serving.worker import Worker
from adaponder.version import __version__

_log = logging.getLogger("adaponder.serving")
_ROUTES = frozenset(
    (
        "/",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/score",
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
    )
)


def make_app(worker: Worker, settings: Settings | None = None) -> ASGIApp:
    """The server as an ASGI app; its lifespan starts the worker, and at the end waits for what is under way."""
    settings = settings or Settings()
    metrics = Metrics(worker, settings.lanes)
    context = Context(worker, settings, settings.lanes, metrics, Scores(worker.served))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.drained(settings.limits.drain_seconds)
        await worker.stop()

    app = FastAPI(
        title="AdaPonder",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_generation(app, context)
    _add_texts(app, context)
    _add_state(app, context)
    _add_page(app)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    describe(app, context.served, settings.limits)
    return AccessControl(_Counted(app, metrics), settings, worker)


def _add_generation(app: FastAPI, context: Context) -> None:
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(context)]})

    async def model(name: str) -> Response:
        check_model(name, context.served)
        return JSONResponse(_model(context))

    _get(app, "/v1/models", models, "The model that is served, and its facts.")
    _get(app, "/v1/models/{name}", model, "One model.", errors=(404,))
    _post(app, "/v1/completions", context, completions, CompletionBody, "Goes on from prompts.", streams=True)
    _post(
        app, "/v1/chat/completions", context, chat_completions, ChatBody, "Goes on with a conversation.", streams=True
    )


def _add_texts(app: FastAPI, context: Context) -> None:
    _post(app, "/tokenize", context, tokenize, TokenizeBody, "The tokens of a text.")
    _post(app, "/detokenize", context, detokenize, DetokenizeBody, "The text of tokens.")
    _post(app, "/score", context, _score, ScoreBody, "Loss, depth and gates of each token of a text.")


def _add_state(app: FastAPI, context: Context) -> None:
    worker = context.worker

    async def health() -> Response:
        return JSONResponse({"status": "alive" if worker.alive else "broken"}, status_code=200 if worker.alive else 503)

    async def ready() -> Response:
        counts = worker.counts
        told = {
            "status": worker.state,
            "lanes": context.lanes,
            "lanes_in_use": min(worker.sequences, counts.get("resident", 0)),
            "waiting": max(0, worker.sequences - counts.get("resident", 0)),
            "requests": worker.sequences,
            "jobs": worker.jobs,
            "rows_in_use": counts.get("pages_held", 0) * PAGE,
        }
        headers = {} if worker.state == "ready" else {"retry-after": str(context.limits.retry_seconds)}
        return JSONResponse(told, status_code=200 if worker.state == "ready" else 503, headers=headers)

    async def metrics() -> Response:
        return Response(context.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    _get(app, "/health", health, "Whether the server lives.", errors=(503,), open_to_all=True)
    _get(app, "/ready", ready, "Whether requests are taken, and what is under way.", errors=(503,))
    _get(app, "/metrics", metrics, "Figures for Prometheus.", kind="text/plain")


def _add_page(app: FastAPI) -> None:
    found = page_files()

    async def page(request: HttpRequest) -> Response:
        return page_answer(found, "index.html", request.headers.get("if-none-match"))

    async def file(request: HttpRequest, name: str) -> Response:
        return page_answer(found, name, request.headers.get("if-none-match"))

    _get(app, "/", page, "The explorer.", errors=(404,), kind="text/html")
    _get(app, "/page/{name}", file, "A file of the explorer.", errors=(404,), kind="*/*")


# --- routes -------------------------------------------------------------------------------------------------------


async def _score(context: Context, request: HttpRequest) -> Response:
    body = await read_body(request, ScoreBody, context.limits)
    check_model(body.model, context.served)
    own, limits, worker = body.own, context.limits, context.worker
    if own.iteration_top > limits.logprobs:
        raise ApiError(400, f"adaponder.iteration_top: at most {limits.logprobs}", param="adaponder.iteration_top")
    depth = depth_of(own, context.served)
    ids = await encoded(body.prompt, context.served, limits)
    refuse_unready(worker, limits)
    if worker.jobs >= limits.jobs:
        raise ApiError(
            429,
            f"{worker.jobs} texts wait to be scored; try again",
            code="queue_full",
            headers={"retry-after": str(limits.retry_seconds)},
        )
    parts = context.scores(
        ids,
        depth,
        gates=own.gates,
        top=own.iteration_top,
        full_depth=body.full_depth,
        seed=own.seed or 0,
        salt=salt_of(request),
    )
    job = worker.job(parts)
    if not await unless_left(request, job, job.cancel, context.metrics):
        return Response(status_code=CLIENT_LEFT)
    return Response(job.result(), media_type="application/json")


def _model(context: Context) -> dict[str, Any]:
    served, limits = context.served, context.limits
    shown = ("prompts", "n", "best_of", "max_tokens", "stops", "stop_characters", "logit_bias", "logprobs", "messages")
    facts = served.facts() | {
        "limits": {name: getattr(limits, name) for name in shown}
        | {"prompt_characters": limits.prompt_characters, "body_bytes": limits.body_bytes, "waiting": limits.waiting}
    }
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "adaponder",
        "adaponder": facts,
    }


# --- how routes are added -----------------------------------------------------------------------------------------


def _get(
    app: FastAPI,
    path: str,
    handler: Callable[..., Awaitable[Response]],
    about: str,
    *,
    errors: tuple[int, ...] = (),
    kind: str = "application/json",
    open_to_all: bool = False,
) -> None:
    app.add_api_route(
        path, handler, methods=["GET"], **operation(about, None, errors, kind=kind, closed=not open_to_all)
    )
    # As GET without its body, which the server leaves out: what watches a server may ask so.
    app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)


def _post(
    app: FastAPI,
    path: str,
    context: Context,
    handler: Callable[[Context, HttpRequest], Awaitable[Response]],
    body: type,
    about: str,
    *,
    streams: bool = False,
) -> None:
    async def route(request: HttpRequest) -> Response:
        return await handler(context, request)

    errors = (400, 404, 408, 413, 415, 429, 500, 503)
    app.add_api_route(path, route, methods=["POST"], **operation(about, body, errors, streams=streams))


# --- errors and figures -------------------------------------------------------------------------------------------


async def _on_api_error(request: HttpRequest, problem: Exception) -> Response:
    assert isinstance(problem, ApiError)
    cause = problem.__cause__
    if problem.status == 500 and cause is not None and not isinstance(cause, (ApiError, AdaPonderError)):
        _log.error("an answer failed", exc_info=cause)
    return error_response(problem)


async def _on_http_error(request: HttpRequest, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    said = {404: "there is no such route", 405: "this route does not take this method"}
    headers = dict(problem.headers or {})
    return error_response(ApiError(problem.status_code, said.get(problem.status_code, problem.detail), headers=headers))


async def _on_error(request: HttpRequest, problem: Exception) -> Response:
    return error_response(as_api_error(problem))


class _Counted:
    """Counts answers by route and status, and how long they take."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            route = path if path in _ROUTES else "other"
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - began)
