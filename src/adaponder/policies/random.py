"""Policies that draw depths: by hashes of (seed, position, iteration), so that a draw is the same in any batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.gate import LearnedGate
from adaponder.policies.values import as_number, as_share, set_fields, unit_hash

# Numbers that no iteration has, for draws that belong to a token or to a sequence: the rate of a token or sequence,
# whether a token has its own rate, where a token exits, whether the gate decides in a sequence.
_RATE, _OWN_RATE, _EXIT, _BY_GATE = -1, -2, -3, -3


@dataclass(frozen=True)
class Random(Policy):
    """Continues with probability ``keep``. Tokens at equal positions of different sequences are decided alike."""

    keep: float
    word: ClassVar[str] = "random"
    value_field: ClassVar[str] = "keep"

    def __post_init__(self) -> None:
        set_fields(self, keep=as_share("keep", self.keep))

    def __call__(self, rows: PolicyInput) -> Tensor:
        return unit_hash(rows.position, rows.seed, rows.iteration) < self.keep


@dataclass(frozen=True)
class RandomRates(Policy):
    """Continues at a random rate that is itself drawn, so that ``P(depth > i) = prior / (prior + i)``.

    A rate is the probability to continue after each iteration, drawn from Beta(prior, 1), uniform at prior = 1. Half
    of the tokens share a rate that is drawn once per sequence, each of the others has its own. So whole sequences are
    read once or K times, and in each of them some tokens go to the end independently of the others.
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
        """Returns the share of tokens that are read at this iteration, from 0."""
        return self.prior / (self.prior + iteration)


@dataclass(frozen=True)
class GateOrChance(Policy):
    """In a ``share`` of the sequences the learned gate decides with ``tau``, in the others :class:`RandomRates`.

    So a model learns with the halts that its gates will make, and gates still learn the gain of every depth. A hash of
    a sequence's seed selects the rule.
    """

    share: float
    tau: float
    prior: float
    # Made once: a compiler (torch 2.11) does not find the fields of a policy that is made while it traces.
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
        """Returns whether the gate decides in a sequence of that seed, in the shape of ``seed``."""
        place = torch.full_like(seed, _BY_GATE)
        return unit_hash(place, seed, place) < self.share


@dataclass(frozen=True)
class SampledExit(Policy):
    """Samples where each token exits: after iteration ``n`` with the probability that its exit gate gives to ``n``.

    A token draws one number ``u`` in [0, 1) and continues while the probability of having stayed is above ``u``, which
    is exact: ``P(stay > u) = stay``.
    """

    signal: ClassVar[str | None] = "exit"
    word: ClassVar[str] = "sampled-exit"

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.gate.double() > _draw(rows, rows.position, _EXIT)


def _draw(rows: PolicyInput, position: Tensor, number: int) -> Tensor:
    """Returns the hash of (seed, ``position``, ``number``): a draw that no iteration makes."""
    return unit_hash(position, rows.seed, torch.full_like(rows.iteration, number))
