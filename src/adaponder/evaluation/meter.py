"""What was really spent: every command that reports a cost counts it here, from the depths that were run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaponder.compute import Cost, Shape, cost_of, shape_of
from adaponder.config import AdaPonderConfig

COLUMNS = ("iterations", "MFLOP/token", "x vanilla", "K/V KiB/token", "tokens/s")


@dataclass(frozen=True)
class Spent:
    """A cost and the seconds it took, of the model alone.

    Four halting numbers are never confused: ``iterations`` is the mean depth, ``halted`` the share of tokens that
    stopped before K, ``gates_closed`` the share of (token, gate) pairs at which a token no longer reads on, and FLOPs
    are FLOPs.
    """

    cost: Cost
    histogram: tuple[int, ...]
    seconds: float

    @property
    def iterations(self) -> float:
        return self.cost.iterations

    @property
    def halted(self) -> float:
        """Share of tokens read fewer than K times."""
        return sum(self.histogram[:-1]) / max(1, sum(self.histogram))

    @property
    def gates_closed(self) -> float | None:
        """Share of (token, gate) pairs behind a closed gate; ``None`` where there is no gate."""
        gates = len(self.histogram) - 1
        if gates == 0:
            return None
        closed = sum(count * (gates - depth) for depth, count in enumerate(self.histogram))
        return closed / (gates * max(1, sum(self.histogram)))

    @property
    def tokens_per_second(self) -> float:
        return self.cost.tokens / self.seconds if self.seconds else float("nan")

    def cells(self) -> tuple[str, ...]:
        """This cost under :data:`COLUMNS`."""
        tokens = max(1, self.cost.tokens)
        return (
            f"{self.iterations:.3f}",
            f"{self.cost.flops / tokens / 1e6:,.2f}",
            f"{self.cost.ratio:.2f}",
            f"{self.cost.kv_bytes / tokens / 1024:,.1f}",
            f"{self.tokens_per_second:,.0f}",
        )

    def as_dict(self) -> dict[str, Any]:
        tokens, cost = max(1, self.cost.tokens), self.cost
        return {
            "tokens": cost.tokens,
            "iterations": self.iterations,
            "tokens_by_depth": list(self.histogram),
            "tokens_halted_early": self.halted,
            "gates_closed": self.gates_closed,
            "flops_per_token": cost.flops / tokens,
            "flops": {
                part: getattr(cost, part) / tokens for part in ("body", "attention", "head", "expectation", "gates")
            },
            "vanilla_flops_per_token": cost.vanilla / tokens,
            "flops_ratio": cost.ratio,
            "kv_bytes_per_token": cost.kv_bytes / tokens,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
        }


class Meter:
    """Adds up forwards: ``with meter: model(…)`` times one, ``meter.add(depth)`` counts it."""

    def __init__(
        self, config: AdaPonderConfig, *, dtype: torch.dtype, device: torch.device, shape: Shape | None = None
    ):
        self.config, self.dtype, self.device = config, dtype, device
        self.shape: Shape = shape or shape_of(config)
        self.cost = Cost(*[0] * 10)
        self.histogram = [0] * config.iterations
        self.seconds = 0.0

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
    ) -> None:
        """Counts one forward over tokens of these depths (see :func:`adaponder.compute.cost_of`).

        ``dense`` execution skips nothing: its FLOPs are those of full depth, while iterations stay what they are.
        """
        asked: dict[str, Any] = {
            "shape": self.shape,
            "past": past,
            "max_iterations": max_iterations,
            "logits": logits,
            "dtype": self.dtype,
        }
        depth = depth.detach().cpu()
        counted = cost_of(depth, self.config, every_gate=every_gate, **asked)
        if dense:
            deepest = self.config.iterations if max_iterations is None else max_iterations
            full = cost_of((depth > 0) * deepest, self.config, every_gate=True, **asked)
            parts = {part: getattr(full, part) for part in ("rows", "body", "attention", "expectation", "gates")}
            counted = Cost(**(vars(counted) | parts))
        self.cost = self.cost + counted
        found = torch.bincount(depth.flatten(), minlength=self.config.iterations + 1)[1:]
        self.histogram = [before + now for before, now in zip(self.histogram, found.tolist(), strict=True)]

    def spent(self) -> Spent:
        return Spent(self.cost, tuple(self.histogram), self.seconds)
