"""CALM's confidence rules: a token exits once its prediction stands out, or once its hidden state has settled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.ops.precision import widened
from adaponder.policies.base import PolicyInput
from adaponder.policies.measures import MeasureThreshold, in_chunks
from adaponder.policies.values import at


@dataclass(frozen=True)
class ConfidenceThreshold(MeasureThreshold):
    """Read on while :meth:`measure` is at most ``threshold``, one number for all gates or one for each."""

    def __call__(self, rows: PolicyInput) -> Tensor:
        measured = self.measure(rows)
        return measured <= at(self.threshold, rows.iteration, measured.dtype)


@dataclass(frozen=True)
class Confidence(ConfidenceThreshold):
    """Read on while the two likeliest next tokens are at most ``threshold`` apart in probability (softmax response).

    At 1 every token is read to the end.
    """

    word: ClassVar[str] = "confidence"

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``p(1st) - p(2nd)`` of the next-token distribution, 0 to 1; logits exist for a few rows at a time."""

        def of(hidden: Tensor) -> Tensor:
            first, second = torch.softmax(widened(rows.head(hidden)), dim=-1).topk(2, dim=-1).values.unbind(-1)
            return first - second

        return in_chunks(of, rows.hidden)

    def heads(self, iteration: int) -> int:
        return 1


@dataclass(frozen=True)
class Similarity(ConfidenceThreshold):
    """Read on while a token's last two final-normed hidden states have a cosine of at most ``threshold``.

    After iteration 0 there is nothing to compare with: everybody reads on, so no token is read fewer than two times.
    """

    word: ClassVar[str] = "similarity"
    reads_previous: ClassVar[bool] = True

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``cos(h_i, h_{i-1})`` of the final-normed hidden states; minus infinity after iteration 0."""
        if rows.previous is None:
            return torch.full_like(rows.gate, -math.inf)
        cosine = torch.cosine_similarity(widened(rows.hidden), widened(rows.previous), dim=-1)
        return torch.where(rows.iteration == 0, -math.inf, cosine)
