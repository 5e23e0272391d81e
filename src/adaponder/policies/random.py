"""Random depths that are the same in every batch, because they are a hash and not a draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.values import as_share, scrambled, set_fields


@dataclass(frozen=True)
class Random(Policy):
    """Read on with probability ``keep``, by a hash of (seed, position, iteration): the same in any batch.

    Tokens at equal positions of different sequences decide alike.
    """

    keep: float
    word: ClassVar[str] = "random"
    value_field: ClassVar[str] = "keep"

    def __post_init__(self) -> None:
        set_fields(self, keep=as_share("keep", self.keep))

    def __call__(self, rows: PolicyInput) -> Tensor:
        return unit_hash(rows.position, rows.seed, rows.iteration) < self.keep


def unit_hash(position: Tensor, seed: Tensor, iteration: Tensor) -> Tensor:
    """Equals a uniform number in [0, 1) that depends on (seed, position, iteration) alone (splitmix64).

    Seed and iteration are int64. Their products wrap around modulo 2**64, of which 2**62 is a divisor, so the
    remainder is that of exact whole numbers.
    """
    x = scrambled(position + ((seed * 0x9E3779B9 + iteration * 0x85EBCA6B) & ((1 << 62) - 1)))
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x & ((1 << 24) - 1)).double() / (1 << 24)
