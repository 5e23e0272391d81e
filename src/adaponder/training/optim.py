"""AdamW in four groups: the backbone's and the method's parameters, matrices with decay and the rest without."""

from __future__ import annotations

import torch
from torch import nn

from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import TrainRecipe
from adaponder.training.schedule import learning_rate_factor


def named_groups(model: nn.Module, train: TrainRecipe) -> list[dict]:
    """Parameter groups of AdamW with their names, peak rate, decay and first step; vectors do not decay.

    A plain decoder has no method, and so no parameters that could wait.
    """
    gate_lr = train.lr if train.gate_lr is None else train.gate_lr
    groups = {
        ("backbone", True): {"peak": train.lr, "weight_decay": train.weight_decay},
        ("backbone", False): {"peak": train.lr, "weight_decay": 0.0},
        ("method", True): {"peak": gate_lr, "weight_decay": train.weight_decay},
        ("method", False): {"peak": gate_lr, "weight_decay": 0.0},
    }
    pressed = isinstance(model, AdaPonderForCausalLM) and model.method.has_ponder_term
    gates_begin = train.gates_begin(pressed=pressed)
    for (part, _), group in groups.items():
        group |= {"params": [], "names": [], "start": gates_begin if part == "method" else 0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[("method" if name.startswith("method.") else "backbone", parameter.ndim >= 2)]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(model: nn.Module, train: TrainRecipe) -> torch.optim.AdamW:
    """AdamW over the parameters that train now; fused on a GPU."""
    groups = named_groups(model, train)
    on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=1e-8, fused=on_gpu)


def set_learning_rate(optimizer: torch.optim.Optimizer, train: TrainRecipe, step: int) -> float:
    """Sets every group to its peak times the schedule, or to 0 before its start; returns the backbone's rate."""
    factor = learning_rate_factor(train, step)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor if step >= group["start"] else 0.0
    return train.lr * factor
