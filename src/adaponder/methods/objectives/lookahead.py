"""Gates learn to foresee: will some later iteration lower this token's loss by more than delta?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from adaponder.execution.base import Execution
from adaponder.methods.objectives.base import Losses, Scorer, Trajectory, with_term
from adaponder.methods.objectives.depths import EveryDepthLoss, losses_by_depth


@dataclass
class LookaheadLoss:
    """The loss of every depth plus each gate's binary cross-entropy against its label, the mean over gates.

    The label of gate ``i`` needs the losses of all later iterations, so only tokens that were read to the end have
    labels. A token that halted on the way has none, not even where an iteration it did read helped: among tokens cut
    short only those with a positive label would be known, and gates would learn that label too often. Where chance
    halts tokens, chance also picks those with labels, so they are like all others; but a sequence that reads deeply has
    more of them, and so each sequence counts equally.

    No gradient goes into the labels. That none goes from gates into the backbone is up to the method: its gates must
    read detached states.

    Attributes:
        depths: the loss of the backbone.
        delta: nats.
        share: see :class:`adaponder.methods.objectives.Objective`.
    """

    needs_states: ClassVar[bool] = True

    depths: EveryDepthLoss
    delta: float
    share: float | None = None

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        by_depth = losses_by_depth(trajectory, score)
        losses = self.depths.of(by_depth, score, execution)
        if trajectory.gates is None:
            return losses
        label = lookahead_labels(by_depth.detach(), self.delta)
        labelled = (execution.depth == execution.passes) & score.counted
        logit = trajectory.gates.movedim(-1, 0).to(by_depth.dtype)
        surprise = nn.functional.binary_cross_entropy_with_logits(logit, label, reduction="none").mean(0)
        losses.terms["helped"] = mean_over_sequences(label.mean(0), labelled)
        term = mean_over_sequences(surprise, labelled)
        return with_term(losses, "lookahead", term, score, weight=1.0, share=self.share)


def lookahead_labels(losses: Tensor, delta: float) -> Tensor:
    """Equals ``[losses[i] - min(losses[i + 1:]) > delta]`` for each ``i`` but the last, along the first axis."""
    best_from = losses.flip(0).cummin(0).values.flip(0)
    return (losses[:-1] - best_from[1:] > delta).to(losses.dtype)


def mean_over_sequences(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of chosen entries in each row of ``[batch, time]``, averaged over the rows that have any; else 0."""
    count = chosen.sum(1)
    means = (values * chosen).sum(1) / count.clamp_min(1)
    return means.sum() / (count > 0).sum().clamp_min(1)
