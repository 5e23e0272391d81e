"""Halts of training that are halfway those of inference: gates decide in some sequences, chance in the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.gate import LearnedGate
from adaponder.policies.random import unit_hash
from adaponder.policies.random_rates import RandomRates
from adaponder.policies.values import as_share, set_fields

# A place of the hash that no token and none of its draws has.
_SEQUENCE = -3


@dataclass(frozen=True)
class GateOrChance(Policy):
    """In a ``share`` of the sequences the learned gate decides with ``tau``, in the others :class:`RandomRates`.

    So a model learns with the halts that its gates will make, and gates still see what every depth is worth. Which
    sequences are whose is a hash of their seeds.
    """

    share: float
    tau: float
    prior: float
    # Made once: a compiler (torch 2.11) does not find the fields of one that is made while it traces.
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
        """Whether the gate decides in a sequence of that seed, of the shape of ``seed``."""
        place = torch.full_like(seed, _SEQUENCE)
        return unit_hash(place, seed, place) < self.share
