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
    """Tokens by depth of the trainer's forwards, in training and in one evaluation; of this process alone.

    Every forward in training mode that had a loss counts. In evaluation one counts when the trainer says so
    (:meth:`evaluated`): others may read with the same model between two evaluations.
    """

    def __init__(self) -> None:
        self.sums: dict[bool, Tensor] = {}
        self.last: Tensor | None = None  # of the last forward in evaluation
        self.batches: Any = None  # of the evaluation that is counted

    def watch(self, model: AdaPonderForCausalLM) -> None:
        """Counts what this model reads from now on."""
        if self._count not in model._forward_hooks.values():
            model.register_forward_hook(self._count)

    def _count(self, model: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, AdaPonderOutput) and output.loss is not None and output.depth is not None:
            levels = torch.arange(1, model.config.iterations + 1, device=output.depth.device)
            counts = (output.depth[..., None] == levels).sum((0, 1))
            if model.training:
                self._add(counts, training=True)
            else:
                self.last = counts

    def evaluated(self, batches: Any) -> None:
        """The last forward was the trainer's own, of an evaluation of ``batches``; those of another are forgotten."""
        if batches is not self.batches:
            self.sums.pop(False, None)
        if self.last is not None:
            self._add(self.last, training=False)
        self.batches, self.last = batches, None

    @property
    def trained(self) -> bool:
        """Whether a forward in training was counted since they were last taken."""
        return True in self.sums

    def _add(self, counts: Tensor, *, training: bool) -> None:
        kept = self.sums.get(training)
        self.sums[training] = counts if kept is None else kept.to(counts.device) + counts

    def take(self, *, training: bool) -> dict[str, float]:
        """``depth``, the mean, and ``halted_1 … halted_{K-1}``, the shares of tokens that were read at most so often.

        Of the tokens counted since the last call; empty where there was none.
        """
        counts = self.sums.pop(training, None)
        if counts is None or not (total := int(counts.sum())):
            return {}
        depth = float((counts * torch.arange(1, len(counts) + 1, device=counts.device)).sum()) / total
        shares = (counts.cumsum(0)[:-1] / total).tolist()
        return {"depth": depth} | {f"halted_{n}": share for n, share in enumerate(shares, 1)}
