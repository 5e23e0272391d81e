"""Depths that are known beforehand: one for all tokens, or one for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError, shown
from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.text import PolicyLine


@dataclass(frozen=True)
class FixedDepth(Policy):
    """Every token is read ``depth`` times."""

    depth: int
    reads_seed: ClassVar[bool] = False
    word: ClassVar[str] = "fixed"
    value_field: ClassVar[str] = "depth"

    def __post_init__(self) -> None:
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 1:
            raise InputError(
                f"depth={shown(self.depth)}: a whole number is needed, and a token must be read at least once"
            )

    @classmethod
    def parse_value(cls, line: PolicyLine) -> object:
        return line.whole_number()

    def check(self, method: str, iterations: int) -> None:
        if self.depth > iterations:
            raise InputError(
                f"policy={self.spelling}: the model reads a token at most K={iterations} times: name a depth from 1 "
                f"to {iterations}"
            )

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.iteration + 1 < self.depth


@dataclass(frozen=True)
class ForcedDepths(Policy):
    """Each token is read as often as ``depths[sequence, slot]`` says: replay, oracles, tests.

    Depths that lie on another device than the model are copied there at every iteration: put them there first where
    time matters.
    """

    depths: Tensor
    reads_seed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.depths, Tensor):
            raise InputError(f"depths={shown(self.depths)}: a tensor [batch, time] of whole numbers is needed")
        if self.depths.ndim != 2:
            raise InputError(f"depths has shape {tuple(self.depths.shape)}: [batch, time] is needed")
        if self.depths.is_floating_point() or self.depths.dtype == torch.bool:
            raise InputError(f"depths is {self.depths.dtype}: whole numbers are needed")

    def check(self, method: str, iterations: int) -> None:
        # On a GPU the host would wait for the answer, and a token is read K times at most anyway.
        if self.depths.device.type == "cpu" and self.depths.numel() and int(self.depths.max()) > iterations:
            raise InputError(
                f"policy: ForcedDepths asks for depth {int(self.depths.max())}, the model reads a token at most "
                f"K={iterations} times"
            )

    def check_batch(self, sequences: int, slots: int) -> None:
        if sequences > self.depths.shape[0] or slots > self.depths.shape[1]:
            raise InputError(f"depths has shape {tuple(self.depths.shape)}: too small for this batch, padding counted")

    def __call__(self, rows: PolicyInput) -> Tensor:
        depths = self.depths.to(rows.slot.device)
        return rows.iteration + 1 < depths[rows.sequence, rows.slot]

    @property
    def fingerprint(self) -> str:
        return f"ForcedDepths({self.depths.tolist()})"
