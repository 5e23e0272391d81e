"""Policies that compare the model's signal (learned gate, router or exit gate) with a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.halting import stays_active
from adaponder.policies.base import Policy, PolicyInput
from adaponder.policies.values import as_floats, as_number, as_share, at, set_fields


@dataclass(frozen=True)
class LearnedGate(Policy):
    """Continues while ``s >= tau`` (eq. 4); ``tau`` is one number or one per gate, and ``inf`` halts every token."""

    tau: float | tuple[float, ...] = 1e-4
    reads_seed: ClassVar[bool] = False
    word: ClassVar[str] = "gate"
    value_field: ClassVar[str] = "tau"
    per_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        set_fields(self, tau=as_floats("tau", self.tau))
        for tau in self.tau if isinstance(self.tau, tuple) else (self.tau,):
            if tau != math.inf:
                as_share("tau", tau)

    def __call__(self, rows: PolicyInput) -> Tensor:
        return stays_active(rows.gate, at(self.tau, rows.iteration, torch.float32))


@dataclass(frozen=True)
class RouterThreshold(Policy):
    """Continues while the router's logit is positive: the causal rule of models trained to rank tokens by logit."""

    reads_seed: ClassVar[bool] = False
    signal: ClassVar[str | None] = "router"
    word: ClassVar[str] = "router"

    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.gate.float() > 0.5


@dataclass(frozen=True)
class ExitThreshold(Policy):
    """Halts once the cumulative exit probability reaches ``q``: the rule of models with an exit gate."""

    q: float = 1.0
    reads_seed: ClassVar[bool] = False
    signal: ClassVar[str | None] = "exit"
    word: ClassVar[str] = "exit"
    value_field: ClassVar[str] = "q"

    def __post_init__(self) -> None:
        set_fields(self, q=as_number("q", self.q))
        if not 0.0 < self.q <= 1.0:
            raise InputError(f"q={self.q} must be above 0 and at most 1")

    def __call__(self, rows: PolicyInput) -> Tensor:
        # Not 1 - gate < q: for a small gate, 1 - gate rounds to 1, so tokens would exit at q = 1 because of rounding.
        return rows.gate.float() > at(1.0 - self.q, rows.iteration, torch.float32)
