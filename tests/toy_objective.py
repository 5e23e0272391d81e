"""A training loss of one's own, in one file: later iterations should not forget what earlier ones knew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.execution.base import Execution
from adaponder.methods.objectives import CrossEntropy, Losses, Scorer, Trajectory


@dataclass
class Remember:
    """Cross-entropy plus ``weight`` times the mean squared step of the hidden state from pass to pass."""

    needs_states: ClassVar[bool] = True

    weight: float

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)
        if len(trajectory.states) < 2:
            return losses
        steps: list[Tensor] = [
            score.mean((after - before).square().mean(-1))
            for before, after in zip(trajectory.states, trajectory.states[1:], strict=False)
        ]
        moved = torch.stack(steps).sum()
        return Losses(losses.total + self.weight * moved, losses.terms | {"moved": moved})
