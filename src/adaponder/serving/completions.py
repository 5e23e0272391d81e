"""``/v1/completions`` and ``/v1/chat/completions``: prompts in, text out, whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from adaponder.inference.request import Request
from adaponder.serving.answers import Answers, ChatAnswers, CompletionAnswers
from adaponder.serving.bodies import read_body
from adaponder.serving.chat import chat_prompt
from adaponder.serving.context import Context, salt_of
from adaponder.serving.errors import ApiError
from adaponder.serving.protocol import ChatBody, CompletionBody
from adaponder.serving.requests import check_limits, check_model, engine_requests, prompts_of
from adaponder.serving.streams import CLIENT_LEFT, DONE, EventStream, Outbox, unless_left
from adaponder.serving.texts import Choice, Grown, Run, admit, as_api_error
from adaponder.serving.usage import usage_of

# Of a completion that does not say how many; OpenAI's number.
_TOKENS = 16


async def completions(context: Context, request: HttpRequest) -> Response:
    """Goes on from one prompt or several."""
    body = await read_body(request, CompletionBody, context.limits)
    check_model(body.model, context.served)
    check_limits(body, context.limits)
    samples, best = body.n or 1, body.best_of or body.n or 1
    _check_completion(body, samples, best)
    prompts = await prompts_of(body.prompt, context.served, context.limits)
    hidden = body.max_tokens == 0
    logprobs = body.logprobs if body.logprobs is not None else 0 if best > samples else None
    requests = engine_requests(
        body,
        prompts,
        context.served,
        context.limits,
        max_tokens=min(_TOKENS, context.limits.max_tokens or _TOKENS) if body.max_tokens is None else body.max_tokens,
        samples=best,
        log_probabilities=logprobs,
        echoes=bool(body.echo) and body.logprobs is not None,
        salt=salt_of(request),
    )
    answers = CompletionAnswers(
        context.served,
        f"cmpl-{secrets.token_hex(12)}",
        int(time.time()),
        own=body.own,
        logprobs=body.logprobs is not None,
        hidden=hidden,
        usage_follows=body.includes_usage,
        echo=[prompt for prompt in prompts for _ in range(best)] if body.echo else (),
        top=body.logprobs or 0,
    )
    return await _answer(context, request, body, requests, answers, kept=samples)


async def chat_completions(context: Context, request: HttpRequest) -> Response:
    """Goes on from a conversation, as the tokenizer's own template writes it."""
    body = await read_body(request, ChatBody, context.limits)
    check_model(body.model, context.served)
    check_limits(body, context.limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: it means nothing without logprobs", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens: give one of them", param="max_tokens")
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    prompt = await chat_prompt(body.messages, context.served, context.limits)
    requests = engine_requests(
        body,
        [prompt],
        context.served,
        context.limits,
        max_tokens=_room(context, prompt) if most is None else most,
        samples=body.n or 1,
        log_probabilities=(body.top_logprobs or 0) if body.logprobs else None,
        echoes=False,
        salt=salt_of(request),
    )
    answers = ChatAnswers(
        context.served,
        f"chatcmpl-{secrets.token_hex(12)}",
        int(time.time()),
        own=body.own,
        logprobs=bool(body.logprobs),
        hidden=most == 0,
        usage_follows=body.includes_usage,
    )
    return await _answer(context, request, body, requests, answers, kept=body.n or 1)


def _room(context: Context, prompt: Sequence[int]) -> int:
    """As many tokens as may follow a prompt, at least one: what cannot follow is refused later, with the reason."""
    room = context.worker.longest_request - len(prompt)
    return max(1, min(room, context.limits.max_tokens or room))


def _check_completion(body: CompletionBody, samples: int, best: int) -> None:
    if best < samples:
        raise ApiError(400, f"best_of={best}: at least n={samples} is needed", param="best_of")
    if best > samples and body.stream:
        raise ApiError(400, "best_of: what is chosen at the end cannot be streamed; leave one out", param="best_of")
    if body.echo and body.stream and body.logprobs is not None:
        raise ApiError(400, "echo: with logprobs it cannot be streamed; leave one out", param="echo")


async def _answer(
    context: Context,
    http: HttpRequest,
    body: CompletionBody | ChatBody,
    requests: Sequence[Request],
    answers: Answers,
    *,
    kept: int,
) -> Response:
    sequences = sum(request.samples for request in requests)
    room = context.lanes + context.limits.waiting
    if sequences > room:
        raise ApiError(400, f"n: {sequences} completions are more than the server holds, which is {room}", param="n")
    admit(context.worker, context.limits, context.lanes, sequences)
    if body.stream:
        return _stream(context, body, requests, answers)
    run = Run(context.worker, requests, stops=body.stops, metrics=context.metrics)
    if not await unless_left(http, run.done, run.cancel, context.metrics):
        return Response(status_code=CLIENT_LEFT)
    return JSONResponse(answers.whole(_best(run.choices, requests, kept), _usage(context, requests, run, answers)))


def _stream(
    context: Context, body: CompletionBody | ChatBody, requests: Sequence[Request], answers: Answers
) -> EventStream:
    outbox, opened = Outbox(context.limits.buffer_bytes), set()

    def on_growth(grown: list[Grown]) -> None:
        for one in grown:
            if one.choice.index not in opened:
                opened.add(one.choice.index)
                outbox.add(answers.opening(one.choice))
            outbox.add(answers.chunk(one))

    run = Run(context.worker, requests, stops=body.stops, metrics=context.metrics, on_growth=on_growth)

    def finish(done: asyncio.Future[None]) -> None:
        problem = done.exception()
        if problem is not None:
            outbox.end(as_api_error(problem))
            return
        if body.includes_usage:
            outbox.add(answers.usage_chunk(_usage(context, requests, run, answers)))
        else:
            _count(context, requests, run, answers)
        outbox.add(DONE)
        outbox.end()

    run.done.add_done_callback(finish)
    return EventStream(run, outbox, context.limits, context.metrics)


def _usage(context: Context, requests: Sequence[Request], run: Run, answers: Answers) -> dict[str, Any]:
    _count(context, requests, run, answers)
    writings = [choice.writing for choice in run.choices]
    return usage_of(context.served, requests, writings, hidden=answers.hidden)


def _count(context: Context, requests: Sequence[Request], run: Run, answers: Answers) -> None:
    """Tells the figures which tokens were read: a prompt's once for all samples, and not what was kept of it."""
    first = 0
    for request in requests:
        for number, choice in enumerate(run.choices[first : first + request.samples]):
            writing = choice.writing
            depths, prompt = [depth for depth in writing.depths if depth], len(writing.prompt_depths)
            read = depths[prompt if number else writing.cached_tokens :]
            written = 0 if answers.hidden else len(writing.tokens)
            context.metrics.read(read, prompt=0 if number else prompt, completion=written)
        first += request.samples


def _best(choices: Sequence[Choice], requests: Sequence[Request], kept: int) -> list[Choice]:
    """Of each prompt's completions the ``kept`` likeliest by mean log-probability, or all where so many were made."""
    best: list[Choice] = []
    first = 0
    for request in requests:
        own = list(choices[first : first + request.samples])
        first += request.samples
        if len(own) > kept:
            own = sorted(own, key=_likelihood, reverse=True)[:kept]
        best += own
    return best


def _likelihood(choice: Choice) -> float:
    tokens = choice.writing.tokens
    return sum(token.log_probability or 0.0 for token in tokens) / max(1, len(tokens))
