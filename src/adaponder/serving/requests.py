"""Converts the body of an HTTP request to engine requests: prompts, policy, sampling."""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from adaponder.errors import InputError, panics_as_errors
from adaponder.fields import REQUEST_FIELDS
from adaponder.inference.request import Request, check_request
from adaponder.policies import choose_policy
from adaponder.serving.protocol import ApiError, ChatBody, ChatMessage, CompletionBody, DepthControl
from adaponder.serving.served import Served
from adaponder.serving.settings import Client, Limits
from adaponder.text import chat_text

# Called with the size of an input, a function and its arguments; calls the function, for a large input in a thread.
Convert = Callable[..., Awaitable[Any]]


def check_model(name: str | None, served: Served) -> None:
    """Raises 404 if ``name`` is given and is not the served model."""
    if name is not None and name != served.name:
        message = f"model={name[:100]!r}: this server has {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def tokens_of(text: str, served: Served, special: bool) -> list[int]:
    """Returns a text's token ids, with special tokens if ``special``; raises 400 if the tokenizer fails."""
    try:
        with panics_as_errors("prompt: the tokenizer cannot encode it"):
            return list(served.tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
    except InputError as problem:
        raise ApiError(400, str(problem), param="prompt") from None


async def encode_prompt(
    prompt: str | list[int], served: Served, limits: Limits, convert: Convert, *, special: bool = True
) -> list[int]:
    """Returns the token ids of a prompt; raises 400 if it is empty, too long, or has ids beyond the vocabulary."""
    if isinstance(prompt, str):
        check_characters("prompt", len(prompt), limits)
        ids = await convert(len(prompt), tokens_of, prompt, served, special)
    else:
        ids = prompt
    if not ids:
        raise ApiError(400, "prompt is empty; give at least one token", param="prompt")
    if len(ids) > served.tokens:
        message = f"prompt has {len(ids)} tokens, and the model's positions end at {served.tokens}; shorten it"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")
    check_ids("prompt", ids, served)
    return ids


def check_ids(field: str, ids: Sequence[int], served: Served) -> None:
    """Raises 400 if a token id is not in the vocabulary."""
    if ids and max(ids) >= served.vocabulary:
        message = f"{field}: unknown token id {max(ids)}; ids are between 0 and {served.vocabulary - 1}"
        raise ApiError(400, message, param=field)


def check_characters(field: str, characters: int, limits: Limits) -> None:
    """Raises 400 if a text is longer than the server accepts."""
    if characters > limits.prompt_characters:
        message = f"{field}: {characters:,} characters; at most {limits.prompt_characters:,} are accepted"
        raise ApiError(400, message, param=field, code="context_length_exceeded")


async def chat_prompt(messages: Sequence[ChatMessage], served: Served, limits: Limits, convert: Convert) -> list[int]:
    """Returns the token ids of a conversation in the tokenizer's chat template; requests cannot send a template."""
    if not served.template:
        message = f"messages: the tokenizer of {served.name} has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    conversation = [message.as_dict() for message in messages]
    check_characters("messages", sum(len(message["content"]) for message in conversation), limits)
    text = await convert(math.inf, chat_text, "messages", served.tokenizer, conversation)
    # The template writes special tokens itself.
    return await encode_prompt(text, served, limits, convert, special=False)


def depth_options(control: DepthControl, served: Served) -> dict[str, Any]:
    """Returns ``policy``, ``max_iterations`` and ``depths`` of an engine request; raises on unsupported values.

    A request gives its policy as one line of text, a gate threshold, a mean depth or the name of a profile. Code and
    paths are not accepted.
    """
    rules = {"policy": control.policy, "tau": control.tau, "budget": control.budget}
    policy = choose_policy(served.iterations, **rules, profiles=served.profiles)
    served.model.check_policy(policy)
    if policy is not None and not (policy.causal and policy.row_by_row):
        message = f"policy={policy.spelling} depends on other tokens of the sequence; use one that does not"
        raise ApiError(400, message, param="adaponder.policy")
    if control.depths and not served.model.method.halts:
        message = "depths: this model has no halting, so all tokens have the same depth; use max_iterations"
        raise ApiError(400, message, param="adaponder.depths")
    depths = {int(slot): depth for slot, depth in (control.depths or {}).items()} or None
    return {"policy": policy, "max_iterations": control.max_iterations, "depths": depths}


def engine_requests(
    body: CompletionBody | ChatBody,
    prompts: Sequence[list[int]],
    served: Served,
    limits: Limits,
    *,
    max_tokens: int,
    client: Client,
) -> list[Request]:
    """Returns one engine request for each prompt; raises if the engine would refuse it.

    With ``max_tokens=0`` one token is generated, which the answer leaves out.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    if limits.max_tokens is not None and max_tokens > limits.max_tokens:
        message = f"max_tokens={max_tokens} must be at most {limits.max_tokens} on this server"
        raise ApiError(400, message, param="max_tokens")
    extension = body.extension
    given = {name: value for name, value in body if value is not None}
    for name in given.keys() & extension.model_fields_set:
        if getattr(extension, name) != given[name]:
            raise ApiError(400, f"{name} and adaponder.{name} differ; give one of them", param=f"adaponder.{name}")
    values = dict(extension) | given
    options = {name: value for name, value in values.items() if name in REQUEST_FIELDS and value is not None}
    options |= depth_options(extension, served) | {
        "tau": None,  # depth_options has converted it to a policy
        "max_new_tokens": max(1, max_tokens),
        "min_new_tokens": values["min_tokens"],
        "top_k": max(0, values["top_k"]),
        "stop_ids": body.stop_token_ids or (),
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
        "seed": options.get("seed", secrets.randbits(62)),
        "samples": body.samples,
        # Log-probabilities are also needed to choose the best samples.
        "log_probabilities": 0 if body.top is None and body.samples > (body.n or 1) else body.top,
        "prompt_log_probabilities": body.top if isinstance(body, CompletionBody) and body.echo else None,
        "client": client.name,
        "salt": client.salt,
    }
    requests = [Request(prompt, **options) for prompt in prompts]
    bounds: dict[str, Any] = {"positions": served.tokens, "iterations": served.iterations, "eos_ids": served.eos_ids}
    for request in requests:
        check_request(request, served.model, **bounds)
    return requests
