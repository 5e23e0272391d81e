"""Stop strings in generation: each sequence of a batch ends at its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria

from adaponder.errors import InputError, shown


class GenerationSettings(NamedTuple):
    """Settings of a generation request; ``others`` goes to ``generate`` unchanged."""

    until: list[str]
    max_new_tokens: int
    sampled: bool
    others: dict[str, Any]


def generation_settings(request: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> GenerationSettings:
    """Generation settings of an lm-eval request: 256 tokens and greedy by default; the end token always stops."""
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(request, default_max_gen_toks=256))
    end = tokenizer.eos_token
    until = handle_stop_sequences(kwargs.pop("until"), eos=None if end is None else str(end))
    sampled = kwargs.pop("do_sample")
    if not sampled:
        kwargs.pop("temperature", None)
    most, known = kwargs.pop("max_gen_toks"), vars(GenerationConfig())
    for name, value in kwargs.items():
        if name not in known:
            raise InputError(f"generation_kwargs: generate has no setting {shown(name)}; leave it out")
        if name in ("num_beams", "num_return_sequences") and value != 1:
            raise InputError(f"generation_kwargs: {name}={shown(value)}: one text is generated at a time; leave it out")
    return GenerationSettings([text for text in until if text], most, sampled, kwargs)


class Until(StoppingCriteria):
    """Stops each sequence once its new text holds a stop string; ``lengths`` are its new tokens then, else 0."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, until: list[str], *, width: int, rows: int):
        self.tokenizer, self.until, self.width = tokenizer, until, width
        # A token spells at least one byte, and the first of a tail may be the rest of a character.
        self.tail = max((len(text.encode()) for text in until), default=0) + 1
        self.lengths = [0] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        new = input_ids[:, self.width :]
        tails = self.tokenizer.batch_decode(new[:, -self.tail :])
        for row, tail in enumerate(tails):
            if not self.lengths[row] and any(text in tail for text in self.until):
                self.lengths[row] = new.shape[1]
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)
