"""Steers the ponder loss towards a target mean depth. (The paper has no controller: weight and k are set by hand.)

The ponder loss is the mean of the lowest share k of all gates. If a share ``(K - target) / (K - 1)`` of tokens halts
at the first gate and the other tokens never halt, the mean depth is the target, and ``(K - target) / (K - 1)**2`` of
all gates are closed: this share is the initial k. From step ``ponder_full`` on, ``k = initial k * exp(u)`` and
``weight = ponder_weight * exp(u)``, where ``u``, the pressure, integrates the error of the mean depth. There is one
exception: while the depth expected from the gates' probabilities is already below the target, ``u`` does not rise,
because gates need many steps to fall below tau and hardly ever rise again.

The controller can only close gates: if cross-entropy alone closes too many, the mean depth stays below the target.
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
    """Adjusts ``pressure``, the log of a factor on ponder weight and k, so that the mean depth reaches ``target``.

    From step ``start`` on, adds ``gain * (mean depth - target) / (K - 1)`` to ``pressure`` every ``every`` steps.
    """

    target: float  # the mean depth to reach
    iterations: int  # K
    start: int  # the first step whose objective the controller changes
    gain: float
    every: int
    pressure: float = 0.0  # u: the log of the factor by which the ponder weight and k are multiplied
    # This process's sums since the last update: number of tokens, their depths, and their expected depths if each gate
    # is the probability of continuing.
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.double))

    def steer(self, objective: Objective, step: int) -> Objective:
        """Returns ``objective`` with ponder weight and k scaled by ``exp(pressure)``; before ``start``, unchanged."""
        if step < self.start:
            return objective
        factor = math.exp(self.pressure)
        initial_fraction = (self.iterations - self.target) / (self.iterations - 1) ** 2
        weight, fraction = objective.ponder_weight * factor, min(1.0, initial_fraction * factor)
        return replace(objective, ponder_weight=weight, ponder_fraction=fraction)

    def add(self, depth: Tensor, gates: Tensor, step: int) -> None:
        """Adds depths ``[batch, time]`` and gates ``[batch, time, K-1]`` of one micro-step of ``step`` to the sums."""
        if step >= self.start:
            expected = 1.0 + gates.detach().cumprod(-1).sum(-1)
            new = torch.stack([(depth > 0).sum().double(), depth.sum().double(), expected.sum().double()])
            self.sums = self.sums.to(new.device) + new

    def due(self, step: int) -> bool:
        """Returns whether the pressure is updated after ``step``."""
        return step >= self.start and (step + 1 - self.start) % self.every == 0

    def update(self, sums: Tensor) -> None:
        """Updates the pressure from ``sums``, the totals over all processes; resets the sums of this process."""
        tokens, depths, expected = sums.tolist()
        error = (depths / tokens - self.target) / (self.iterations - 1)
        if error > 0 and expected / tokens < self.target:
            error = 0.0
        self.pressure = max(-_LARGEST, min(_LARGEST, self.pressure + self.gain * error))
        self.sums = torch.zeros_like(self.sums)

    def state(self, sums: Tensor) -> dict[str, Any]:
        """Returns the state for a checkpoint; ``sums`` are the totals over all processes."""
        return {"pressure": self.pressure, "seen": sums.tolist()}


def controller_of(
    train: TrainRecipe, model: AdaPonderForCausalLM, world: World, state: dict[str, Any] | None
) -> DepthController | None:
    """Returns a controller with a checkpoint's ``state`` (if given); ``None`` if ``train.target_depth`` is unset."""
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
