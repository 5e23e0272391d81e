"""Computes the cost of forwards from the depths of tokens, and checks the formulas against torch's FLOP counter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPTNeoXConfig

from adaponder.backbones.shape import Shape, shape_of
from adaponder.config import AdaPonderConfig
from adaponder.methods import method_class
from adaponder.methods.cost import Cost, cost_of
from adaponder.modeling import AdaPonderForCausalLM, PolicyLike
from adaponder.policies import ForcedDepths, as_policy
from adaponder.registry import method_names

COLUMNS = ("iterations", "MFLOP/token", "x vanilla", "K/V KiB/token", "tokens/s")


@dataclass(frozen=True)
class Spent:
    """The cost and the time of a series of forwards; ``iterations`` is the mean depth.

    Attributes:
        histogram: numbers of tokens of depth 1, 2, … K.
        deepest: maximum depth that was allowed.
        halts: whether the method can halt tokens before ``deepest``.
        scored: number of tokens that per-token numbers are divided by; ``None``: all tokens of the forwards.
    """

    cost: Cost
    histogram: tuple[int, ...]
    seconds: float
    deepest: int
    halts: bool
    scored: int | None = None

    @property
    def iterations(self) -> float:
        return self.cost.iterations

    @property
    def halted(self) -> float:
        """Returns the share of tokens that halted before the maximum depth."""
        return sum(self.histogram[: self.deepest - 1]) / max(1, sum(self.histogram))

    @property
    def gates_closed(self) -> float | None:
        """Returns the share of (token, gate) pairs in which this or an earlier gate halted the token.

        ``None`` if there are no gates, or if the method never halts tokens.
        """
        gates = self.deepest - 1
        if gates == 0 or not self.halts:
            return None
        closed = sum(count * (gates - depth) for depth, count in enumerate(self.histogram[: self.deepest]))
        return closed / (gates * max(1, sum(self.histogram)))

    @property
    def tokens(self) -> int:
        """Returns the number of tokens that per-token numbers are divided by, at least 1."""
        return max(1, self.cost.tokens if self.scored is None else self.scored)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    def __add__(self, other: Spent) -> Spent:
        """Adds the cost of another portion of the same scoring."""
        return replace(
            self,
            cost=self.cost + other.cost,
            histogram=tuple(map(sum, zip(self.histogram, other.histogram, strict=True))),
            seconds=self.seconds + other.seconds,
            deepest=max(self.deepest, other.deepest),
            scored=self.tokens + other.tokens,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Spent:
        """Inverts ``dataclasses.asdict``."""
        return cls(**(values | {"cost": Cost(**values["cost"]), "histogram": tuple(values["histogram"])}))

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of a table row, one for each of :data:`COLUMNS`."""
        tokens, speed = self.tokens, self.tokens_per_second
        return (
            f"{self.iterations:.3f}",
            f"{self.cost.flops / tokens / 1e6:,.2f}",
            f"{self.cost.ratio:.2f}",
            f"{self.cost.kv_bytes / tokens / 1024:,.1f}",
            "" if speed is None else f"{speed:,.0f}",
        )

    def as_dict(self) -> dict[str, Any]:
        tokens, cost = self.tokens, self.cost
        return {
            "tokens": tokens,
            "tokens_read": cost.tokens,
            "iterations": self.iterations,
            "tokens_by_depth": list(self.histogram),
            "tokens_halted_early": self.halted,
            "gates_closed": self.gates_closed,
            "flops_per_token": cost.flops / tokens,
            "flops": {
                field: getattr(cost, field) / tokens for field in ("body", "attention", "head", "expectation", "gates")
            },
            "vanilla_flops_per_token": cost.vanilla / tokens,
            "flops_ratio": cost.ratio,
            "kv_bytes_per_token": cost.kv_bytes / tokens,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
        }


class Meter:
    """Adds up the cost of forwards: ``with meter: model(…)`` times a forward, ``meter.add(depth)`` adds its cost."""

    def __init__(
        self, config: AdaPonderConfig, *, dtype: torch.dtype, device: torch.device, shape: Shape | None = None
    ):
        self.config, self.dtype, self.device = config, dtype, device
        self.shape: Shape = shape or shape_of(config)
        self.cost = Cost.nothing()
        self.histogram = [0] * config.iterations
        self.seconds = 0.0
        self.deepest = 0

    def __enter__(self) -> Meter:
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()
        self.seconds += time.perf_counter() - self._began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def add(
        self,
        depth: Tensor,
        *,
        past: int | Tensor = 0,
        max_iterations: int | None = None,
        logits: int | None = None,
        every_gate: bool = False,
        dense: bool = False,
        policy: PolicyLike | None = None,
    ) -> None:
        """Adds the cost of a forward in which tokens have these depths, 0 for padding.

        Other arguments are those of :func:`adaponder.methods.cost.cost_of`, except two. ``dense`` execution skips no
        rows: FLOPs are counted at full depth, but ``iterations`` remains the mean depth. FLOPs of logits that
        ``policy`` computes only to decide are added to the FLOPs of the gates.
        """
        depth = depth.detach().cpu()
        deepest = self.config.iterations if max_iterations is None else max_iterations
        arguments: dict[str, Any] = {"shape": self.shape, "past": past, "logits": logits, "dtype": self.dtype}
        arguments["max_iterations"] = deepest
        counted = cost_of(depth, self.config, every_gate=every_gate, **arguments)
        computed = depth
        if dense:
            computed = (depth > 0) * deepest
            full = cost_of(computed, self.config, every_gate=True, **arguments)
            fields = {field: getattr(full, field) for field in ("rows", "body", "attention", "expectation", "gates")}
            counted = replace(counted, **fields)
        active = [int((computed > i).sum()) for i in range(deepest - 1)]
        counted = replace(counted, gates=counted.gates + deciding_flops(policy, active, self.shape))
        self.deepest = max(self.deepest, deepest)
        self.cost = self.cost + counted
        by_depth = torch.bincount(depth.flatten(), minlength=self.config.iterations + 1)[1:]
        self.histogram = [total + new for total, new in zip(self.histogram, by_depth.tolist(), strict=True)]

    def spent(self, scored: int | None = None) -> Spent:
        halts = method_class(self.config.method).halts
        return Spent(self.cost, tuple(self.histogram), self.seconds, max(1, self.deepest), halts, scored)


def deciding_flops(policy: PolicyLike | None, active: Sequence[int], shape: Shape) -> int:
    """Returns the FLOPs of the logits that a policy computes to decide about ``active[i]`` tokens after iteration i."""
    if policy is None:
        return 0
    rule = as_policy(policy)
    return 2 * shape.vocabulary * shape.hidden * sum(rule.heads(i) * count for i, count in enumerate(active))


class FlopCheck(NamedTuple):
    """The FLOPs of one forward, by our formula and by torch's counter."""

    method: str
    formula: int
    counted: int

    @property
    def ratio(self) -> float:
        return self.formula / self.counted


@torch.no_grad()
def check_flops(method: str) -> FlopCheck:
    """Compares both FLOP counts on two sequences in a small random model, at random depths if the method halts."""
    generator = torch.Generator().manual_seed(0)
    backbone = GPTNeoXConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    config = AdaPonderConfig(backbone_config=backbone, method=method, iterations=4)
    model = AdaPonderForCausalLM(config).eval()
    ids = torch.randint(config.vocab_size, (2, 48), generator=generator)
    policy = None
    if model.method.halts:
        policy = ForcedDepths(torch.randint(1, config.iterations + 1, ids.shape, generator=generator))
    counter = FlopCounterMode(display=False)
    # The counter ignores CPU attention kernels, so attention runs as matrix products of every query with every key.
    with sdpa_kernel(SDPBackend.MATH), counter:
        output = model(ids, output_gates=False, policy=policy)
    formula = cost_of(output.depth, model.config, attention="square").flops
    return FlopCheck(method, formula, counter.get_total_flops())


def check_all() -> list[FlopCheck]:
    return [check_flops(method) for method in method_names()]
