"""Computes the learning rate, objective, policy and trained parameters of a step, and builds the optimizer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from adaponder.halting import ponder_fraction
from adaponder.methods import Objective
from adaponder.methods.base import Method
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import Policy
from adaponder.recipes import TrainRecipe


class Phase(NamedTuple):
    """Steps ``start … end - 1``, with the backbone trained or frozen; each phase has a new optimizer."""

    start: int
    end: int
    backbone_trains: bool


def phases(train: TrainRecipe) -> list[Phase]:
    """Returns the non-empty phases of a run: one that trains only the method's parameters, then one that trains all."""
    frozen = train.freeze_backbone_steps
    both = [Phase(0, frozen, False), Phase(frozen, train.steps, True)]
    return [phase for phase in both if phase.end > phase.start]


def learning_rate_factor(train: TrainRecipe, step: int) -> float:
    """Returns the learning rate divided by its peak: linear warm-up, then a cosine down to ``min_lr_ratio``.

    After a phase with a frozen backbone, a second linear warm-up of ``joint_warmup`` steps multiplies the factor.
    """
    second_warmup, warmup = 1.0, _steps(train.warmup, train)
    if train.joint_warmup and 0 < train.freeze_backbone_steps <= step:
        second_warmup = min(1.0, (step - train.freeze_backbone_steps + 1) / max(1, _steps(train.joint_warmup, train)))
    if step < warmup:
        return second_warmup * ((step + 1) / warmup)
    done = (step - warmup) / max(1, train.steps - 1 - warmup)
    cosine = train.min_lr_ratio + (1.0 - train.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return second_warmup * cosine


def _steps(warmup: float, train: TrainRecipe) -> int:
    """Returns the number of warm-up steps. ``warmup`` below 1 is a share of all steps."""
    return round(warmup * train.steps) if warmup < 1 else int(warmup)


def exit_entropy_at(train: TrainRecipe, step: int) -> float | None:
    """Returns Ouro's exit-entropy weight beta at ``step``, interpolated linearly; ``None``: the config's value."""
    if train.exit_entropy is None:
        return None
    before, after = train.exit_entropy
    start, end = train.exit_entropy_steps or (0, train.steps - 1)
    if step >= end:
        return after
    return before if step <= start else before + (after - before) * (step - start) / (end - start)


def objective_at(train: TrainRecipe, step: int) -> Objective:
    """Returns the objective of ``step``: cross-entropy (eq. 11), in stage 2 also the ponder loss (eq. 12 to 14)."""
    fraction = ponder_fraction(step, start=train.ponder_start, full=train.ponder_full, k_max=train.k_max)
    return Objective(
        ponder_weight=train.ponder_weight if step >= train.ponder_start else 0.0,
        ponder_fraction=fraction,
        exit_stage=train.exit_stage,
        exit_entropy_weight=exit_entropy_at(train, step),
    )


def policy_at(train: TrainRecipe, method: Method, step: int) -> Policy | None:
    """Returns the policy of ``step``: full depth before ``ponder_start`` unless ``halt_before_ponder`` is set.

    ``None`` means the method's default policy. A method's own ``training_policy`` takes precedence.
    """
    policy = method.training_policy(step / train.capacity_warmup if train.capacity_warmup else 1.0)
    if policy is None and method.halts and step < train.ponder_start and not train.halt_before_ponder:
        return method.full_depth
    return policy


def named_groups(model: nn.Module, train: TrainRecipe) -> list[dict]:
    """Returns AdamW's parameter groups, each with parameter names, peak learning rate, weight decay and first step.

    Backbone and method have one group of matrices, with weight decay, and one of vectors, without; empty groups are
    left out.
    """
    gate_lr = train.lr if train.gate_lr is None else train.gate_lr
    pressed = isinstance(model, AdaPonderForCausalLM) and model.method.has_ponder_term
    owners = (("backbone", train.lr, 0), ("method", gate_lr, train.gates_begin(pressed=pressed)))
    groups = {
        (owner, is_matrix): {"params": [], "names": [], "peak": peak, "start": start, "weight_decay": decay}
        for owner, peak, start in owners
        for is_matrix, decay in ((True, train.weight_decay), (False, 0.0))
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[("method" if name.startswith("method.") else "backbone", parameter.ndim >= 2)]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(model: nn.Module, train: TrainRecipe) -> torch.optim.AdamW:
    """Returns AdamW over the parameters that require gradients; fused on a GPU."""
    groups = named_groups(model, train)
    on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=1e-8, fused=on_gpu)


def set_learning_rate(optimizer: torch.optim.Optimizer, train: TrainRecipe, step: int) -> float:
    """Sets each group's learning rate, which is 0 before the group's first step; returns that of the backbone."""
    factor = learning_rate_factor(train, step)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor if step >= group["start"] else 0.0
    return train.lr * factor
