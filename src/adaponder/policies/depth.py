"""Policies with given or random depths.

Random numbers are hashes of (seed, position, iteration), so they do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError, shown
from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.gate import LearnedGate
from adaponder.policies.values import as_number, as_share, set_fields, unit_hash

# These numbers replace the iteration in hashes that are drawn once per token or sequence. The hashes decide the rate,
# whether a token has its own rate, when a token exits, and whether the gate decides in a sequence. The last two may be
# equal, because the position that is hashed for _BY_GATE is negative.
_RATE, _OWN_RATE, _EXIT, _BY_GATE = -1, -2, -3, -3


@dataclass(frozen=True)
class FixedDepth(Policy):
    """Gives every token the same depth."""

    depth: int
    reads_seed: ClassVar[bool] = False
    word: ClassVar[str] = "fixed"
    value_field: ClassVar[str] = "depth"

    def __post_init__(self) -> None:
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 1:
            raise InputError(f"depth={shown(self.depth)} must be a whole number, at least 1")

    @classmethod
    def parse_value(cls, value: str) -> int:
        depth = super().parse_value(value)
        if not depth.is_integer():
            raise InputError("the depth must be a whole number")
        return int(depth)

    def check(self, method: str, iterations: int) -> None:
        if self.depth > iterations:
            raise InputError(
                f"policy={self.spelling}: the depth must be between 1 and {iterations}, the model's iterations"
            )

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.iteration + 1 < self.depth


@dataclass(frozen=True)
class ForcedDepths(Policy):
    """Gives each token the depth ``depths[sequence, slot]``, for replay, oracles and tests.

    Depths on another device than the model's are copied at every iteration; move them first if speed matters.
    """

    depths: Tensor
    reads_seed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        depths = self.depths
        is_integer = isinstance(depths, Tensor) and not depths.is_floating_point() and depths.dtype != torch.bool
        if not is_integer or depths.ndim != 2:
            value = f"{depths.dtype} {tuple(depths.shape)}" if isinstance(depths, Tensor) else shown(depths)
            raise InputError(f"depths={value} must be a tensor [batch, time] of whole numbers")

    def check(self, method: str, iterations: int) -> None:
        # On a GPU, computing the maximum would synchronise, and no token gets more than K iterations anyway.
        if self.depths.device.type == "cpu" and self.depths.numel() and int(self.depths.max()) > iterations:
            raise InputError(
                f"policy: ForcedDepths has depth {int(self.depths.max())}, but the model reads a token at most "
                f"K={iterations} times"
            )

    def check_batch(self, sequences: int, slots: int) -> None:
        if sequences > self.depths.shape[0] or slots > self.depths.shape[1]:
            raise InputError(
                f"depths has shape {tuple(self.depths.shape)}: too small for this batch of {sequences} x {slots} slots"
            )

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.iteration + 1 < self.depths.to(rows.slot.device)[rows.sequence, rows.slot]

    @property
    def fingerprint(self) -> str:
        return f"ForcedDepths({self.depths.tolist()})"


@dataclass(frozen=True)
class Random(Policy):
    """Continues with probability ``keep``; tokens with equal seed and position in two sequences get equal depths."""

    keep: float
    word: ClassVar[str] = "random"
    value_field: ClassVar[str] = "keep"

    def __post_init__(self) -> None:
        set_fields(self, keep=as_share("keep", self.keep))

    def __call__(self, rows: PolicyInput) -> Tensor:
        return unit_hash(rows.position, rows.seed, rows.iteration) < self.keep


@dataclass(frozen=True)
class RandomRates(Policy):
    """Continues with a probability (rate) that is itself random, so that ``P(depth > i) = prior / (prior + i)``.

    Rates are drawn from Beta(prior, 1), which is uniform for prior = 1. Each token has its own rate with probability
    1/2, else the rate of its sequence. So some sequences are mostly shallow and some mostly deep, and in each of them
    some tokens reach full depth independently of the others.
    """

    prior: float = 1.0
    word: ClassVar[str] = "random-rates"
    value_field: ClassVar[str] = "prior"

    def __post_init__(self) -> None:
        set_fields(self, prior=as_number("prior", self.prior))
        if not 0.0 < self.prior <= 1e6:
            raise InputError(f"prior={self.prior} must be above 0 and at most 1,000,000; 1 draws rates uniformly")

    def __call__(self, rows: PolicyInput) -> Tensor:
        has_own_rate = _draw(rows, rows.position, _OWN_RATE) < 0.5
        shared = _draw(rows, torch.full_like(rows.position, -1), _RATE)
        rate = torch.where(has_own_rate, _draw(rows, rows.position, _RATE), shared) ** (1.0 / self.prior)
        return unit_hash(rows.position, rows.seed, rows.iteration) < rate

    def reaching(self, iteration: int) -> float:
        """Returns the expected share of tokens that are active in iteration ``iteration``, counted from 0."""
        return self.prior / (self.prior + iteration)


@dataclass(frozen=True)
class GateOrChance(Policy):
    """Decides by the learned gate with ``tau`` in a ``share`` of the sequences, by :class:`RandomRates` in the others.

    So the model is trained with the depths that its gates choose, while gates still learn from tokens at every depth.
    A hash of each sequence's seed selects the rule.
    """

    share: float
    tau: float
    prior: float
    # Created once, because torch.compile (2.11) does not find the fields of a policy that is created while tracing.
    gate: LearnedGate = field(init=False, repr=False, compare=False)
    by_chance: RandomRates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gate, by_chance, share = LearnedGate(self.tau), RandomRates(self.prior), as_share("share", self.share)
        set_fields(self, share=share, tau=gate.tau, prior=by_chance.prior, gate=gate, by_chance=by_chance)

    def check(self, method: str, iterations: int) -> None:
        self.gate.check(method, iterations)

    def __call__(self, rows: PolicyInput) -> Tensor:
        return torch.where(self.by_gate(rows.seed), self.gate(rows), self.by_chance(rows))

    def by_gate(self, seed: Tensor) -> Tensor:
        """Returns a bool per entry of ``seed``: whether the gate decides in sequences with this seed."""
        number = torch.full_like(seed, _BY_GATE)
        return unit_hash(number, seed, number) < self.share


@dataclass(frozen=True)
class SampledExit(Policy):
    """Samples the depth of each token from the exit distribution of its exit gate.

    Each token draws one uniform ``u`` in [0, 1) and continues while its probability of no exit so far is above ``u``.
    """

    signal: ClassVar[str | None] = "exit"
    word: ClassVar[str] = "sampled-exit"

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.gate.double() > _draw(rows, rows.position, _EXIT)


def _draw(rows: PolicyInput, position: Tensor, number: int) -> Tensor:
    """Returns a uniform number in [0, 1) per row, hashed from (seed, ``position``, ``number``); see ``_RATE``."""
    return unit_hash(position, rows.seed, torch.full_like(rows.iteration, number))
