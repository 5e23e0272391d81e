"""Policies with given depths: one depth for all tokens, or one per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError, shown
from adaponder.policies.base import Policy, PolicyInput


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
    """Gives each token the depth ``depths[sequence, slot]``; for replay, oracles and tests.

    Depths on another device than the model's are copied at every iteration; move them first if speed matters.
    """

    depths: Tensor
    reads_seed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        depths = self.depths
        is_integer = isinstance(depths, Tensor) and not depths.is_floating_point() and depths.dtype != torch.bool
        if not is_integer or depths.ndim != 2:
            given = f"{depths.dtype} {tuple(depths.shape)}" if isinstance(depths, Tensor) else shown(depths)
            raise InputError(f"depths={given} must be a tensor [batch, time] of whole numbers")

    def check(self, method: str, iterations: int) -> None:
        # On a GPU, computing the maximum would synchronise, and no token gets more than K iterations anyway.
        if self.depths.device.type == "cpu" and self.depths.numel() and int(self.depths.max()) > iterations:
            raise InputError(
                f"policy: ForcedDepths has depth {int(self.depths.max())}; the model reads a token at most "
                f"K={iterations} times"
            )

    def check_batch(self, sequences: int, slots: int) -> None:
        if sequences > self.depths.shape[0] or slots > self.depths.shape[1]:
            raise InputError(
                f"depths has shape {tuple(self.depths.shape)}: too small for this batch of {sequences} x {slots} slots"
            )

    def __call__(self, rows: PolicyInput) -> Tensor:
        depths = self.depths.to(rows.slot.device)
        return rows.iteration + 1 < depths[rows.sequence, rows.slot]

    @property
    def fingerprint(self) -> str:
        return f"ForcedDepths({self.depths.tolist()})"
