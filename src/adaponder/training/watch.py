"""What a run logs: means since the last log, speed and utilisation, and a warning where gates have collapsed."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adaponder.backbones.shape import Shape
from adaponder.config import AdaPonderConfig
from adaponder.methods.cost import training_flops
from adaponder.modeling import AdaPonderOutput
from adaponder.recipes import TrainRecipe
from adaponder.training.distributed import World

# Dense bf16 FLOPs per second that vendors state, by a part of torch's name of the device.
_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
# A gate whose mean is lower passes on almost no update, and gets almost no gradient to open again.
_SHUT = 0.01
# More tokens than this at one depth below the full one: gates that hardly tell tokens apart.
_NEARLY_ALL = 0.95


@dataclass
class Tally:
    """Sums since the last log, on the device; only :meth:`means` waits for it."""

    steps: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.perf_counter)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def count(self, output: AdaPonderOutput, parts: int, iterations: int) -> None:
        """Adds one of the ``parts`` micro-steps of a step."""
        assert output.loss is not None
        assert output.depth is not None
        for name, value in {"loss": output.loss, **(output.terms or {})}.items():
            self.add(name, value / parts)
        depths = torch.arange(1, iterations + 1, device=output.depth.device)
        self.add("depths", (output.depth[..., None] == depths).sum((0, 1)))
        if output.gates is not None:
            self.add("gates", output.gates.sum((0, 1)))

    def means(self, world: World) -> dict[str, Any]:
        """Means over all processes; every process must call it."""
        sums = dict(self.sums)
        depths, norm = world.sum(sums.pop("depths")), float(sums.pop("grad_norm")) / self.steps
        gates = world.sum(sums.pop("gates")) if "gates" in sums else None
        means = {name: float(world.sum(value)) / self.steps / world.size for name, value in sums.items()}
        total, levels = float(depths.sum()), len(depths)
        metrics: dict[str, Any] = {**means, "grad_norm": norm}
        metrics["tokens_per_second"] = self.tokens / (time.perf_counter() - self.began)
        metrics["mean_depth"] = float((depths * torch.arange(1, levels + 1, device=depths.device)).sum()) / total
        metrics["halted"] = [float(depths[: i + 1].sum()) / total for i in range(levels - 1)]
        if gates is not None:
            metrics["gate_means"] = (gates / total).tolist()
        return metrics


def utilisation(
    tokens_per_second: float, config: AdaPonderConfig, *, shape: Shape, sequence: int, world: World
) -> dict[str, float]:
    """``{"mfu": …}``: FLOPs that the model needs per second over the vendor's rate; empty for an unknown device."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peak = next((rate for key, rate in _PEAK.items() if key in name), None)
    if peak is None:
        return {}
    flops = training_flops(config, sequence=sequence, shape=shape)
    return {"mfu": flops * tokens_per_second / (peak * world.size)}


def collapse(metrics: dict[str, Any], train: TrainRecipe, *, pressed: bool = True) -> tuple[str, str] | None:
    """(kind, message) of a warning if the gates no longer tell tokens apart, or will not when stage 2 begins.

    ``pressed``: whether a ponder term presses on the gates; else they may stay open, and stage 1 has no meaning.
    """
    step, halted, gates = metrics["step"], metrics["halted"], metrics.get("gate_means", [])
    if not halted:
        return None  # one iteration has no gate
    depth, share = _commonest(halted)
    if share > _NEARLY_ALL:
        who = "every token halts" if share > 0.99 else f"{share:.0%} of tokens halt"
        kind, after = ("all", "one iteration") if depth == 1 else ("one", f"{depth} iterations")
        return kind, f"the gates have collapsed, {who} after {after}"
    if not pressed:
        return None
    late = train.ponder_full + 0.2 * (train.steps - train.ponder_full)
    if train.ponder_weight and step > late and halted[-1] == 0:
        return "none", "the gates have collapsed open, no token halts early"
    if step < train.ponder_start and (halted[-1] > 0.5 or min(gates, default=1.0) < _SHUT):
        return (
            "early",
            "gates close in stage 1; let them learn later (train.gate_start), or more slowly (train.gate_lr)",
        )
    return None


def _commonest(halted: list[float]) -> tuple[int, float]:
    """The depth below full depth at which most tokens halt, and their share."""
    shares = [share - before for before, share in itertools.pairwise([0.0, *halted])]
    return max(enumerate(shares, 1), key=lambda each: each[1])
