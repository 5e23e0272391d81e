"""Computes training metrics: means since the last log, MFU, and a warning when the gates collapse.

:class:`DepthCounts` counts tokens by depth when another library's trainer runs the training loop.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adaponder.backbones.shape import Shape
from adaponder.config import AdaPonderConfig
from adaponder.errors import InputError
from adaponder.methods.cost import training_flops
from adaponder.modeling import AdaPonderForCausalLM, AdaPonderOutput
from adaponder.recipes import TrainRecipe
from adaponder.training.distributed import World

# Dense bf16 FLOPs per second as vendors state them, by a substring of the device's name in torch.
_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
# Below this mean, a gate multiplies updates by almost 0 and gets almost no gradient that could open it again.
_SHUT = 0.01
# If more tokens than this share halt at the same depth below K, the gates hardly distinguish tokens.
_NEARLY_ALL = 0.95


def count_depths(depth: Tensor, iterations: int) -> Tensor:
    """Returns the number of tokens of each depth 1 … K, ``int64[K]``; padding has depth 0 and does not count."""
    levels = torch.arange(1, iterations + 1, device=depth.device)
    return (depth[..., None] == levels).sum((0, 1))


def depth_shares(counts: Tensor) -> tuple[float, list[float]]:
    """Returns (mean depth, shares of tokens with depth at most 1 … K-1) from the counts of each depth."""
    total = counts.sum()
    levels = torch.arange(1, len(counts) + 1, device=counts.device)
    mean = float((counts * levels).sum()) / (float(total) or math.nan)
    return mean, (counts.cumsum(0)[:-1] / total).tolist()


@dataclass
class Tally:
    """Sums metrics since the last log, on the device; only :meth:`means` waits for the device."""

    steps: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.perf_counter)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def count(self, output: AdaPonderOutput, micro_steps: int, iterations: int) -> None:
        """Adds the output of a micro-step to the sums; a step has ``micro_steps`` of them."""
        assert output.loss is not None
        assert output.depth is not None
        for name, value in {"loss": output.loss, **(output.terms or {})}.items():
            self.add(name, value / micro_steps)
        self.add("depths", count_depths(output.depth, iterations))
        if output.gates is not None:
            self.add("gates", output.gates.sum((0, 1)))

    def means(self, world: World) -> dict[str, Any]:
        """Returns means over all processes; every process must call it."""
        sums = dict(self.sums)
        depths, norm = world.sum(sums.pop("depths")), float(sums.pop("grad_norm")) / self.steps
        gates = world.sum(sums.pop("gates")) if "gates" in sums else None
        metrics: dict[str, Any] = {
            name: float(world.sum(value)) / self.steps / world.size for name, value in sums.items()
        }
        metrics["grad_norm"] = norm
        metrics["tokens_per_second"] = self.tokens / (time.perf_counter() - self.began)
        metrics["mean_depth"], metrics["halted"] = depth_shares(depths)
        if gates is not None:
            metrics["gate_means"] = (gates / float(depths.sum())).tolist()
        return metrics


def utilisation(
    tokens_per_second: float, config: AdaPonderConfig, *, shape: Shape, sequence: int, world: World
) -> dict[str, float]:
    """Returns ``{"mfu": …}``, FLOPs per second divided by the device's peak; empty if the peak is unknown."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peak = next((rate for key, rate in _PEAK.items() if key in name), None)
    if peak is None:
        return {}
    flops = training_flops(config, sequence=sequence, shape=shape)
    return {"mfu": flops * tokens_per_second / (peak * world.size)}


def collapse(metrics: dict[str, Any], train: TrainRecipe, *, pressed: bool = True) -> tuple[str, str] | None:
    """Returns (kind, message) of a warning if the gates no longer distinguish tokens, else ``None``.

    ``pressed``: whether the loss has a ponder term. If not, there is no warning of gates that all stay open, nor of
    gates that close in stage 1.
    """
    step, halted, gates = metrics["step"], metrics["halted"], metrics.get("gate_means", [])
    if not halted:
        return None  # one iteration has no gate
    shares = [share - before for before, share in itertools.pairwise([0.0, *halted])]
    depth, share = max(enumerate(shares, 1), key=lambda entry: entry[1])
    if share > _NEARLY_ALL:
        tokens = "every token halts" if share > 0.99 else f"{share:.0%} of tokens halt"
        kind, after = ("all", "one iteration") if depth == 1 else ("one", f"{depth} iterations")
        return kind, f"the gates have collapsed, {tokens} after {after}"
    if not pressed:
        return None
    late = train.ponder_full + 0.2 * (train.steps - train.ponder_full)
    if train.ponder_weight and step > late and halted[-1] == 0:
        return "none", "the gates have collapsed open, no token halts early"
    if step < train.ponder_start and (halted[-1] > 0.5 or min(gates, default=1.0) < _SHUT):
        return ("early", "gates close in stage 1; train them later (train.gate_start), or more slowly (train.gate_lr)")
    return None


def member_of(model: nn.Module, caller: str) -> AdaPonderForCausalLM:
    """Returns the AdaPonder model inside adapters or wrappers; errors name the ``caller``."""
    for module in model.modules():
        if isinstance(module, AdaPonderForCausalLM):
            return module
    raise InputError(f"{caller}: the Trainer's model is a {type(model).__name__}, not an AdaPonderForCausalLM")


class DepthCounts:
    """Counts this process's tokens by depth inside another library's trainer, separately for training and evaluation.

    In training mode, every forward with a loss counts. In evaluation mode, a forward counts only if :meth:`evaluated`
    follows, because other code may call the model between two evaluations.
    """

    def __init__(self) -> None:
        self.sums: dict[bool, Tensor] = {}
        self.last: Tensor | None = None  # counts of the last forward in evaluation
        self.batches: Any = None  # the data loader of the evaluation that is counted

    def watch(self, model: AdaPonderForCausalLM) -> None:
        """Registers a forward hook on ``model`` that counts tokens by depth, unless the hook is there already."""
        if self._count not in model._forward_hooks.values():
            model.register_forward_hook(self._count)

    def _count(self, model: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, AdaPonderOutput) and output.loss is not None and output.depth is not None:
            counts = count_depths(output.depth, model.config.iterations)
            if model.training:
                self._add(counts, training=True)
            else:
                self.last = counts

    def evaluated(self, batches: Any) -> None:
        """Adds the last forward to the counts of an evaluation.

        ``batches`` is the data loader of the evaluation: if it is a new one, the counts of the earlier evaluation are
        dropped first.
        """
        if batches is not self.batches:
            self.sums.pop(False, None)
        if self.last is not None:
            self._add(self.last, training=False)
        self.batches, self.last = batches, None

    @property
    def trained(self) -> bool:
        """Returns whether a training forward was counted since the last :meth:`take`."""
        return True in self.sums

    def _add(self, counts: Tensor, *, training: bool) -> None:
        before = self.sums.get(training)
        self.sums[training] = counts if before is None else before.to(counts.device) + counts

    def take(self, *, training: bool) -> dict[str, float]:
        """Returns mean ``depth`` and ``halted_1 … halted_{K-1}``, the shares of tokens with depth at most 1 … K-1.

        Resets these counts. Returns an empty dict if no token was counted since the last call.
        """
        counts = self.sums.pop(training, None)
        if counts is None or not counts.sum():
            return {}
        depth, shares = depth_shares(counts)
        return {"depth": depth} | {f"halted_{n}": share for n, share in enumerate(shares, 1)}
