"""Rules that look at one token alone: its gate, its distribution, its hidden state, or nothing but its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.halting import stays_active
from adaponder.policies.base import Policy, PolicyInput, at, check_share, numbers, settle

# Rows whose logits exist at one time: with 50,000 words, 200 MB in float32.
_ROWS = 1024


@dataclass(frozen=True)
class LearnedGate(Policy):
    """Read on while ``s >= tau`` (eq. 4): the paper's rule, with one tau or one per gate; at ``inf`` nobody does."""

    tau: float | tuple[float, ...] = 1e-4

    def __post_init__(self) -> None:
        settle(self, tau=numbers("tau", self.tau))
        for tau in self.tau if isinstance(self.tau, tuple) else (self.tau,):
            if tau != math.inf:
                check_share("tau", tau)

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        self._one_per_gate("tau", self.tau, iterations)

    def __call__(self, rows: PolicyInput) -> Tensor:
        return stays_active(rows.gate, at(self.tau, rows.iteration, torch.float32))


@dataclass(frozen=True)
class RouterThreshold(Policy):
    """Read on while the router's logit is positive: how mor, trained to rank, decides causally."""

    method: ClassVar[str | None] = "mor"

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.gate.float() > 0.5


@dataclass(frozen=True)
class ExitThreshold(Policy):
    """Exit once the cumulative exit probability reaches ``q``: ouro's rule."""

    q: float = 1.0
    method: ClassVar[str | None] = "ouro"

    def __post_init__(self) -> None:
        if not 0.0 < self.q <= 1.0:
            raise InputError(f"q={self.q}: a probability above 0 is needed")

    def __call__(self, rows: PolicyInput) -> Tensor:
        return 1.0 - rows.gate.float() < self.q


@dataclass(frozen=True)
class FixedDepth(Policy):
    """Every token is read ``depth`` times."""

    depth: int

    def __post_init__(self) -> None:
        if not isinstance(self.depth, int) or self.depth < 1:
            raise InputError(f"depth={self.depth}: a whole number is needed, and a token must be read at least once")

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        if self.depth > iterations:
            raise InputError(
                f"policy={self.fingerprint}: the model reads a token at most K={iterations} times: name a depth from 1 "
                f"to {iterations}"
            )

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.iteration + 1 < self.depth


@dataclass(frozen=True)
class ForcedDepths(Policy):
    """Each token is read as often as ``depths[sequence, slot]`` says: replay, oracles, tests."""

    depths: Tensor

    def __post_init__(self) -> None:
        if self.depths.ndim != 2:
            raise InputError(f"depths has shape {tuple(self.depths.shape)}: [batch, time] is needed")
        if self.depths.is_floating_point() or self.depths.dtype == torch.bool:
            raise InputError(f"depths is {self.depths.dtype}: whole numbers are needed")

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        # On a GPU the host would wait for the answer, and a token is read K times at most anyway.
        if self.depths.device.type == "cpu" and self.depths.numel() and int(self.depths.max()) > iterations:
            raise InputError(
                f"policy: ForcedDepths asks for depth {int(self.depths.max())}, the model reads a token at most "
                f"K={iterations} times"
            )

    def check_batch(self, sequences: int, slots: int) -> None:
        if sequences > self.depths.shape[0] or slots > self.depths.shape[1]:
            raise InputError(f"depths has shape {tuple(self.depths.shape)}: too small for this batch")

    def __call__(self, rows: PolicyInput) -> Tensor:
        depths = self.depths.to(rows.slot.device)  # copies unless they are there already
        return rows.iteration + 1 < depths[rows.sequence, rows.slot]

    @property
    def fingerprint(self) -> str:
        return f"ForcedDepths({self.depths.tolist()})"


@dataclass(frozen=True)
class Random(Policy):
    """Read on with probability ``keep``: a hash of (seed, position, iteration), so a batch equals its singles."""

    keep: float

    def __post_init__(self) -> None:
        check_share("keep", self.keep)
        settle(self, keep=float(self.keep))

    def __call__(self, rows: PolicyInput) -> Tensor:
        return unit_hash(rows.position, rows.seed, rows.iteration) < self.keep


@dataclass(frozen=True)
class Entropy(Policy):
    """Read on while the next-token distribution's entropy (nats) is at least ``threshold``."""

    threshold: float | tuple[float, ...]

    def __post_init__(self) -> None:
        settle(self, threshold=numbers("threshold", self.threshold))

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        self._one_per_gate("threshold", self.threshold, iterations)

    def __call__(self, rows: PolicyInput) -> Tensor:
        signal = entropy(rows)
        return signal >= at(self.threshold, rows.iteration, signal.dtype)

    def heads(self, iteration: int) -> int:
        return 1


@dataclass(frozen=True)
class Divergence(Policy):
    """Read on while the last iteration moved the prediction: ``KL(p_i || p_{i-1})`` (nats) is at least ``threshold``.

    After iteration 0 there is nothing to compare with: everybody reads on, so no token is read fewer than two times.
    """

    threshold: float | tuple[float, ...]

    def __post_init__(self) -> None:
        settle(self, threshold=numbers("threshold", self.threshold))

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        self._one_per_gate("threshold", self.threshold, iterations)

    def __call__(self, rows: PolicyInput) -> Tensor:
        signal = divergence(rows)
        return signal >= at(self.threshold, rows.iteration, signal.dtype)

    def heads(self, iteration: int) -> int:
        return 2 if iteration else 0


@dataclass(frozen=True)
class Change(Policy):
    """Read on while the last iteration moved the final-normed hidden state by at least ``threshold`` of its length.

    After iteration 0 there is nothing to compare with: everybody reads on, so no token is read fewer than two times.
    """

    threshold: float | tuple[float, ...]

    def __post_init__(self) -> None:
        settle(self, threshold=numbers("threshold", self.threshold))

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        self._one_per_gate("threshold", self.threshold, iterations)

    def __call__(self, rows: PolicyInput) -> Tensor:
        signal = change(rows)
        return signal >= at(self.threshold, rows.iteration, signal.dtype)


def entropy(rows: PolicyInput) -> Tensor:
    """Equals ``-sum p log p`` of the next-token distribution, in nats; logits exist for a few rows at a time."""

    def of(hidden: Tensor) -> Tensor:
        log_p = torch.log_softmax(_wide(rows.head(hidden)), dim=-1)
        return -(log_p.exp() * log_p).sum(-1)

    return _in_rows(of, rows.hidden)


def divergence(rows: PolicyInput) -> Tensor:
    """Equals ``KL(p_i || p_{i-1})`` of a token's next-token distributions, in nats; infinite after iteration 0."""
    if rows.previous is None:
        return torch.full_like(rows.gate, math.inf)

    def of(hidden: Tensor, before: Tensor) -> Tensor:
        log_p, log_q = (torch.log_softmax(_wide(rows.head(one)), dim=-1) for one in (hidden, before))
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    return torch.where(rows.iteration == 0, math.inf, _in_rows(of, rows.hidden, rows.previous))


def change(rows: PolicyInput) -> Tensor:
    """Equals ``|h_i - h_{i-1}| / |h_{i-1}|`` of the final-normed hidden states; infinite after iteration 0."""
    if rows.previous is None:
        return torch.full_like(rows.gate, math.inf)
    hidden, before = _wide(rows.hidden), _wide(rows.previous)
    moved = (hidden - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(torch.finfo(before.dtype).tiny)
    return torch.where(rows.iteration == 0, math.inf, moved)


def _in_rows(function: Callable[..., Tensor], *states: Tensor) -> Tensor:
    """``function`` of hidden states, a few rows at a time."""
    flat = [state.flatten(0, -2).split(_ROWS) for state in states]
    return torch.cat([function(*rows) for rows in zip(*flat, strict=True)]).view(states[0].shape[:-1])


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def unit_hash(position: Tensor, seed: Tensor, iteration: Tensor) -> Tensor:
    """Equals a uniform number in [0, 1) that depends on (seed, position, iteration) alone (splitmix64).

    All three are int64. Products wrap around modulo 2**64, of which 2**62 is a divisor: the remainder is the exact one.
    """
    x = position + ((seed * 0x9E3779B9 + iteration * 0x85EBCA6B) & ((1 << 62) - 1))
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * factor
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x & ((1 << 24) - 1)).double() / (1 << 24)
