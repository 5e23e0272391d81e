"""Rules that measure a row's prediction, or how far the last iteration moved it, and compare with a threshold."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.ops.precision import widened
from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.text import PolicyLine
from adaponder.policies.values import as_floats, at, check_one_per_gate, set_fields

# Rows whose logits exist at one time: with 50,000 words, 200 MB in float32.
_ROWS = 1024


@dataclass(frozen=True)
class MeasureThreshold(Policy):
    """Read on while :meth:`measure` is at least ``threshold``, one number for all gates or one for each."""

    threshold: float | tuple[float, ...]
    reads_seed: ClassVar[bool] = False
    value_field: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        set_fields(self, threshold=as_floats("threshold", self.threshold))

    @classmethod
    def parse_value(cls, line: PolicyLine) -> object:
        return line.number_or_numbers()

    def check(self, method: str, iterations: int) -> None:
        check_one_per_gate(self, "threshold", self.threshold, iterations)

    @staticmethod
    @abstractmethod
    def measure(rows: PolicyInput) -> Tensor:
        """One number per row; thresholds are compared with it in its own precision."""

    def __call__(self, rows: PolicyInput) -> Tensor:
        measured = self.measure(rows)
        return measured >= at(self.threshold, rows.iteration, measured.dtype)


@dataclass(frozen=True)
class Entropy(MeasureThreshold):
    """Read on while the next-token distribution's entropy (nats) is at least ``threshold``."""

    word: ClassVar[str] = "entropy"

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``-sum p log p`` of the next-token distribution, in nats; logits exist for a few rows at a time."""

        def of(hidden: Tensor) -> Tensor:
            log_p = torch.log_softmax(widened(rows.head(hidden)), dim=-1)
            return -(log_p.exp() * log_p).sum(-1)

        return in_chunks(of, rows.hidden)

    def heads(self, iteration: int) -> int:
        return 1


@dataclass(frozen=True)
class Divergence(MeasureThreshold):
    """Read on while the last iteration moved the prediction: ``KL(p_i || p_{i-1})`` (nats) is at least ``threshold``.

    After iteration 0 there is nothing to compare with: everybody reads on, so no token is read fewer than two times.
    """

    word: ClassVar[str] = "kl"
    reads_previous: ClassVar[bool] = True

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``KL(p_i || p_{i-1})`` of a token's next-token distributions, in nats; infinite after iteration 0."""
        if rows.previous is None:
            return torch.full_like(rows.gate, math.inf)

        def of(hidden: Tensor, before: Tensor) -> Tensor:
            log_p, log_q = (torch.log_softmax(widened(rows.head(states)), dim=-1) for states in (hidden, before))
            return (log_p.exp() * (log_p - log_q)).sum(-1)

        return torch.where(rows.iteration == 0, math.inf, in_chunks(of, rows.hidden, rows.previous))

    def heads(self, iteration: int) -> int:
        return 2 if iteration else 0


@dataclass(frozen=True)
class Change(MeasureThreshold):
    """Read on while the last iteration moved the final-normed hidden state by at least ``threshold`` of its length.

    After iteration 0 there is nothing to compare with: everybody reads on, so no token is read fewer than two times.
    """

    word: ClassVar[str] = "change"
    reads_previous: ClassVar[bool] = True

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``|h_i - h_{i-1}| / |h_{i-1}|`` of the final-normed hidden states; infinite after iteration 0."""
        if rows.previous is None:
            return torch.full_like(rows.gate, math.inf)
        hidden, before = widened(rows.hidden), widened(rows.previous)
        moved = (hidden - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(torch.finfo(before.dtype).tiny)
        return torch.where(rows.iteration == 0, math.inf, moved)


def in_chunks(function: Callable[..., Tensor], *states: Tensor) -> Tensor:
    """``function`` of hidden states, a few rows at a time."""
    chunks = [state.flatten(0, -2).split(_ROWS) for state in states]
    return torch.cat([function(*chunk) for chunk in zip(*chunks, strict=True)]).view(states[0].shape[:-1])
