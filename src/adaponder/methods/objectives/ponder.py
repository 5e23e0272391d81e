"""The ponder loss: the lowest gates are pressed further down, until they halt their tokens (eq. 12 and 13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.execution.base import Execution
from adaponder.halting import ponder_pool
from adaponder.methods.objectives.base import CrossEntropy, Losses, Scorer, Trajectory, with_term


@dataclass
class PonderLoss:
    """Cross-entropy plus ``weight`` times the mean of the smallest ``fraction`` of all gates, or of each iteration's.

    Attributes:
        weight, fraction: the paper's lambda and ``k_s``.
        on, pool: which collection of gates is ranked; see :func:`adaponder.halting.ponder_pool`.
        bottom_k: the mean of the smallest values; several processes rank theirs together.
        share: see :class:`adaponder.methods.objectives.Objective`.
    """

    needs_states: ClassVar[bool] = False

    weight: float
    fraction: float
    on: str
    pool: str
    bottom_k: Callable[[Tensor, float], Tensor]
    share: float | None = None

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)  # eq. 11
        if trajectory.gates is None or self.weight == 0.0:
            return losses
        # Without padding every token counts, and the pool's size is known without asking the device.
        real = None if execution.tokens.plain else execution.tokens.real
        pool = ponder_pool(trajectory.gates, real, execution.depth, on=self.on, pool=self.pool)
        if self.pool == "each":
            ponder = torch.stack([self.bottom_k(gate, self.fraction) for gate in pool.unbind(-1)]).mean()
        else:
            ponder = self.bottom_k(pool, self.fraction)  # eq. 13
        return with_term(losses, "ponder", ponder, score, weight=self.weight, share=self.share)  # eq. 12
