"""A conversation of a request as a prompt, by the tokenizer's own template; none comes from a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from adaponder.errors import in_one_line
from adaponder.serving.errors import ApiError
from adaponder.serving.protocol import Message
from adaponder.serving.requests import encoded
from adaponder.serving.served import Served
from adaponder.serving.settings import Limits
from adaponder.text import written


async def chat_prompt(messages: Sequence[Message], served: Served, limits: Limits) -> list[int]:
    """The token ids of a conversation that the model is to go on with as the assistant."""
    if not served.template:
        raise ApiError(
            400,
            f"messages: the tokenizer of {served.name} has no chat template; use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    characters = sum(len(message.as_dict()["content"]) for message in messages)
    if characters > limits.prompt_characters:
        raise ApiError(
            400,
            f"messages: they have {characters:,} characters; at most {limits.prompt_characters:,} are read",
            param="messages",
            code="context_length_exceeded",
        )
    try:
        said = [message.as_dict() for message in messages]
        text = await asyncio.to_thread(written, served.tokenizer, said)
    except Exception as problem:  # a template is a program of the checkpoint's: it may raise anything
        raise ApiError(
            400, f"messages: the tokenizer's chat template refuses them: {in_one_line(problem)}", param="messages"
        ) from None
    # The template writes the special tokens itself.
    return await encoded(text, served, limits, special=False)
