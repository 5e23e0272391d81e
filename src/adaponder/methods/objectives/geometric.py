"""PonderNet's loss: the expected loss over exits, and how far the exit distribution is from a geometric one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.execution.base import Execution
from adaponder.methods.objectives.base import Losses, Scorer, Trajectory, losses_by_depth
from adaponder.methods.objectives.exits import exit_log_probabilities


@dataclass
class GeometricExitLoss:
    """``sum_n p_n loss_n + weight * KL(p || geometric(prior))``, the mean over targets.

    The prior is the exit distribution of who exits with chance ``prior`` after each iteration and, like ``p``, after
    the last one surely. ``expected_depth`` is ``sum_n n p_n``: training reads every token K times, so its mean depth
    says nothing of how deep tokens will be read.
    """

    needs_states: ClassVar[bool] = True

    prior: float
    weight: float

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = losses_by_depth(trajectory, score)
        log_p = exit_log_probabilities(_with_last(trajectory.gates, losses))
        p, number = log_p.exp(), torch.arange(1, len(losses) + 1, device=losses.device)
        expected = score.mean((p * losses).sum(0))
        log_prior = geometric_log_probabilities(self.prior, len(losses)).to(losses)
        divergence = score.mean((p * (log_p - log_prior[:, None, None])).sum(0))
        terms = {"cross_entropy": score.mean(losses[-1]), "expected": expected, "prior_divergence": divergence}
        terms["expected_depth"] = score.mean((p * number[:, None, None]).sum(0)).detach()
        return Losses(expected + self.weight * divergence, terms)


def _with_last(gates: Tensor | None, losses: Tensor) -> Tensor:
    """Exit logits ``[K, batch, time]``: those of K - 1 gates ``[batch, time, K - 1]``, and 0 for the last iteration.

    After that one everybody exits, whatever its logit.
    """
    last = torch.zeros_like(losses[:1])
    return last if gates is None else torch.cat([gates.movedim(-1, 0).to(losses.dtype), last])


def geometric_log_probabilities(prior: float, iterations: int) -> Tensor:
    """Equals ``log(prior (1 - prior)^{n-1})`` for ``n = 1 … K - 1`` and ``log((1 - prior)^{K-1})`` for K."""
    logit = math.log(prior) - math.log1p(-prior)
    return exit_log_probabilities(torch.full((iterations,), logit, dtype=torch.float64))


def mean_exit(prior: float, iterations: int) -> float:
    """Equals ``sum_n n p_n`` of that distribution."""
    return (1.0 - (1.0 - prior) ** iterations) / prior
