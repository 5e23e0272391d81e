"""A policy of one's own, whole: one file, nothing to register, no change in the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder import Policy, PolicyInput


@dataclass(frozen=True)
class TopProbability(Policy):
    """Read on while the likeliest next token has a probability below ``bound``."""

    bound: float
    word: ClassVar[str] = "top"
    value_field: ClassVar[str] = "bound"

    def __call__(self, rows: PolicyInput) -> Tensor:
        return torch.softmax(rows.logits.float(), dim=-1).amax(-1) < self.bound

    def heads(self, iteration: int) -> int:
        return 1
