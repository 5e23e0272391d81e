"""Policies that compare a measure of a row's prediction, or of its change in the last iteration, with a threshold."""

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
from adaponder.policies.values import as_floats, at, set_fields

# Number of rows whose logits are in memory at a time: 200 MB in float32 for a vocabulary of 50,000.
_ROWS = 1024


@dataclass(frozen=True)
class MeasureThreshold(Policy):
    """Continues while :meth:`measure` is at least (with ``at_most``: at most) ``threshold``, a number or one per gate.

    After iteration 0 every token continues if the measure compares two iterations (``reads_previous``).
    ``logits_read`` is how many times a measure computes a token's logits.
    """

    threshold: float | tuple[float, ...]
    logits_read: ClassVar[int] = 0
    reads_seed: ClassVar[bool] = False
    value_field: ClassVar[str] = "threshold"
    per_gate: ClassVar[bool] = True
    at_most: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_fields(self, threshold=as_floats("threshold", self.threshold))

    @staticmethod
    @abstractmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Returns the measure of each row, which is compared with the threshold in the dtype of this tensor."""

    def __call__(self, rows: PolicyInput) -> Tensor:
        measured = self.measure(rows)
        threshold = at(self.threshold, rows.iteration, measured.dtype)
        return measured <= threshold if self.at_most else measured >= threshold

    def heads(self, iteration: int) -> int:
        return 0 if self.reads_previous and not iteration else self.logits_read


@dataclass(frozen=True)
class Entropy(MeasureThreshold):
    """Continues while the entropy of the next-token distribution is at least ``threshold`` nats."""

    word: ClassVar[str] = "entropy"
    logits_read: ClassVar[int] = 1

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``-sum p log p`` of the next-token distribution, in nats; computes logits in chunks to save memory."""
        return in_chunks(lambda hidden: entropy_of(widened(rows.head(hidden))), rows.hidden)


@dataclass(frozen=True)
class Confidence(MeasureThreshold):
    """Continues while the probabilities of the two likeliest next tokens differ by at most ``threshold``.

    This is CALM's softmax response. With ``threshold=1`` every token has depth K.
    """

    word: ClassVar[str] = "confidence"
    at_most: ClassVar[bool] = True
    logits_read: ClassVar[int] = 1

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``p(1st) - p(2nd)`` of the next-token distribution, 0 to 1; computes logits in small chunks."""

        def margin(hidden: Tensor) -> Tensor:
            first, second = torch.softmax(widened(rows.head(hidden)), dim=-1).topk(2, dim=-1).values.unbind(-1)
            return first - second

        return in_chunks(margin, rows.hidden)


@dataclass(frozen=True)
class Divergence(MeasureThreshold):
    """Continues while the KL divergence between the last two predictions is at least ``threshold`` nats."""

    word: ClassVar[str] = "kl"
    reads_previous: ClassVar[bool] = True
    logits_read: ClassVar[int] = 2

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``KL(p_i || p_{i-1})`` of the next-token distributions, in nats; infinite for rows at iteration 0."""

        def divergence(hidden: Tensor, before: Tensor) -> Tensor:
            log_p, log_q = (torch.log_softmax(widened(rows.head(states)), dim=-1) for states in (hidden, before))
            return (log_p.exp() * (log_p - log_q)).sum(-1)

        return _since_previous(rows, lambda hidden, before: in_chunks(divergence, hidden, before), first=math.inf)


@dataclass(frozen=True)
class Change(MeasureThreshold):
    """Continues while the relative change of the final-normed hidden state is at least ``threshold``."""

    word: ClassVar[str] = "change"
    reads_previous: ClassVar[bool] = True

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``|h_i - h_{i-1}| / |h_{i-1}|`` of the final-normed hidden states; infinite at iteration 0."""

        def change(hidden: Tensor, before: Tensor) -> Tensor:
            hidden, before = widened(hidden), widened(before)
            return (hidden - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(torch.finfo(before.dtype).tiny)

        return _since_previous(rows, change, first=math.inf)


@dataclass(frozen=True)
class Similarity(MeasureThreshold):
    """Continues while the cosine of a token's last two final-normed hidden states is at most ``threshold``.

    This is CALM's hidden-state saturation.
    """

    word: ClassVar[str] = "similarity"
    reads_previous: ClassVar[bool] = True
    at_most: ClassVar[bool] = True

    @staticmethod
    def measure(rows: PolicyInput) -> Tensor:
        """Equals ``cos(h_i, h_{i-1})`` of the final-normed hidden states; minus infinity at iteration 0."""

        def cosine(hidden: Tensor, before: Tensor) -> Tensor:
            return torch.cosine_similarity(widened(hidden), widened(before), dim=-1)

        return _since_previous(rows, cosine, first=-math.inf)


def entropy_of(logits: Tensor) -> Tensor:
    """Returns the entropy of each next-token distribution, in nats."""
    log_p = torch.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def in_chunks(function: Callable[..., Tensor], *states: Tensor) -> Tensor:
    """Computes ``function(*states)`` in chunks of rows, to save memory; ``states`` are hidden states or logits."""
    chunks = [state.flatten(0, -2).split(_ROWS) for state in states]
    return torch.cat([function(*chunk) for chunk in zip(*chunks, strict=True)]).view(states[0].shape[:-1])


def _since_previous(rows: PolicyInput, measure: Callable[[Tensor, Tensor], Tensor], *, first: float) -> Tensor:
    """Returns ``measure(hidden, previous)``, but ``first`` for rows at iteration 0, which have no previous state."""
    if rows.previous is None:
        return torch.full_like(rows.gate, first)
    return torch.where(rows.iteration == 0, first, measure(rows.hidden, rows.previous))
