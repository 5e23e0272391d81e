"""ACT's ponder cost: each token pays for its iterations, and for what its halting probabilities left over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.execution.base import Execution
from adaponder.halting import gate_probability
from adaponder.methods.objectives.base import CrossEntropy, Losses, Scorer, Trajectory


@dataclass
class PonderCostLoss:
    """Cross-entropy plus ``weight`` times the mean over targets of ``N + R``.

    ``N`` is a token's depth and ``R = 1 - (h_1 + … + h_{N-1})`` the remainder. Gradients come from ``R`` alone, whose
    derivative is that of the cost wherever ``N`` does not jump: raising an earlier halting probability lowers it.
    """

    needs_states: ClassVar[bool] = False

    weight: float

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)
        if trajectory.gates is None:
            return losses
        rest = remainder(trajectory.gates, execution.depth)
        cost = score.mean(execution.depth + rest)
        terms = losses.terms | {"ponder_cost": cost, "remainder": score.mean(rest).detach()}
        return Losses(losses.total + self.weight * cost, terms)


def remainder(logits: Tensor, depth: Tensor) -> Tensor:
    """Equals ``1 - (h_1 + … + h_{N-1})``, at least 0, from halting logits ``[…, K - 1]`` and depths ``N [...]``."""
    before = torch.arange(1, logits.shape[-1] + 1, device=logits.device) < depth[..., None]
    return 1.0 - (gate_probability(logits) * before).sum(-1).clamp_max(1.0)
