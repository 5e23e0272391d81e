"""Steers the ponder loss towards a mean depth (beyond the paper, which sets weight and k by hand).

The target fixes a first k: to halt at once, a token must close its first gate, and ``(K - target) / (K - 1)`` of the
tokens must, which is that divided by ``K - 1`` of all gates. From ``ponder_full`` on one number, the pressure ``u``,
scales both: ``k = first k * exp(u)`` and ``weight = ponder_weight * exp(u)``. It is the integral of the error of the
mean depth, with one exception: gates need many steps to fall below tau and hardly ever rise again, so while the depth
expected from their probabilities is already below the target, the pressure does not rise.

The controller can only close gates. Where cross-entropy alone closes them, the mean depth ends below the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adaponder.errors import TrainingError
from adaponder.methods import Objective, method_class, method_names
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import TrainRecipe
from adaponder.training.distributed import World

# Beyond a factor of 32 either way the ponder loss dominates the cross-entropy, or vanishes.
_LARGEST = math.log(32.0)


@dataclass
class DepthController:
    """Updates the pressure every ``every`` steps, by ``gain`` times the relative error of the mean depth.

    Attributes:
        target: the mean depth to reach.
        iterations: K.
        start: the first step it acts on.
        pressure: u.
        sums: since the last update, on the device and of this process: tokens, their depths, and the depths
            expected if each gate is the probability to continue.
    """

    target: float
    iterations: int
    start: int
    gain: float
    every: int
    pressure: float = 0.0
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.double))

    def steer(self, objective: Objective, step: int) -> Objective:
        """Returns the objective of ``step`` under the current pressure."""
        if step < self.start:
            return objective
        factor = math.exp(self.pressure)
        first = (self.iterations - self.target) / (self.iterations - 1) ** 2
        weight, fraction = objective.ponder_weight * factor, min(1.0, first * factor)
        return replace(objective, ponder_weight=weight, ponder_fraction=fraction)

    def add(self, depth: Tensor, gates: Tensor, step: int) -> None:
        """Adds a micro-step of ``step``: depths ``[batch, time]``, gates ``[batch, time, K-1]``."""
        if step >= self.start:
            expected = 1.0 + gates.detach().cumprod(-1).sum(-1)
            now = torch.stack([(depth > 0).sum().double(), depth.sum().double(), expected.sum().double()])
            self.sums = self.sums.to(now.device) + now

    def due(self, step: int) -> bool:
        """Returns whether the pressure is updated after ``step``."""
        return step >= self.start and (step + 1 - self.start) % self.every == 0

    def turn(self, sums: Tensor) -> None:
        """Updates the pressure from ``sums`` over all processes, and resets the sums."""
        tokens, depths, expected = sums.tolist()
        error = (depths / tokens - self.target) / (self.iterations - 1)
        if error > 0 and expected / tokens < self.target:
            error = 0.0
        self.pressure = max(-_LARGEST, min(_LARGEST, self.pressure + self.gain * error))
        self.sums = torch.zeros_like(self.sums)

    def state(self, sums: Tensor) -> dict[str, Any]:
        """Returns the state for a checkpoint; ``sums`` are over all processes."""
        return {"pressure": self.pressure, "seen": sums.tolist()}


def controller_of(
    train: TrainRecipe, model: AdaPonderForCausalLM, world: World, state: dict[str, Any] | None
) -> DepthController | None:
    """Returns the controller of ``train.target_depth``, restored from a checkpoint's ``state``; ``None`` if not set."""
    config, target = model.config, train.target_depth
    if target is None:
        return None
    if not model.method.has_ponder_term or not 1 <= target < config.iterations:
        methods = " or ".join(name for name in method_names() if method_class(name).has_ponder_term)
        raise TrainingError(
            f"train.target_depth={target} must be at least 1 and below the model's {config.iterations} iterations, "
            f"and needs a method with a ponder term ({methods}); this is {config.method}"
        )
    controller = DepthController(target, config.iterations, train.ponder_full, train.target_gain, train.target_every)
    if state is not None:
        controller.pressure = float(state["pressure"])
        sums = torch.tensor(state["seen"], dtype=torch.double, device=world.device)
        # The leading process continues with the sums of all processes.
        controller.sums = sums if world.leads else torch.zeros_like(sums)
    return controller
