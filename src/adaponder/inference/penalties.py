"""What is added to or taken from a lane's logits: biases, bans, and penalties for tokens that occurred already."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from adaponder.inference.request import MOST_BIASES, MOST_STOP_IDS

_FOR_EVER = torch.iinfo(torch.int64).max


class LaneBiases:
    """Numbers to add to a few logits of each lane, some of them only up to a position: logit biases and bans.

    Buffers ``[lanes, entries]`` that never move; entries without use add 0 to token 0.
    """

    def __init__(self, lanes: int, device: torch.device, eos: int):
        entries = MOST_BIASES + MOST_STOP_IDS + eos
        self._token = torch.zeros(lanes, entries, dtype=torch.int64, device=device)
        self._value = torch.zeros(lanes, entries, dtype=torch.float64, device=device)
        self._until = torch.zeros(lanes, entries, dtype=torch.int64, device=device)
        self._written: set[int] = set()

    def set(self, lane: int, biases: Mapping[int, float], banned: Collection[int], until: int) -> None:
        """Biases for ever, and tokens that cannot be chosen by rows before position ``until``."""
        entries = [(int(token), float(value), _FOR_EVER) for token, value in biases.items()]
        entries += [(int(token), -math.inf, until) for token in banned]
        if not entries and lane not in self._written:
            return
        self._written.add(lane)
        entries += [(0, 0.0, 0)] * (self._token.shape[1] - len(entries))
        tokens, values, limits = zip(*entries, strict=True)
        for buffer, numbers in ((self._token, tokens), (self._value, values), (self._until, limits)):
            buffer[lane].copy_(torch.tensor(numbers, dtype=buffer.dtype), non_blocking=True)

    def add(self, logits: Tensor, lanes: Tensor, position: Tensor) -> Tensor:
        """``logits [n, V]`` with what is added for each row's lane at its position."""
        value = torch.where(position[:, None] < self._until[lanes], self._value[lanes], 0.0)
        return logits.scatter_add(1, self._token[lanes], value.to(logits.dtype))


class Occurrences:
    """Which tokens are in each lane's prompt, and how often each is in its output: ``[lanes, V]``, never moved."""

    def __init__(self, lanes: int, vocabulary: int, device: torch.device):
        self._prompt = torch.zeros(lanes, vocabulary, dtype=torch.bool, device=device)
        self._output = torch.zeros(lanes, vocabulary, dtype=torch.int32, device=device)

    def set(self, lane: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Starts a lane's sequence with this prompt and the output it has already."""
        for buffer, tokens in ((self._prompt, prompt), (self._output, output)):
            count = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=buffer.shape[1])
            buffer[lane].copy_(count.to(buffer.dtype), non_blocking=True)

    def record(self, tokens: Tensor, lanes: Tensor, taken: Tensor) -> None:
        """Counts each row's token in the output of its lane where ``taken``; all are ``[n]``."""
        places = lanes * self._output.shape[1] + tokens
        self._output.view(-1).scatter_add_(0, places, taken.to(torch.int32))

    def penalise(
        self, logits: Tensor, lanes: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Tensor:
        """``logits [n, V]`` after the penalties, one number ``[n, 1]`` each.

        Repetition divides positive logits of tokens in prompt or output and multiplies negative ones; presence is
        subtracted for tokens in the output, and frequency for each time they are.
        """
        repetition, presence, frequency = (penalty.to(logits.dtype) for penalty in (repetition, presence, frequency))
        output = self._output[lanes]
        occurred = self._prompt[lanes] | (output > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(occurred, repeated, logits)
        return logits - presence * (output > 0) - frequency * output
