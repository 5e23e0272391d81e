"""Renders conversations as prompts with the tokenizer's chat template, which transformers runs in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from adaponder.errors import InputError, in_one_line
from adaponder.text.engine import encode

Message = dict[str, str]


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answers: bool = True) -> str:
    """Returns the prompt for the assistant's next turn, or without ``answers`` for the rest of the last message.

    The template is a program of the checkpoint: it may raise any exception.
    """
    return str(
        tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answers, continue_final_message=not answers
        )
    )


def chat_text(
    option: str, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answers: bool = True
) -> str:
    """As :func:`render_chat`; raises :class:`InputError` naming ``option`` where there is no template or it fails."""
    if not has_template(tokenizer):
        raise InputError(
            f"{option}: the tokenizer has no chat template; leave {option} out, or train on conversations that "
            "adaponder prepare --chat wrote"
        )
    try:
        return render_chat(tokenizer, messages, answers=answers)
    except Exception as problem:
        raise InputError(f"{option}: the tokenizer's chat template refuses this: {in_one_line(problem)}") from None


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Returns the token ids of :func:`chat_text` for ``--chat``."""
    # The template writes the special tokens itself.
    return encode(tokenizer, chat_text("--chat", tokenizer, messages), special=False)
