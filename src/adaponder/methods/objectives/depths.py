"""The loss after every iteration, under a fixed prior over depths: a model that may be stopped anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.execution.base import Execution
from adaponder.methods.objectives.base import Losses, Scorer, Trajectory, losses_by_depth
from adaponder.policies import GateOrChance, Policy, RandomRates, as_int64


@dataclass
class EveryDepthLoss:
    """``sum_i prior[i] / r_i * loss_i`` over the iterations ``i`` that each token took part in, the mean over targets.

    ``r_i`` is the share of tokens that the policy lets reach iteration ``i``, where it halts them by chance, else 1.
    So this is ``sum_i prior[i] * E[loss_i]``, estimated from every row that was computed. The factors are constants,
    not shares of a batch, so any partition into micro-steps has the same sum. Of a sequence whose tokens the gates
    halted only the loss at each token's own depth counts: that is what inference will have.
    """

    needs_states: ClassVar[bool] = True

    prior: tuple[float, ...]

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        return self.of(losses_by_depth(trajectory, score), score, execution)

    def of(self, losses: Tensor, score: Scorer, execution: Execution) -> Losses:
        """From the losses of each token after each iteration, ``[iterations, batch, time]``."""
        terms = {"cross_entropy": score.mean(losses[-1])}  # of each token's last state, at its own depth
        total = torch.zeros_like(terms["cross_entropy"])
        gated = gated_sequences(execution)
        for i, (loss, share) in enumerate(zip(losses, self.prior, strict=False)):
            reached = execution.depth > i
            weight = share / _chance(execution.control.policy, i) * reached.to(loss.dtype)
            if gated is not None:
                weight = torch.where(gated, (execution.depth == i + 1).to(loss.dtype), weight)
            total = total + score.mean(loss * weight)
            terms[f"depth_{i + 1}"] = _mean_of(loss.detach(), reached, score)
        return Losses(total, terms | {"every_depth": total})


def gated_sequences(execution: Execution) -> Tensor | None:
    """``[batch, 1]``: in which sequences the gates halted tokens; ``None`` where the policy knows no such."""
    policy = execution.control.policy
    if not isinstance(policy, GateOrChance):
        return None
    seed, depth = execution.control.seed, execution.depth
    if not isinstance(seed, torch.Tensor):
        seed = torch.full((len(depth),), as_int64(seed), device=depth.device)
    return policy.by_gate(seed.to(depth.device)).unsqueeze(1)


def _chance(policy: Policy, iteration: int) -> float:
    """The share of tokens that chance lets reach ``iteration``; 1 where it has no say."""
    by_chance = policy.by_chance if isinstance(policy, GateOrChance) else policy
    return by_chance.reaching(iteration) if isinstance(by_chance, RandomRates) else 1.0


def _mean_of(values: Tensor, chosen: Tensor, score: Scorer) -> Tensor:
    """The mean over the targets of chosen tokens; 0 where there are none."""
    count = score.mean(chosen.to(values.dtype))
    return score.mean(values * chosen) / count.clamp_min(torch.finfo(values.dtype).tiny)
