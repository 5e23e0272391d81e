"""The HTTP routes: completions, chats, scores, tokens, the model's facts, the server's state and the page."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from adaponder.evaluation.token_scores import Reading
from adaponder.inference.config import PAGE
from adaponder.inference.request import Request
from adaponder.serving.access import SALT
from adaponder.serving.answers import AnswerWriter, usage_of
from adaponder.serving.metrics import Metrics
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
    check_ids,
    check_model,
    depth_options,
    encode_prompt,
    engine_requests,
    in_thread_if_long,
    tokens_of,
)
from adaponder.serving.scores import ScoreWriter
from adaponder.serving.served import Served
from adaponder.serving.settings import Limits, Settings
from adaponder.serving.stream import CLIENT_LEFT, DONE, EventStream, Run, finished_unless_left
from adaponder.serving.worker import Worker
from adaponder.text import Writing, pieces

# OpenAI's default of max_tokens.
_MAX_TOKENS = 16


@dataclass(frozen=True, eq=False)
class Context:
    """What the routes share."""

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

    def admit(self, *, sequences: int = 0, jobs: int = 0) -> None:
        """Raises 503 while the server starts or stops, and 429 if a queue has no room for the completions or scores."""
        worker, retry = self.worker, {"retry-after": str(self.limits.retry_seconds)}
        if worker.state != "ready":
            raise ApiError(503, f"the server is {worker.state}; try again", code=worker.state, headers=retry)
        if worker.sequences + sequences > self.settings.lanes + self.limits.waiting:
            message = f"the queue is full with {worker.sequences} completions; try again"
            raise ApiError(429, message, code="queue_full", headers=retry)
        if jobs and worker.jobs + jobs > self.limits.jobs:
            raise ApiError(429, f"{worker.jobs} texts wait to be scored; try again", code="queue_full", headers=retry)


# --- completions and chats ----------------------------------------------------------------------------------------


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
    encoded = [await encode_prompt(prompt, served, limits) for prompt in prompts]
    max_tokens = min(_MAX_TOKENS, limits.max_tokens or _MAX_TOKENS) if body.max_tokens is None else body.max_tokens
    return await _generate(context, http, body, encoded, max_tokens)


async def chat_completions(context: Context, http: HttpRequest, body: ChatBody) -> Response:
    """Continues a conversation."""
    served, limits = context.served, context.limits
    check_model(body.model, served)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens: give one of them", param="max_tokens")
    prompt = await chat_prompt(body.messages, served, limits)
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens is None:
        # All that fits, and at least 1: where none fits the engine says why.
        room = context.worker.longest_request - len(prompt)
        max_tokens = max(1, min(room, limits.max_tokens or room))
    return await _generate(context, http, body, [prompt], max_tokens)


async def _generate(
    context: Context, http: HttpRequest, body: CompletionBody | ChatBody, prompts: list[list[int]], max_tokens: int
) -> Response:
    """Runs the prompts and returns the ``n`` best completions of each, whole or as a stream."""
    served, limits, hidden = context.served, context.limits, max_tokens == 0
    requests = engine_requests(body, prompts, served, limits, max_tokens=max_tokens, salt=http.scope.get(SALT, ""))
    writer = AnswerWriter(served, body, hidden=hidden)
    sequences, room = body.samples * len(requests), context.settings.lanes + limits.waiting
    if sequences > room:
        raise ApiError(400, f"n: {sequences} completions are more than the server's {room}", param="n")
    context.admit(sequences=sequences)
    if body.stream:
        return _stream(context, body, requests, writer)
    run = Run(context.worker, requests, stops=body.stops, metrics=context.metrics)
    if not await finished_unless_left(http, run.done, run.cancel, context.metrics):
        return Response(status_code=CLIENT_LEFT)
    _count_tokens(context, run.samples, hidden=hidden)
    best: list[Writing] = []
    for samples in run.samples:
        n = body.n or 1
        best += samples if len(samples) == n else sorted(samples, key=_likelihood, reverse=True)[:n]
    return JSONResponse(writer.whole(best, usage_of(served, run.samples, hidden=hidden)))


def _stream(
    context: Context, body: CompletionBody | ChatBody, requests: Sequence[Request], writer: AnswerWriter
) -> EventStream:
    stream = EventStream(context.limits, context.metrics)

    def on_text(index: int, writing: Writing, text: str) -> None:
        stream.add(writer.events(index, writing, text))

    def finish(done: asyncio.Future[None]) -> None:
        problem = done.exception()
        if problem is not None:
            stream.end(as_api_error(problem))
            return
        _count_tokens(context, run.samples, hidden=writer.hidden)
        if body.includes_usage:
            stream.add(writer.usage_event(usage_of(context.served, run.samples, hidden=writer.hidden)))
        stream.add(DONE)
        stream.end()

    run = Run(context.worker, requests, stops=body.stops, metrics=context.metrics, on_text=on_text)
    run.done.add_done_callback(finish)
    stream.cancel = run.cancel
    return stream


def _count_tokens(context: Context, samples: Sequence[Sequence[Writing]], *, hidden: bool) -> None:
    """Counts the tokens that were read: a prompt's once for all its samples, without those of the prefix cache."""
    for writings in samples:
        for index, writing in enumerate(writings):
            depths, prompt = [depth for depth in writing.depths if depth], len(writing.prompt_depths)
            read = depths[prompt if index else writing.cached_tokens :]
            generated = 0 if hidden else len(writing.tokens)
            context.metrics.count_tokens(read, prompt=0 if index else prompt, completion=generated)


def _likelihood(writing: Writing) -> float:
    """Returns the mean log-probability of a completion's tokens."""
    return sum(token.log_probability or 0.0 for token in writing.tokens) / max(1, len(writing.tokens))


# --- scores and tokens --------------------------------------------------------------------------------------------


async def score(context: Context, http: HttpRequest, body: ScoreBody) -> Response:
    """Returns loss, depth and gates of each token of a text."""
    extension = body.extension
    check_model(body.model, context.served)
    depth = depth_options(extension, context.served)
    ids = await encode_prompt(body.prompt, context.served, context.limits)
    context.admit(jobs=1)
    reading = Reading(**depth, top=extension.iteration_top, seed=extension.seed or 0, salt=http.scope.get(SALT, ""))
    job = context.worker.job(context.scores(ids, reading, gates=extension.gates, full_depth=body.full_depth))
    if not await finished_unless_left(http, job, job.cancel, context.metrics):
        return Response(status_code=CLIENT_LEFT)
    return Response(job.result(), media_type="application/json")


async def tokenize(context: Context, http: HttpRequest, body: TokenizeBody) -> Response:
    """Returns the tokens of a text, which may be longer than the model's positions, or empty."""
    served, most = context.served, context.limits.prompt_characters
    if len(body.prompt) > most:
        raise ApiError(400, f"prompt: at most {most:,} characters are accepted", param="prompt")

    def answer() -> Response:
        ids = tokens_of(body.prompt, served, body.add_special_tokens) if body.prompt else []
        texts = pieces(served.tokenizer, ids)
        tokens = [{"id": token, "text": text} for token, text in zip(ids, texts, strict=True)]
        return JSONResponse({"tokens": tokens, "count": len(ids)})

    return await in_thread_if_long(len(body.prompt), answer)


async def detokenize(context: Context, http: HttpRequest, body: DetokenizeBody) -> Response:
    """Returns the text of tokens."""
    check_ids("tokens", body.tokens, context.served)
    texts = await in_thread_if_long(len(body.tokens), pieces, context.served.tokenizer, body.tokens)
    return JSONResponse({"prompt": "".join(texts)})


# --- the page -----------------------------------------------------------------------------------------------------

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class PageFile(NamedTuple):
    """A file of the page; ``tag`` is its ETag."""

    content: bytes
    media_type: str
    tag: str


def page_files() -> dict[str, PageFile]:
    """Returns the files of the page by name: a request names one of them, never a path."""
    page: dict[str, PageFile] = {}
    for path in files("adaponder.serving").joinpath("page").iterdir():
        media_type = _MEDIA_TYPES.get(path.name.rpartition(".")[2])
        if media_type is not None:
            content = path.read_bytes()
            page[path.name] = PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return page


def page_answer(page: dict[str, PageFile], name: str, http: HttpRequest) -> Response:
    """Returns a file of the page, or 304 if the client has it already."""
    file = page.get(name)
    if file is None:
        raise ApiError(404, "the page has no such file")
    headers = {"etag": file.tag, "cache-control": "no-cache"}
    if http.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"content-type": file.media_type})


# --- adding routes ------------------------------------------------------------------------------------------------

_STATUSES = {
    400: "Something in the request is wrong; `param` names it.",
    401: "An API key is needed.",
    403: "Pages of this origin may not call the server.",
    404: "Unknown model, file or route.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    421: "The server does not have this name.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "The server failed to answer.",
    503: "The server is starting or stopping; `Retry-After` says when to try again.",
}


def add_routes(app: FastAPI, context: Context) -> None:
    """Adds every route to the app. The docstring of a route is its description in ``/openapi.json``."""
    _add_post_routes(app, context)
    _add_get_routes(app, context)


def _add_post_routes(app: FastAPI, context: Context) -> None:
    def add(path: str, handler: Callable[..., Awaitable[Response]], body: type[BaseModel], *kinds: str) -> None:
        async def route(http: HttpRequest, body: Any) -> Response:
            return await handler(context, http, body)

        # FastAPI parses the body by its annotation, which has the limits of this server.
        route.__annotations__["body"] = body
        options = _operation(context, handler, 404, 408, 413, 415, 429, 500, 503, kinds=kinds or ("application/json",))
        app.add_api_route(path, route, methods=["POST"], **options)

    bodies = bodies_for(context.served, context.limits)
    add("/v1/completions", completions, bodies.completion, "application/json", "text/event-stream")
    add("/v1/chat/completions", chat_completions, bodies.chat, "application/json", "text/event-stream")
    add("/tokenize", tokenize, bodies.tokenize)
    add("/detokenize", detokenize, bodies.detokenize)
    add("/score", score, bodies.score)


def _add_get_routes(app: FastAPI, context: Context) -> None:
    worker, page = context.worker, page_files()

    def add(path: str, *errors: int, kind: str = "application/json", locked: bool = True) -> Callable[..., Any]:
        def decorate(route: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
            options = _operation(context, route, *errors, kinds=(kind,), locked=locked)
            app.add_api_route(path, route, methods=["GET"], **options)
            # Monitors may use HEAD: the server leaves the body of a GET out.
            app.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)
            return route

        return decorate

    @add("/v1/models")
    async def models() -> Response:
        """Returns the served model and its facts."""
        return JSONResponse({"object": "list", "data": [_model(context)]})

    @add("/v1/models/{name}", 404)
    async def model(name: str) -> Response:
        """Returns one model."""
        check_model(name, context.served)
        return JSONResponse(_model(context))

    @add("/health", 503, locked=False)
    async def health() -> Response:
        """Returns whether the engine runs."""
        status = "alive" if worker.alive else "broken"
        return JSONResponse({"status": status}, status_code=200 if worker.alive else 503)

    @add("/ready", 503)
    async def ready() -> Response:
        """Returns whether requests are accepted, and what is running."""
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

    @add("/metrics", kind="text/plain")
    async def metrics() -> Response:
        """Returns metrics for Prometheus."""
        return Response(context.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @add("/", 404, kind="text/html")
    async def index(http: HttpRequest) -> Response:
        """Returns the page that shows depth."""
        return page_answer(page, "index.html", http)

    @add("/page/{name}", 404, kind="*/*")
    async def page_file(http: HttpRequest, name: str) -> Response:
        """Returns a file of the page."""
        return page_answer(page, name, http)


def _operation(
    context: Context, route: Callable[..., Any], *errors: int, kinds: Sequence[str], locked: bool = True
) -> dict[str, Any]:
    """Returns the arguments of ``add_api_route`` that describe a route in ``/openapi.json``."""
    summary = (route.__doc__ or "").partition("\n")[0]
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": summary, "content": {kind: {} for kind in kinds}},
        # Also keeps FastAPI from adding its own 422, which no route answers with.
        "default": {"description": "An error.", "model": ErrorAnswer},
    }
    for status in sorted({400, 403, 421, *errors} | ({401} if locked else set())):
        responses[status] = {"description": _STATUSES[status], "model": ErrorAnswer}
    keys = locked and context.settings.access.keys
    return {
        "name": route.__name__,
        "summary": summary,
        "responses": responses,
        "response_class": Response,
        "response_model": None,
        "dependencies": [Depends(HTTPBearer(auto_error=False, scheme_name="key"))] if keys else [],
    }


def _model(context: Context) -> dict[str, Any]:
    served, limits = context.served, context.limits
    names = ("prompts", "n", "best_of", "max_tokens", "stops", "stop_characters", "logit_bias", "logprobs", "messages")
    names += ("prompt_characters", "body_bytes", "waiting")
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "adaponder",
        "adaponder": served.facts() | {"limits": {name: getattr(limits, name) for name in names}},
    }
