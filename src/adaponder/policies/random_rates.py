"""Random depths of every mixture: sequences read deeply and hardly at all, and in each of them tokens that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.random import unit_hash
from adaponder.policies.values import as_number, set_fields

# Draws of a token or of a sequence that no iteration makes: its rate, and whether it has one of its own.
_RATE, _OWN = -1, -2


@dataclass(frozen=True)
class RandomRates(Policy):
    """Read on at random, at a rate that is itself drawn, so that ``P(depth > i) = prior / (prior + i)``.

    A rate is the probability to read on after each iteration; it is drawn from Beta(prior, 1), at prior = 1 uniformly.
    One half of the tokens share a rate that their sequence draws, each of the others draws its own. So whole sequences
    are read once or K times, and in each of them some tokens go to the end whatever the others do.

    All is a hash of (seed, position, iteration): the same in any batch. Sequences differ by their seeds.
    """

    prior: float = 1.0
    word: ClassVar[str] = "random-rates"
    value_field: ClassVar[str] = "prior"

    def __post_init__(self) -> None:
        set_fields(self, prior=as_number("prior", self.prior))
        if not 0.0 < self.prior <= 1e6:
            raise InputError(f"prior={self.prior}: above 0, at most 1,000,000; 1 draws rates uniformly")

    def __call__(self, rows: PolicyInput) -> Tensor:
        own = self._draw(rows, rows.position, _OWN) < 0.5
        shared = self._draw(rows, torch.full_like(rows.position, -1), _RATE)
        rate = torch.where(own, self._draw(rows, rows.position, _RATE), shared) ** (1.0 / self.prior)
        return unit_hash(rows.position, rows.seed, rows.iteration) < rate

    def _draw(self, rows: PolicyInput, position: Tensor, what: int) -> Tensor:
        return unit_hash(position, rows.seed, torch.full_like(rows.iteration, what))

    def reaching(self, iteration: int) -> float:
        """The share of tokens that are read at this iteration, from 0."""
        return self.prior / (self.prior + iteration)
