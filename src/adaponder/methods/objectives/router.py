"""The router loss: routers learn to say by their sign what choosing the top share of a sequence would say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution
from adaponder.methods.objectives.base import CrossEntropy, Losses, Scorer, Trajectory, with_term
from adaponder.ops.precision import widened


@dataclass
class RouterLoss:
    """Cross-entropy plus ``weight`` times each router's binary cross-entropy against the tokens that were chosen."""

    needs_states: ClassVar[bool] = False

    weight: float
    share: float | None = None

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)
        if not execution.gate_logits:
            return losses
        depth = execution.depth
        # After iteration i the router chose among the tokens that were computed then; the chosen have the next one too.
        terms = [agreement(logit, depth > i, depth > i + 1) for i, logit in enumerate(execution.gate_logits)]
        return with_term(losses, "router", torch.stack(terms).sum(), score, weight=self.weight, share=self.share)


def agreement(logit: Tensor, eligible: Tensor, chosen: Tensor) -> Tensor:
    """Binary cross-entropy of each logit against having been chosen, averaged over the eligible tokens."""
    logit = widened(logit)
    bce = nn.functional.binary_cross_entropy_with_logits(logit, chosen.to(logit.dtype), reduction="none")
    return (bce * eligible).sum() / eligible.sum().clamp_min(1)
