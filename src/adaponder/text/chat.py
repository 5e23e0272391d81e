"""A conversation as a prompt, by the tokenizer's own template, which transformers runs in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from adaponder.errors import InputError, in_one_line
from adaponder.text.engine import encode

Message = dict[str, str]


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer says how conversations are written."""
    return bool(getattr(tokenizer, "chat_template", None))


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answers: bool = True) -> str:
    """The conversation as text that the model goes on with; the template may raise anything.

    It goes on as the assistant, with the next turn; without ``answers`` within the last one.
    """
    return str(
        tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answers, continue_final_message=not answers
        )
    )


def chat_text(
    option: str, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answers: bool = True
) -> str:
    """As :func:`written`; raises :class:`InputError`, by the ``option`` that asked for it, where that cannot be."""
    if not has_template(tokenizer):
        raise InputError(
            f"{option}: the tokenizer has no chat template; leave {option} out, or train on conversations that "
            "adaponder prepare --chat wrote"
        )
    try:
        return written(tokenizer, messages, answers=answers)
    except Exception as problem:  # a template is a program of the checkpoint's
        raise InputError(f"{option}: the tokenizer's chat template refuses this: {in_one_line(problem)}") from None


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """The token ids of :func:`chat_text` for ``--chat``."""
    # The template writes the special tokens itself.
    return encode(tokenizer, chat_text("--chat", tokenizer, messages), special=False)
