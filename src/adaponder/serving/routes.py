"""Defines the HTTP routes, and puts them behind access control, metrics and body limits in one ASGI app."""

from __future__ import annotations

import hashlib
import inspect
import math
import typing
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from adaponder.errors import AdaPonderError
from adaponder.evaluation.token_scores import ScoreSettings
from adaponder.inference.config import PAGE
from adaponder.serving.access import CLIENT, AccessControl, BodyLimits
from adaponder.serving.answers import AnswerWriter, ScoreWriter, usage_of
from adaponder.serving.fairness import THREADS, Places
from adaponder.serving.metrics import Metrics, RequestMetrics
from adaponder.serving.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorAnswer,
    ScoreBody,
    TokenizeBody,
    as_api_error,
    bodies_for,
)
from adaponder.serving.requests import (
    chat_prompt,
    check_characters,
    check_ids,
    check_model,
    depth_options,
    encode_prompt,
    engine_requests,
    tokens_of,
)
from adaponder.serving.served import Served
from adaponder.serving.settings import Client, Limits, Settings
from adaponder.serving.stream import DONE, EVENTS, Answer, Run
from adaponder.serving.worker import Worker
from adaponder.text import Writing, pieces
from adaponder.version import __version__

# OpenAI's default of max_tokens.
_MAX_TOKENS = 16
# Maximum characters or tokens that are converted in the event loop's thread.
_SMALL = 1024
_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class Context:
    """The objects that all routes use."""

    worker: Worker
    settings: Settings
    metrics: Metrics
    scores: ScoreWriter

    @property
    def served(self) -> Served:
        return self.worker.served

    @property
    def limits(self) -> Limits:
        return self.settings.limits

    def admit(self, client: Client, *, sequences: int = 0, jobs: int = 0) -> None:
        """Raises 503 unless the server is ready, and 429 if a queue has no room for the client's sequences or jobs."""
        worker, lanes = self.worker, self.settings.lanes
        if worker.state != "ready":
            retry = {"retry-after": str(self.limits.retry_seconds)}
            raise ApiError(503, f"the server is {worker.state}; try again", code=worker.state, headers=retry)
        self._check_room("completions", worker.completions, client, sequences, lanes + self.limits.waiting, lanes)
        self._check_room("texts to score", worker.scores, client, jobs, self.limits.jobs, 0)

    def _check_room(self, kind: str, places: Places, client: Client, count: int, room: int, at_once: int) -> None:
        missing = places.missing(client.name, count, room=room, at_once=at_once) if count else 0
        if missing:
            seconds = min(3600, max(self.limits.retry_seconds, math.ceil(places.seconds(missing))))
            message = f"the queue has {places.total} {kind}, of which {places.held[client.name]} are yours"
            headers = {"retry-after": str(seconds)}
            raise ApiError(429, f"{message}; try again in {seconds} s", code="queue_full", headers=headers)

    async def convert(self, client: Client, size: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Returns ``function(*arguments)``, called in a thread if ``size`` (characters or tokens) is large.

        Raises 429 if the threads' queue has no room for the client's text.
        """
        if size <= _SMALL:
            return function(*arguments)
        texts = self.worker.texts
        self._check_room("texts to convert", texts.places, client, 1, THREADS + self.limits.texts, THREADS)
        return await texts.run(client.name, function, *arguments)


async def completions(context: Context, http: HttpRequest, body: CompletionBody) -> Response:
    """Completes one prompt or several."""
    served, limits = context.served, context.limits
    check_model(body.model, served)
    n = body.n or 1
    if body.samples < n:
        raise ApiError(400, f"best_of={body.samples} must be at least n={n}", param="best_of")
    if body.samples > n and body.stream:
        raise ApiError(400, "best_of cannot be streamed; leave one of them out", param="best_of")
    if body.echo and body.stream and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs cannot be streamed; leave one of them out", param="echo")
    prompts: Any = body.prompt
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    convert = partial(context.convert, http.scope[CLIENT])
    encoded = [await encode_prompt(prompt, served, limits, convert) for prompt in prompts]
    echoed = [await convert(len(ids), pieces, served.tokenizer, ids) for ids in encoded] if body.echo else ()
    max_tokens = min(_MAX_TOKENS, limits.max_tokens or _MAX_TOKENS) if body.max_tokens is None else body.max_tokens
    return _generate(context, http, body, encoded, max_tokens, echoed)


async def chat_completions(context: Context, http: HttpRequest, body: ChatBody) -> Response:
    """Continues a conversation."""
    served, limits = context.served, context.limits
    check_model(body.model, served)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens: give one of them", param="max_tokens")
    prompt = await chat_prompt(body.messages, served, limits, partial(context.convert, http.scope[CLIENT]))
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens is None:
        # As many as fit, but at least 1: if none fits, the check of the engine request raises the error.
        room = context.worker.longest_request - len(prompt)
        max_tokens = max(1, min(room, limits.max_tokens or room))
    return _generate(context, http, body, [prompt], max_tokens)


def _generate(
    context: Context,
    http: HttpRequest,
    body: CompletionBody | ChatBody,
    prompts: list[list[int]],
    max_tokens: int,
    echoed: Sequence[list[str]] = (),
) -> Response:
    """Runs the prompts and returns the ``n`` best completions of each, in one body or as a stream."""
    served, limits, client = context.served, context.limits, http.scope[CLIENT]
    requests = engine_requests(body, prompts, served, limits, max_tokens=max_tokens, client=client)
    writer = AnswerWriter(served, body, hidden=max_tokens == 0, echoed=echoed)
    sequences, room = body.samples * len(requests), context.settings.lanes + limits.waiting
    if sequences > room:
        raise ApiError(400, f"n: {sequences} completions are more than the server's {room}", param="n")
    context.admit(client, sequences=sequences)
    answer = Answer(limits, context.metrics, EVENTS if body.stream else "application/json")

    def on_text(index: int, writing: Writing, text: str) -> None:
        if body.stream:
            answer.add(writer.events(index, writing, text))

    def on_end(problem: Exception | None) -> None:
        if problem is None:
            _count_tokens(context.metrics, run.samples, hidden=writer.hidden)
            if not body.stream or body.includes_usage:
                usage = usage_of(served, run.samples, hidden=writer.hidden)
                answer.add(writer.usage_event(usage) if body.stream else writer.whole(_best(body, run.samples), usage))
            if body.stream:
                answer.add(DONE)
        answer.end(problem)

    run = Run(context.worker, requests, stops=body.stops, metrics=context.metrics, on_text=on_text, on_end=on_end)
    answer.cancel = run.cancel
    return answer


def _best(body: CompletionBody | ChatBody, samples: Sequence[Sequence[Writing]]) -> list[Writing]:
    """Returns, for each prompt, the ``n`` completions whose tokens have the highest mean log-probability."""

    def likelihood(writing: Writing) -> float:
        return sum(token.log_probability or 0.0 for token in writing.tokens) / max(1, len(writing.tokens))

    best: list[Writing] = []
    for writings in samples:
        n = body.n or 1
        best += writings if len(writings) == n else sorted(writings, key=likelihood, reverse=True)[:n]
    return best


def _count_tokens(metrics: Metrics, samples: Sequence[Sequence[Writing]], *, hidden: bool) -> None:
    """Adds an answer's tokens and the depths of its computed tokens to the metrics.

    A prompt counts once for all its samples. Its tokens from the prefix cache are counted, but not their depths.
    """
    for writings in samples:
        for index, writing in enumerate(writings):
            depths = [depth for depth in writing.depths if depth]
            prompt = len(writing.prompt_depths)
            metrics.tokens.labels("prompt").inc(0 if index else prompt)
            metrics.tokens.labels("completion").inc(0 if hidden else len(writing.tokens))
            for depth, count in Counter(depths[prompt if index else writing.cached_tokens :]).items():
                metrics.depths.labels(str(depth)).inc(count)


async def score(context: Context, http: HttpRequest, body: ScoreBody) -> Response:
    """Returns loss, depth and gates of each token of a text."""
    extension = body.extension
    check_model(body.model, context.served)
    depth = depth_options(extension, context.served)
    client = http.scope[CLIENT]
    ids = await encode_prompt(body.prompt, context.served, context.limits, partial(context.convert, client))
    context.admit(client, jobs=1)
    how = ScoreSettings(**depth, top=extension.iteration_top, seed=extension.seed or 0, salt=client.salt)
    answer = Answer(context.limits, context.metrics)
    scores = context.scores(ids, how, gates=extension.gates, full_depth=body.full_depth)
    job = context.worker.job(scores, client.name)
    answer.cancel = job.cancel

    def on_end(_: object) -> None:
        if not job.cancelled():
            problem = job.exception()
            answer.add(b"" if problem else job.result())
            answer.end(problem)

    job.add_done_callback(on_end)
    return answer


async def tokenize(context: Context, http: HttpRequest, body: TokenizeBody) -> Response:
    """Returns the token ids of a prompt and their texts; a prompt may be empty or exceed the model's positions."""
    served = context.served
    check_characters("prompt", len(body.prompt), context.limits)

    def answer() -> Response:
        ids = tokens_of(body.prompt, served, body.add_special_tokens) if body.prompt else []
        texts = pieces(served.tokenizer, ids)
        tokens = [{"id": token, "text": text} for token, text in zip(ids, texts, strict=True)]
        return JSONResponse({"tokens": tokens, "count": len(ids)})

    return await context.convert(http.scope[CLIENT], len(body.prompt), answer)


async def detokenize(context: Context, http: HttpRequest, body: DetokenizeBody) -> Response:
    """Returns the text of token ids."""
    served, tokens = context.served, body.tokens
    check_ids("tokens", tokens, served)
    texts = await context.convert(http.scope[CLIENT], len(tokens), pieces, served.tokenizer, tokens)
    return JSONResponse({"prompt": "".join(texts)})


async def models(context: Context) -> Response:
    """Lists the served model, with its facts."""
    return JSONResponse({"object": "list", "data": [_facts(context)]})


async def model(context: Context, name: str) -> Response:
    """Returns the model object of the served model (name, limits, properties); 404 for any other name."""
    check_model(name, context.served)
    return JSONResponse(_facts(context))


def _facts(context: Context) -> dict[str, Any]:
    served = context.served
    about = {"id": served.name, "object": "model", "created": served.created, "owned_by": "adaponder"}
    return about | {"adaponder": served.facts() | {"limits": vars(context.limits)}}


async def health(context: Context) -> Response:
    """Returns whether the engine runs."""
    alive = context.worker.alive
    return JSONResponse({"status": "alive" if alive else "broken"}, status_code=200 if alive else 503)


async def ready(context: Context) -> Response:
    """Returns whether requests are accepted, and what is running."""
    worker = context.worker
    resident = worker.counts.get("resident", 0)
    state = {
        "status": worker.state,
        "lanes": context.settings.lanes,
        "lanes_in_use": min(worker.sequences, resident),
        "waiting": max(0, worker.sequences - resident),
        "requests": worker.sequences,
        "jobs": worker.jobs,
        "rows_in_use": worker.counts.get("pages_held", 0) * PAGE,
    }
    if worker.state == "ready":
        return JSONResponse(state)
    return JSONResponse(state, status_code=503, headers={"retry-after": str(context.limits.retry_seconds)})


async def metrics(context: Context) -> Response:
    """Returns metrics for Prometheus."""
    return Response(generate_latest(context.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@cache
def _page() -> Mapping[str, tuple[bytes, dict[str, str]]]:
    """Maps the name of each file of the page to (content, headers); requests can name no other file."""
    page = {}
    for path in files("adaponder.serving").joinpath("page").iterdir():
        content, kind = path.read_bytes(), _PAGE_TYPES[path.name.rpartition(".")[2]]
        headers = {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"', "cache-control": "no-cache"}
        page[path.name] = content, headers | {"content-type": kind if "svg" in kind else f"{kind}; charset=utf-8"}
    return page


async def index(context: Context, http: HttpRequest) -> Response:
    """Returns the page that shows depth."""
    return await page_file(context, http, "index.html")


async def page_file(context: Context, http: HttpRequest, name: str) -> Response:
    """Returns a file of the page, or 304 if the client has it already."""
    if name not in _page():
        raise ApiError(404, "the page has no such file")
    content, headers = _page()[name]
    if http.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)


_ROUTES: dict[str, Callable[..., Awaitable[Response]]] = {
    "POST /v1/completions": completions,
    "POST /v1/chat/completions": chat_completions,
    "POST /score": score,
    "POST /tokenize": tokenize,
    "POST /detokenize": detokenize,
    "GET /v1/models": models,
    "GET /v1/models/{name}": model,
    "GET /health": health,
    "GET /ready": ready,
    "GET /metrics": metrics,
    "GET /": index,
    "GET /page/{name}": page_file,
}
# Content types of the routes that do not always return JSON.
_CONTENT = {completions: ("application/json", EVENTS), chat_completions: ("application/json", EVENTS)}
_CONTENT |= {metrics: ("text/plain",), index: ("text/html",), page_file: ("*/*",)}
_ERRORS = (400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503)


def make_app(worker: Worker, settings: Settings | None = None) -> ASGIApp:
    """Returns the server as an ASGI app; its lifespan starts the worker, and at the end drains and stops it."""
    settings = settings or Settings()
    metrics = Metrics(worker, settings.lanes)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.drained(settings.limits.drain_seconds)
        await worker.stop()

    app = FastAPI(
        title="AdaPonder", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_routes(app, Context(worker, settings, metrics, ScoreWriter(worker.served)))
    for kind in (ApiError, AdaPonderError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    routes: list[Any] = app.routes
    limited = BodyLimits(app, {route.path for route in routes if "POST" in route.methods}, settings.limits)
    measured = RequestMetrics(limited, metrics, {route.path for route in routes if "{" not in route.path})
    return AccessControl(measured, settings, worker)


async def _on_error(request: HttpRequest, problem: Exception) -> Response:
    return as_api_error(problem).response()


def _add_routes(app: FastAPI, context: Context) -> None:
    """Adds every route to the app. The docstring of a route is its description in ``/openapi.json``."""
    bodies = bodies_for(context.served, context.limits)
    # The default also keeps FastAPI from adding its own 422, which no route returns.
    errors: dict[int | str, dict[str, Any]] = {"default": {"description": "An error.", "model": ErrorAnswer}}
    errors |= {status: {"description": HTTPStatus(status).phrase, "model": ErrorAnswer} for status in _ERRORS}
    key = [Depends(HTTPBearer(auto_error=False, scheme_name="key"))] if context.settings.access.keys else []
    for name, handler in _ROUTES.items():
        method, path = name.split(" ")
        route = _bind(handler, context, bodies)
        app.add_api_route(
            path,
            route,
            methods=[method],
            responses=errors | {200: {"content": {kind: {} for kind in _CONTENT.get(handler, ("application/json",))}}},
            response_class=Response,
            response_model=None,
            dependencies=[] if handler is health else key,
        )
        if method == "GET":  # for monitors that send HEAD; uvicorn then leaves the body out
            app.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)


def _bind(
    handler: Callable[..., Awaitable[Response]], context: Context, bodies: Mapping[Any, Any]
) -> Callable[..., Awaitable[Response]]:
    """Returns ``handler`` bound to ``context``, with this server's body types in the signature that FastAPI reads."""

    async def route(**arguments: Any) -> Response:
        return await handler(context, **arguments)

    parameters = []
    for name, hint in list(typing.get_type_hints(handler).items())[1:-1]:  # without the context and the return type
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, annotation=bodies.get(hint, hint)))
    route.__signature__ = inspect.Signature(parameters)
    route.__name__, route.__doc__ = handler.__name__, handler.__doc__
    return route
