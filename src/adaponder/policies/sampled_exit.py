"""Exits drawn from a model's own exit distribution, the same in every batch because the draw is a hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.random import unit_hash

# The draw is a token's, not an iteration's: no iteration has this number.
_DRAW = -3


@dataclass(frozen=True)
class SampledExit(Policy):
    """Each token exits after iteration ``n`` with the probability that its exit gate gives to ``n``.

    One number ``u`` in [0, 1) is drawn for each token by a hash of (seed, position); a token reads on while the
    probability of having stayed is above ``u``, which is exact: ``P(stay > u) = stay``.
    """

    signal: ClassVar[str | None] = "exit"
    word: ClassVar[str] = "sampled-exit"

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.gate.double() > unit_hash(rows.position, rows.seed, torch.full_like(rows.iteration, _DRAW))
