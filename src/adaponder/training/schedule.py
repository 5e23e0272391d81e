"""Pure functions of the step: learning rate, objective, policy, and which parameters train."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adaponder.halting import ponder_fraction
from adaponder.methods import Objective
from adaponder.methods.base import Method
from adaponder.policies import Policy
from adaponder.recipes import TrainRecipe


@dataclass(frozen=True)
class Phase:
    """Steps ``start … end - 1``, with the backbone frozen or not; a phase begins with a new optimizer."""

    start: int
    end: int
    backbone_trains: bool


def phases(train: TrainRecipe) -> list[Phase]:
    """The phases of a run: the method's own parameters alone, then all; either may be absent."""
    frozen = train.freeze_backbone_steps
    both = [Phase(0, frozen, False), Phase(frozen, train.steps, True)]
    return [phase for phase in both if phase.end > phase.start]


def phase_at(train: TrainRecipe, step: int) -> Phase:
    return next(phase for phase in phases(train) if step < phase.end)


def learning_rate_factor(train: TrainRecipe, step: int) -> float:
    """Share of the peak at ``step``: linear warm-up, then a cosine down to ``min_lr_ratio`` at the last step.

    Where joint training begins after gates alone, ``joint_warmup`` warms up once more, on top of that.
    """
    again, warmup = 1.0, _steps(train.warmup, train)
    if train.joint_warmup and 0 < train.freeze_backbone_steps <= step:
        again = min(1.0, (step - train.freeze_backbone_steps + 1) / max(1, _steps(train.joint_warmup, train)))
    if step < warmup:
        return again * ((step + 1) / warmup)
    done = (step - warmup) / max(1, train.steps - 1 - warmup)
    cosine = train.min_lr_ratio + (1.0 - train.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return again * cosine


def _steps(warmup: float, train: TrainRecipe) -> int:
    """A warm-up in steps; a value below 1 is a share of all steps."""
    return round(warmup * train.steps) if warmup < 1 else int(warmup)


def exit_entropy_at(train: TrainRecipe, step: int) -> float | None:
    """Ouro's beta at ``step``, linear between its two values; ``None`` where the recipe leaves it to the config."""
    if train.exit_entropy is None:
        return None
    before, after = train.exit_entropy
    start, end = train.exit_entropy_steps or (0, train.steps - 1)
    if step >= end:
        return after
    return before if step <= start else before + (after - before) * (step - start) / (end - start)


def objective_at(train: TrainRecipe, step: int) -> Objective:
    """Stage 1 is cross-entropy alone (eq. 11); from ``ponder_start`` on the ponder term is added (eq. 12 to 14)."""
    fraction = ponder_fraction(step, start=train.ponder_start, full=train.ponder_full, k_max=train.k_max)
    weight = train.ponder_weight if step >= train.ponder_start else 0.0
    return Objective(
        ponder_weight=weight,
        ponder_fraction=fraction,
        exit_stage=train.exit_stage,
        exit_entropy_weight=exit_entropy_at(train, step),
    )


def policy_at(train: TrainRecipe, method: Method, step: int) -> Policy | None:
    """The policy at ``step``: full depth in stage 1 unless ``halt_before_ponder``; ``None`` is the method's own."""
    policy = method.training_policy(step / train.capacity_warmup if train.capacity_warmup else 1.0)
    if policy is not None:
        return policy
    if method.halts and step < train.ponder_start and not train.halt_before_ponder:
        return method.full_depth
    return None
