"""Gates learn to foresee: will some later iteration lower this token's loss by more than delta?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution
from adaponder.methods.objectives.base import Losses, Scorer, Trajectory, losses_by_depth, own_count, with_term
from adaponder.methods.objectives.depths import EveryDepthLoss, gated_sequences


@dataclass
class LookaheadLoss:
    """The loss of every depth plus each gate's binary cross-entropy against its label, the mean over gates.

    The label of gate ``i`` needs the losses of all later iterations, so only tokens that were read to the end have
    labels. A token that halted on the way has none, not even where an iteration it did read helped: among tokens cut
    short only those with a positive label would be known, and gates would learn that label too often. Where chance
    halts tokens, chance also picks those with labels, so they are like all others; but a sequence that reads deeply has
    more of them, and so each sequence counts equally.

    Sequences in which the gates halted tokens give no labels: those read to the end there are not like all others.
    ``without_target`` teaches tokens that have no target to halt: they have no loss that reading on could lower. What
    other tokens miss then, the backbone learns to do without, if such halts are in its training.

    No gradient goes into the labels. That none goes from gates into the backbone is up to the method: its gates must
    read detached states.

    Attributes:
        depths: the loss of the backbone.
        delta: nats.
        by: what a label counts: ``tokens``, each the same, or ``nats``, the distance of its gain from ``delta``. Then
            the best gate is above one half where the expected gain is above ``delta``: a rare large gain outweighs many
            small losses, as it does in the mean that a budget is spent for.
        share, mean_count: see :class:`adaponder.methods.objectives.Objective`.
        without_target: whether tokens without a target have the label 0.
    """

    needs_states: ClassVar[bool] = True

    depths: EveryDepthLoss
    delta: float
    by: Literal["tokens", "nats"] = "tokens"
    share: float | None = None
    without_target: bool = False
    mean_count: Callable[[Tensor], Tensor] = own_count

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        by_depth = losses_by_depth(trajectory, score)
        losses = self.depths.of(by_depth, score, execution)
        if trajectory.gates is None:
            return losses
        gain = gains_ahead(by_depth.detach()) - self.delta
        label = (gain > 0).to(gain.dtype)
        whole, gated = execution.depth == execution.passes, gated_sequences(execution)
        if gated is not None:
            whole = whole & ~gated
        labelled = whole & score.counted
        logit = trajectory.gates.movedim(-1, 0).to(by_depth.dtype)
        losses.terms["helped"] = mean_over_sequences(label.mean(0), labelled, self.mean_count)
        counts = gain.abs() if self.by == "nats" else torch.ones_like(gain)
        term = mean_over_sequences(_surprise(logit, label, counts), labelled, self.mean_count)
        if self.without_target:
            none, once = torch.zeros_like(label), torch.ones_like(label)
            untaught = whole & ~score.counted
            term = term + mean_over_sequences(_surprise(logit, none, once), untaught, self.mean_count)
        return with_term(losses, "lookahead", term, score, weight=1.0, share=self.share)


def _surprise(logit: Tensor, label: Tensor, counts: Tensor) -> Tensor:
    """Binary cross-entropy of each token, times what its label counts, the mean over gates (the first axis)."""
    return nn.functional.binary_cross_entropy_with_logits(logit, label, counts, reduction="none").mean(0)


def gains_ahead(losses: Tensor) -> Tensor:
    """Equals ``losses[i] - min(losses[i + 1:])`` for each ``i`` but the last, along the first axis."""
    best_from = losses.flip(0).cummin(0).values.flip(0)
    return losses[:-1] - best_from[1:]


def mean_over_sequences(values: Tensor, chosen: Tensor, mean_count: Callable[[Tensor], Tensor] = own_count) -> Tensor:
    """The mean of each sequence's chosen entries (``[batch, time]``), averaged over sequences that have any; else 0.

    ``mean_count``: see :class:`adaponder.methods.objectives.Objective`; processes together then have the mean of all.
    """
    count = chosen.sum(1)
    means = (values * chosen).sum(1) / count.clamp_min(1)
    sequences = mean_count((count > 0).sum())
    return means.sum() / (sequences + (sequences == 0))
