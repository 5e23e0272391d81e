"""Times one forward over a prompt of which a share of tokens halts: dense and compact, measured and by FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaponder.bench.depths import METHOD
from adaponder.bench.models import PLAIN, batches, build_ours, build_plain, compiled_how, config_of
from adaponder.bench.timing import Timing, forget, measure, out_of_memory
from adaponder.devices import autocast
from adaponder.methods.cost import cost_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe


@dataclass(frozen=True)
class Variant:
    """``plain``, or ours: ``dense`` (every token in every pass) or ``compact`` (halted tokens are skipped).

    ``by`` is what is compiled at once, one ``layer`` for all or a whole ``pass``; ``None`` compiles nothing.
    """

    execution: str
    by: str | None = None

    @property
    def name(self) -> str:
        if self.execution == PLAIN:
            return PLAIN
        return f"{self.execution}, {'eager' if self.by is None else compiled_how(self.by)}"


def variants(*, compiles: bool = True, by: str = "layer") -> list[Variant]:
    """The variants that ``adaponder bench prefill`` compares, the plain version first."""
    ways = (None, by) if compiles else (None,)
    return [Variant(PLAIN), *(Variant(execution, way) for way in ways for execution in ("dense", "compact"))]


@dataclass(frozen=True)
class Result:
    """One variant's forwards; without a ``timing``, memory did not suffice for them. ``flops`` are of one forward."""

    variant: Variant
    tokens: int
    flops: int
    timing: Timing | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.timing is None else self.tokens / self.timing.median


def flops_of(variant: Variant, depths: Tensor, recipe: Recipe) -> int:
    """FLOPs of one forward, the last position's logits included; only compact execution skips halted tokens."""
    config = config_of(recipe, PLAIN if variant.execution == PLAIN else METHOD)
    read = depths if variant.execution == "compact" else torch.full_like(depths, config.iterations)
    return cost_of(read, config, logits=depths.shape[0]).flops


def compare(
    recipe: Recipe, chosen: Iterable[Variant], depths: Tensor, *, device: torch.device, warmup: int, repeats: int
) -> Iterator[Result]:
    """Yields each variant's result as soon as it is measured, with one model in memory at a time."""
    before: Variant | None = None
    for variant in chosen:
        tokens, flops = depths.numel(), flops_of(variant, depths, recipe)
        # Dense and compact begin with the same compiled pass.
        shared = before is not None and before.by == variant.by
        settings = {"device": device, "warmup": warmup, "repeats": repeats, "keep_graphs": shared}
        before = variant
        try:
            timing = measure_prefill(recipe, variant, depths, **settings)
        except Exception as error:
            if not out_of_memory(error):
                raise
            timing = None
        yield Result(variant, tokens, flops, timing)


def measure_prefill(
    recipe: Recipe,
    variant: Variant,
    depths: Tensor,
    *,
    device: torch.device,
    warmup: int,
    repeats: int,
    keep_graphs: bool = False,
) -> Timing:
    """Times one variant's forward; raises torch's own error if memory does not suffice."""
    forget(device, graphs=not keep_graphs)
    draws = batches(recipe, depths.shape[0], device)
    model: Any = build_plain(recipe, device) if variant.execution == PLAIN else build_ours(recipe, METHOD, device)
    model.eval()
    if variant.by is not None:
        model.compile_passes(by=variant.by)
    forward = _plain_forward(model) if variant.execution == PLAIN else _our_forward(model, variant, depths.to(device))

    @torch.no_grad()
    def step() -> None:
        with autocast(recipe.train.dtype, device):
            forward(next(draws)[0])

    return measure(step, device, warmup=warmup, repeats=repeats)


def _plain_forward(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda ids: model.stock.get_output_embeddings()(model.hidden(ids)[:, -1:])


def _our_forward(model: AdaPonderForCausalLM, variant: Variant, depths: Tensor) -> Callable[[Tensor], Tensor]:
    policy = ForcedDepths(depths)
    how: dict[str, Any] = {"execution": variant.execution, "policy": policy, "logits_to_keep": 1, "output_gates": False}
    return lambda ids: model(ids, **how).logits


def as_row(result: Result, dense: Result | None, compiled: Result | None) -> dict[str, Any]:
    """A record's line: the result, relative to ours dense; ``times_promised`` is the ratio of FLOPs."""
    timing = result.timing
    return {
        "variant": result.variant.name,
        "fits": timing is not None,
        "median_seconds": None if timing is None else timing.median,
        "seconds": [] if timing is None else timing.seconds,
        "spread": None if timing is None else timing.spread,
        "tokens_per_second": result.tokens_per_second,
        "peak_bytes": None if timing is None else timing.peak_bytes,
        "flops": result.flops,
        "times_dense": _ratio(result, dense),
        "times_compiled": _ratio(result, compiled),
        "times_promised": None if dense is None else dense.flops / result.flops,
    }


def _ratio(result: Result, other: Result | None) -> float | None:
    mine, theirs = result.tokens_per_second, None if other is None else other.tokens_per_second
    return None if mine is None or theirs is None else mine / theirs
