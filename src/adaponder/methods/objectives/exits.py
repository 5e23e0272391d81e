"""Ouro's two stages: the expected loss over exits with an entropy bonus, then exits trained on each loop's gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution
from adaponder.methods.objectives.base import Losses, Scorer, Trajectory, losses_by_depth


@dataclass
class ExpectedExitLoss:
    """Stage I: each token's loss averaged over where it may exit, minus ``entropy_weight`` times that entropy."""

    needs_states: ClassVar[bool] = True

    entropy_weight: float

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses, logit = _per_loop(trajectory, score)
        log_p = exit_log_probabilities(logit)
        expected = score.mean((log_p.exp() * losses).sum(0))
        entropy = score.mean(-(log_p.exp() * log_p).sum(0))
        terms = {"cross_entropy": score.mean(losses[-1]), "expected": expected, "entropy": entropy}
        return Losses(expected - self.entropy_weight * entropy, terms)


class ExitImprovementLoss:
    """Stage II: the exit gate learns to go on where the loop just done helped; cross-entropy is only reported."""

    needs_states: ClassVar[bool] = True

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses, logit = _per_loop(trajectory, score)
        cross_entropy = score.mean(losses[-1])
        exits = score.mean(improvement_loss(logit, losses))
        return Losses(exits, {"cross_entropy": cross_entropy, "exits": exits})


def _per_loop(trajectory: Trajectory, score: Scorer) -> tuple[Tensor, Tensor]:
    """Per-token losses and exit logits after each loop, ``[loops, batch, time]`` both."""
    assert trajectory.gates is not None  # the exit gate speaks after every loop
    losses = losses_by_depth(trajectory, score)
    return losses, trajectory.gates.movedim(-1, 0).to(losses.dtype)


def exit_log_probabilities(logit: Tensor) -> Tensor:
    """Equals ``log(lambda_t * prod_{j<t} (1 - lambda_j))`` along the first axis, the remainder on the last loop."""
    log_exit = nn.functional.logsigmoid(logit)
    log_stay = nn.functional.logsigmoid(-logit)
    before = torch.cat([torch.zeros_like(log_stay[:1]), log_stay.cumsum(0)[:-1]])
    return torch.cat([(log_exit + before)[:-1], before[-1:]])


def improvement_loss(logit: Tensor, losses: Tensor) -> Tensor:
    """Per token, the mean over loops t after the first of the binary cross-entropy of ``1 - lambda_t`` against
    ``sigmoid(50 (I_t - 0.005))``, where ``I_t = max(0, L_{t-1} - L_t)`` is what the loop gained.

    The first loop has none before it to gain on, so K loops have K - 1 terms. Divided by K instead, the loss would be
    smaller by a constant factor: it is the whole loss of its stage, and AdamW's steps hardly depend on its scale.
    """
    if len(losses) == 1:
        return torch.zeros_like(losses[0])
    improvement = (losses[:-1] - losses[1:]).clamp_min(0).detach()
    target = torch.sigmoid(50.0 * (improvement - 0.005))
    return nn.functional.binary_cross_entropy_with_logits(-logit[1:], target, reduction="none").mean(0)
