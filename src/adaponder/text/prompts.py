"""Encodes prompts: texts by the tokenizer, conversations by its chat template, which runs in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from adaponder.errors import InputError, in_one_line

Message = dict[str, str]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int], *, special: bool = True) -> list[int]:
    """Returns the prompt's token ids; raises if there are none. ``special`` adds special tokens to a text."""
    ids = list(tokenizer(prompt, add_special_tokens=special).input_ids) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise InputError("prompt is empty; give at least one token")
    return ids


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_text(
    field: str, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answers: bool = True
) -> str:
    """Returns the prompt for the assistant's next turn or, without ``answers``, for continuing the last message.

    Raises :class:`InputError` naming ``field`` if the tokenizer has no template or the template fails.
    """
    if not has_template(tokenizer):
        raise InputError(
            f"{field}: the tokenizer has no chat template; leave {field} out, or train on conversations that "
            "adaponder prepare --chat wrote"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answers, continue_final_message=not answers
        )
    except Exception as problem:  # the template is a program of the checkpoint: it may raise anything
        raise InputError(f"{field}: the tokenizer's chat template refuses this: {in_one_line(problem)}") from None
    return str(text)


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Returns the token ids of :func:`chat_text`, whose template adds special tokens; errors name ``--chat``."""
    return encode(tokenizer, chat_text("--chat", tokenizer, messages), special=False)
