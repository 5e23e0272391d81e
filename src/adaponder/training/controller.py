"""Steers the ponder loss until tokens are read as often as wished: beyond the paper, which sets weight and k by hand.

The wish fixes a first k: to halt at once, a token must close its first gate, and ``(K - target) / (K - 1)`` of the
tokens must, which is that divided by ``K - 1`` of all gates. From ``ponder_full`` on one number, the pressure ``u``,
turns both: ``k = first k * exp(u)`` and ``weight = ponder_weight * exp(u)``. It is the integral of the error of the
mean depth, with one exception: gates need many steps to fall below tau and hardly ever come back, so while they already
promise enough halting (the depth expected if each gate were a coin) the pressure waits for them instead of rising.

It only ever presses gates shut. Where cross-entropy alone closes them, tokens end up read less often than wished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adaponder.methods import Objective

# Beyond a factor of 32 either way the ponder loss drowns the cross-entropy, or is not there.
_MOST = math.log(32.0)


@dataclass
class DepthController:
    """Looks at ``every`` steps together, then turns the pressure by ``gain`` times the relative error.

    Attributes:
        target: the wished mean depth.
        iterations: K.
        start: the first step it acts on.
        pressure: u.
        seen: sums since it last looked, on the device and of this process alone: tokens, their depths, and the depths
            that their gates promise.
    """

    target: float
    iterations: int
    start: int
    gain: float
    every: int
    pressure: float = 0.0
    seen: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.double))

    def steer(self, objective: Objective, step: int) -> Objective:
        """The objective of ``step`` under the present pressure."""
        if step < self.start:
            return objective
        factor = math.exp(self.pressure)
        first = (self.iterations - self.target) / (self.iterations - 1) ** 2
        return replace(
            objective,
            ponder_weight=objective.ponder_weight * factor,
            ponder_fraction=min(1.0, first * factor),
        )

    def add(self, depth: Tensor, gates: Tensor, step: int) -> None:
        """Counts a micro-step of ``step``: depths ``[batch, time]``, gates ``[batch, time, K-1]``."""
        if step >= self.start:
            promised = 1.0 + gates.detach().cumprod(-1).sum(-1)
            now = torch.stack([(depth > 0).sum().double(), depth.sum().double(), promised.sum().double()])
            self.seen = self.seen.to(now.device) + now

    def due(self, step: int) -> bool:
        """Whether the pressure turns after ``step``."""
        return step >= self.start and (step + 1 - self.start) % self.every == 0

    def turn(self, seen: Tensor) -> None:
        """Turns the pressure; ``seen`` is of all processes together."""
        tokens, depths, promised = seen.tolist()
        error = (depths / tokens - self.target) / (self.iterations - 1)
        if error > 0 and promised / tokens < self.target:
            error = 0.0
        self.pressure = max(-_MOST, min(_MOST, self.pressure + self.gain * error))
        self.seen = torch.zeros_like(self.seen)

    def state(self, seen: Tensor) -> dict[str, Any]:
        """What a checkpoint keeps; ``seen`` is of all processes together."""
        return {"pressure": self.pressure, "seen": seen.tolist()}

    def restore(self, state: dict[str, Any], device: torch.device, *, leads: bool) -> None:
        """Goes on from :meth:`state`; what all had counted is the leading process's to begin with."""
        self.pressure = float(state["pressure"])
        seen = torch.tensor(state["seen"], dtype=torch.double, device=device)
        self.seen = seen if leads else torch.zeros_like(seen)
