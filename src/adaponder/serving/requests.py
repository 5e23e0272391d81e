"""From a body to requests of the engine: limits, defaults and prompts."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from adaponder.errors import AdaPonderError
from adaponder.inference.request import Request
from adaponder.serving.depths import depth_of
from adaponder.serving.errors import ApiError, refused
from adaponder.serving.protocol import ChatBody, CompletionBody
from adaponder.serving.served import Served
from adaponder.serving.settings import Limits

_Result = TypeVar("_Result")
# Characters or tokens that are worked on at once; more of them in another thread, so that nobody waits for it.
_AT_ONCE = 1024


def check_model(name: str | None, served: Served) -> None:
    """Raises 404 unless this is the model that is served."""
    if name is not None and name != served.name:
        raise ApiError(
            404,
            f"model={name[:100]!r}: this server has {served.name!r}",
            param="model",
            code="model_not_found",
        )


def check_limits(body: CompletionBody | ChatBody, limits: Limits) -> None:
    """Raises 400 where a request asks for more than the server gives."""
    wishes: list[tuple[str, int | None, int]] = [
        ("n", body.n, limits.n),
        ("stop", len(body.stops), limits.stops),
        ("stop", max(map(len, body.stops), default=0), limits.stop_characters),
        ("logit_bias", len(body.logit_bias or ()), limits.logit_bias),
        ("adaponder.iteration_top", body.own.iteration_top, limits.logprobs),
    ]
    if isinstance(body, CompletionBody):
        wishes += [("best_of", body.best_of, limits.best_of), ("logprobs", body.logprobs, limits.logprobs)]
    else:
        wishes += [
            ("top_logprobs", body.top_logprobs, limits.logprobs),
            ("messages", len(body.messages), limits.messages),
        ]
    for field, value, most in wishes:
        if value is not None and value > most:
            raise ApiError(400, f"{field}: {value} is more than this server gives, which is {most}", param=field)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: it means nothing without stream", param="stream_options")


async def prompts_of(prompt: Any, served: Served, limits: Limits) -> list[list[int]]:
    """The token ids of each prompt of a completion."""
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    if len(prompts) > limits.prompts:
        raise ApiError(
            400,
            f"prompt: {len(prompts)} prompts are more than this server takes, which is {limits.prompts}",
            param="prompt",
        )
    return [await encoded(one, served, limits) for one in prompts]


async def encoded(prompt: str | list[int], served: Served, limits: Limits, *, special: bool = True) -> list[int]:
    """The token ids of one prompt; raises 400 where it is empty, too long, or names ids that are none."""
    if isinstance(prompt, str):
        if len(prompt) > limits.prompt_characters:
            raise ApiError(
                400,
                f"prompt: it has {len(prompt):,} characters; at most {limits.prompt_characters:,} are read",
                param="prompt",
                code="context_length_exceeded",
            )
        ids = await beside(len(prompt), _encode, prompt, served, special)
    else:
        ids = prompt
    if not ids:
        raise ApiError(400, "prompt: it is empty; give at least one token", param="prompt")
    if len(ids) > served.tokens:
        raise ApiError(
            400,
            f"prompt: it has {len(ids)} tokens, and the model's positions end at {served.tokens}; shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    if max(ids) >= served.vocabulary:
        raise ApiError(
            400, f"prompt: {max(ids)} is no token id; they go from 0 to {served.vocabulary - 1}", param="prompt"
        )
    return ids


async def beside(size: int, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """What a function returns, called in another thread where it has so many characters or tokens to go through."""
    if size <= _AT_ONCE:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def _encode(prompt: str, served: Served, special: bool) -> list[int]:
    return list(served.tokenizer(prompt, add_special_tokens=special, verbose=False).input_ids)


def engine_requests(
    body: CompletionBody | ChatBody,
    prompts: Sequence[list[int]],
    served: Served,
    limits: Limits,
    *,
    max_tokens: int,
    samples: int,
    log_probabilities: int | None,
    echoes: bool,
    salt: str,
) -> list[Request]:
    """One request of the engine for each prompt, checked as the engine checks it.

    Args:
        body: of the HTTP request.
        prompts: token ids of each prompt.
        served: the model.
        limits: of the server.
        max_tokens: of each completion.
        samples: completions of each prompt.
        log_probabilities: so many likeliest tokens beside each; ``None``: none.
        echoes: whether the prompt's tokens get log-probabilities too.
        salt: of the client's key.
    """
    own, depth = body.own, depth_of(body.own, served)
    if body.seed is not None and own.seed is not None:
        raise ApiError(400, "seed and adaponder.seed: give one of them", param="adaponder.seed")
    seed = own.seed if body.seed is None else body.seed
    settings: dict[str, Any] = depth.settings() | {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": own.top_k,
        "min_p": own.min_p,
        "repetition_penalty": own.repetition_penalty,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "logit_bias": _bias(body),
        "seed": secrets.randbits(62) if seed is None else seed,
        "samples": samples,
        "ignore_eos": own.ignore_eos,
        "log_probabilities": log_probabilities,
        "prompt_log_probabilities": log_probabilities if echoes else None,
        "gates": own.gates,
        "iteration_top": own.iteration_top,
        "salt": salt,
    }
    if limits.max_tokens is not None and max_tokens > limits.max_tokens:
        said = f"max_tokens={max_tokens}: this server gives at most {limits.max_tokens}"
        raise ApiError(400, said, param="max_tokens")
    made = []
    for prompt in prompts:
        request = Request(prompt, max_new_tokens=max(1, max_tokens), min_new_tokens=own.min_tokens, **settings)
        try:
            served.check(request)
        except AdaPonderError as problem:
            raise refused(problem) from None
        made.append(request)
    return made


def _bias(body: CompletionBody | ChatBody) -> dict[int, float]:
    biases = {}
    for key, value in (body.logit_bias or {}).items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise ApiError(400, f"logit_bias: {key!r} is no token id; a whole number is needed", param="logit_bias")
        biases[int(key)] = value
    return biases
