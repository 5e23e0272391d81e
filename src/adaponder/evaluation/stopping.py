"""Stop strings in generation for lm-eval: each sequence of a batch ends at its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria

from adaponder.errors import InputError, shown
from adaponder.text import TextStream


class GenerationSettings(NamedTuple):
    """Settings of a generation request; ``others`` goes to ``generate`` unchanged."""

    until: list[str]
    max_new_tokens: int
    sampled: bool
    others: dict[str, Any]


def generation_settings(request: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> GenerationSettings:
    """Returns the settings of an lm-eval request: 256 tokens and greedy by default; the end token always stops."""
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
            raise InputError(f"generation_kwargs: {name}={shown(value)} must be 1: one text is generated at a time")
    return GenerationSettings([text for text in until if text], most, sampled, kwargs)


class StopAtStrings(StoppingCriteria):
    """Stops each sequence once its new text holds a stop string.

    Attributes:
        lengths: new tokens of each sequence when its stop string was complete, else 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[str], *, rows: int):
        self._streams = [TextStream(tokenizer, stops=stops) for _ in range(rows)]
        self._steps = 0
        self.lengths = [0] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._steps += 1
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self.lengths[row]:
                self._streams[row].add(token)
                self.lengths[row] = self._steps if self._streams[row].stop is not None else 0
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)
