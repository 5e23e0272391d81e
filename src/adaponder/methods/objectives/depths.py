"""The loss after every iteration, under a fixed prior over depths: a model that may be stopped anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.execution.base import Execution
from adaponder.methods.objectives.base import Losses, Scorer, Trajectory


@dataclass
class EveryDepthLoss:
    """``sum_i weights[i] * loss_i`` over the iterations ``i`` that each token took part in, averaged over all targets.

    Where tokens halt by chance, and ``weights[i]`` is the prior of depth ``i + 1`` over the probability of reaching it,
    this is ``sum_i prior_i * E[loss_i]``, estimated from every row that was computed. The weights are constants, not
    shares of a batch, so any partition into micro-steps has the same sum.
    """

    needs_states: ClassVar[bool] = True

    weights: tuple[float, ...]

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        return self.of(losses_by_depth(trajectory, score), score, execution)

    def of(self, losses: Tensor, score: Scorer, execution: Execution) -> Losses:
        """From the losses of each token after each iteration, ``[iterations, batch, time]``."""
        terms = {"cross_entropy": score.mean(losses[-1])}  # of each token's last state, at its own depth
        total = torch.zeros_like(terms["cross_entropy"])
        for i, (loss, weight) in enumerate(zip(losses, self.weights, strict=False)):
            reached = execution.depth > i
            total = total + weight * score.mean(loss * reached)
            terms[f"depth_{i + 1}"] = _mean_of(loss.detach(), reached, score)
        return Losses(total, terms | {"every_depth": total})


def losses_by_depth(trajectory: Trajectory, score: Scorer) -> Tensor:
    """Losses of each token after each iteration, ``[iterations, batch, time]``; a halted token's stays what it was."""
    return torch.stack([score.nll(state) for state in trajectory.states])


def _mean_of(values: Tensor, chosen: Tensor, score: Scorer) -> Tensor:
    """The mean over the targets of chosen tokens; 0 where there are none."""
    count = score.mean(chosen.to(values.dtype))
    return score.mean(values * chosen) / count.clamp_min(torch.finfo(values.dtype).tiny)
