"""Times one forward over a prompt of which a share of tokens halts: dense and compact, measured and by FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from adaponder.devices import autocast
from adaponder.methods.cost import cost_of
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe
from benchmarks import harness, models
from benchmarks.harness import Common, Row, Timing, measure, number, ratio, speed
from benchmarks.models import METHOD, PLAIN, Batch, Compile, Keep, Overrides, RecipeName

_COLUMNS = {
    "variant": lambda row: row["variant"],
    "ms": speed("median_seconds", ",.2f", 1e3),
    "spread": harness.SPREAD,
    "tokens/s": number("tokens_per_second", ",.0f"),
    "x dense": number("times_dense", ".2f"),
    "x compiled dense": number("times_compiled", ".2f"),
    "promised": number("times_promised", ".2f"),
}


@dataclass(frozen=True)
class PrefillVariant:
    """``plain``, or ours: ``dense`` (every token in every pass) or ``compact`` (halted tokens are skipped).

    ``by`` is what is compiled at once, one ``layer`` or a whole ``pass``; ``None`` compiles nothing.
    """

    execution: str
    by: str | None = None

    @property
    def name(self) -> str:
        if self.execution == PLAIN:
            return PLAIN
        return f"{self.execution}, {'eager' if self.by is None else models.compiled_name(self.by)}"


def run(
    options: Common,
    *,
    recipe_name: RecipeName = None,
    overrides: Overrides = None,
    batch: Batch = None,
    keep: Keep = None,
    compiles: Compile = True,
) -> dict[str, Any]:
    """Time reading a prompt of which a share halts: skipping their work (compact) against computing all (dense).

    Without --keep the first iteration reads every token, the others half of them.

    [dim]python -m benchmarks prefill --device cuda --batch 8 --keep 1,.5,.5,.5[/]
    """
    iterations = models.config_of(models.choose_recipe(recipe_name, overrides, options), METHOD).iterations
    shares = harness.numbers("--keep", keep, float, 0, 1) or [1.0, *[0.5] * (iterations - 1)]
    work = models.choose_workload(options, recipe_name, overrides, batch, shares)
    recipe, depths = work.recipe, work.depths
    assert depths is not None  # there are shares
    selected = harness.select(variants(compiles=compiles, by=recipe.train.compile_by), options.only, always=PLAIN)
    # Dense and compact begin with the same compiled pass.
    keeps_graphs = {after: before.by == after.by for before, after in pairwise(selected)}
    bench = work.begin("prefill")

    def row_of(variant: PrefillVariant) -> Row:
        how: dict[str, Any] = {"device": options.target, "keep_graphs": keeps_graphs.get(variant, False)}
        timing = harness.if_it_fits(lambda: measure_prefill(recipe, variant, depths, **how, **options.how_often))
        median = None if timing is None else timing.median
        row = {"variant": variant.name, "median_seconds": median, "flops": flops_of(variant, depths, recipe)}
        return row | {"tokens_per_second": ratio(depths.numel(), median)} | harness.timing_fields(timing)

    bench.measure_all(
        selected,
        row_of,
        compare=lambda rows: compare_with_dense(rows, recipe.train.compile_by),
        show=lambda rows: harness.print_table(work.title("a prefill"), _COLUMNS, rows),
    )
    return bench.finish()


def variants(*, compiles: bool = True, by: str = "layer") -> list[PrefillVariant]:
    """Returns the variants that are compared, the plain version first."""
    ways = (None, by) if compiles else (None,)
    ours = [PrefillVariant(execution, way) for way in ways for execution in ("dense", "compact")]
    return [PrefillVariant(PLAIN), *ours]


def flops_of(variant: PrefillVariant, depths: Tensor, recipe: Recipe) -> int:
    """Returns the FLOPs of one forward with the last position's logits; only compact execution skips halted tokens."""
    config = models.config_of(recipe, PLAIN if variant.execution == PLAIN else METHOD)
    read = depths if variant.execution == "compact" else torch.full_like(depths, config.iterations)
    return cost_of(read, config, logits=depths.shape[0]).flops


def measure_prefill(
    recipe: Recipe,
    variant: PrefillVariant,
    depths: Tensor,
    *,
    device: torch.device,
    warmup: int,
    repeats: int,
    keep_graphs: bool = False,
) -> Timing:
    """Times one variant's forward; raises torch's own error if memory does not suffice."""
    harness.forget(device, graphs=not keep_graphs)
    draws = models.batches(recipe, depths.shape[0], device)
    forward = _forward(recipe, variant, depths.to(device), device)

    @torch.no_grad()
    def step() -> None:
        with autocast(recipe.train.dtype, device):
            forward(next(draws)[0])

    return measure(step, device, warmup=warmup, repeats=repeats)


def _forward(
    recipe: Recipe, variant: PrefillVariant, depths: Tensor, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Builds the variant's model and returns the function from token ids to the last position's logits."""
    if variant.execution == PLAIN:
        plain = models.build_plain(recipe, device).eval()
        return lambda ids: plain.stock.get_output_embeddings()(plain.hidden(ids)[:, -1:])
    model: Any = models.build_ours(recipe, METHOD, device).eval()
    if variant.by is not None:
        model.compile_passes(by=variant.by)
    how: dict[str, Any] = {"execution": variant.execution, "policy": ForcedDepths(depths)}
    return lambda ids: model(ids, **how, logits_to_keep=1, output_gates=False).logits


def compare_with_dense(rows: list[Row], by: str) -> None:
    """Fills in each row's speed relative to dense execution; ``times_promised`` is the ratio of FLOPs."""
    named = {row["variant"]: row for row in rows}
    dense, compiled = (named.get(PrefillVariant("dense", way).name, {}) for way in (None, by))
    for row in rows:
        row["times_dense"] = ratio(row["tokens_per_second"], dense.get("tokens_per_second"))
        row["times_compiled"] = ratio(row["tokens_per_second"], compiled.get("tokens_per_second"))
        row["times_promised"] = ratio(dense.get("flops"), row["flops"])
