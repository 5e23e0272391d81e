"""The model of this family inside what another library's trainer holds, and the depths of what it reads there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adaponder.errors import InputError
from adaponder.modeling import AdaPonderForCausalLM, AdaPonderOutput


def member_of(model: nn.Module, who: str) -> AdaPonderForCausalLM:
    """The member of the family in a model that adapters or wrappers may surround; ``who`` asks, for the error."""
    for module in model.modules():
        if isinstance(module, AdaPonderForCausalLM):
            return module
    raise InputError(f"{who}: the Trainer's model is a {type(model).__name__}, not an AdaPonderForCausalLM")


class DepthCounts:
    """Tokens by depth, in training and in evaluation, of every forward that had a loss; of this process alone."""

    def __init__(self) -> None:
        self.sums: dict[bool, Tensor] = {}

    def watch(self, model: AdaPonderForCausalLM) -> None:
        """Counts what this model reads from now on."""
        if self._count not in model._forward_hooks.values():
            model.register_forward_hook(self._count)

    def _count(self, model: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, AdaPonderOutput) and output.loss is not None and output.depth is not None:
            levels = torch.arange(1, model.config.iterations + 1, device=output.depth.device)
            counts = (output.depth[..., None] == levels).sum((0, 1))
            kept = self.sums.get(model.training)
            self.sums[model.training] = counts if kept is None else kept.to(counts.device) + counts

    def take(self, *, training: bool) -> tuple[float, list[float]] | None:
        """(mean depth, shares of tokens halted after iterations 1 … K-1) since the last call; ``None`` of no token."""
        counts = self.sums.pop(training, None)
        if counts is None or not (total := int(counts.sum())):
            return None
        depth = float((counts * torch.arange(1, len(counts) + 1, device=counts.device)).sum()) / total
        return depth, (counts.cumsum(0)[:-1] / total).tolist()
