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


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The conversation as text that the model goes on with as the assistant; the template may raise anything."""
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """The token ids of :func:`written`; raises :class:`InputError` where there is no template, or it refuses."""
    if not has_template(tokenizer):
        raise InputError(
            "--chat: the tokenizer has no chat template; leave --chat out, or train on conversations that "
            "adaponder prepare --chat wrote"
        )
    try:
        text = written(tokenizer, messages)
    except Exception as problem:  # a template is a program of the checkpoint's
        raise InputError(f"--chat: the tokenizer's chat template refuses this: {in_one_line(problem)}") from None
    # The template writes the special tokens itself.
    return encode(tokenizer, text, special=False)
