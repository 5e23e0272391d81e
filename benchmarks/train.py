"""Times a training step of each implementation: forward, backward, clipping, optimizer, on the same random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from typer import Option

from adaponder.devices import autocast
from adaponder.errors import InputError
from adaponder.methods import Objective
from adaponder.methods.cost import cost_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe
from adaponder.terminal import console
from adaponder.training.schedule import build_optimizer
from benchmarks import harness, models
from benchmarks.harness import Common, Row, Timing, measure, number, ratio, speed
from benchmarks.models import METHOD, PLAIN, Batch, Compile, Keep, Overrides, RecipeName, Workload

_COLUMNS = {
    "variant": lambda row: row["variant"],
    "tokens/s": speed("tokens_per_second", ",.0f"),
    "spread": harness.SPREAD,
    "peak GiB": harness.PEAK,
    "x plain": number("times_plain", ".2f"),
    "x memory": number("memory_of_plain", ".2f"),
    "of matmul": number("matmul_share", ".1%"),
}


@dataclass(frozen=True)
class TrainVariant:
    """One implementation of the training step.

    Attributes:
        method: ``plain``, ``ponder`` or ``adaponder``.
        compile: as ``train.compile``; ``plain`` is never compiled.
        by: what is compiled at once, one ``layer`` or a whole ``pass``.
        checkpointing: keeps the activations of one pass at a time and recomputes the others.
        memory_budget: the share of a compiled pass's activations that is kept; the rest is recomputed.
        keep_logits: keeps the vocabulary's logits of every iteration for backward.
        execution: as ``train.execution``, ``None`` being dense: ``compact`` skips halted tokens.
    """

    method: str
    compile: bool = True
    by: str = "layer"
    checkpointing: bool = False
    memory_budget: float = 1.0
    keep_logits: bool = False
    execution: str | None = None

    @property
    def name(self) -> str:
        if self.method == PLAIN:
            return PLAIN
        words = [self.method, models.compiled_name(self.by) if self.compile else "eager"]
        words += [f"memory budget {self.memory_budget:g}"] if self.memory_budget != 1 else []
        words += ["checkpointed"] if self.checkpointing else []
        words += ["logits kept"] if self.keep_logits else []
        words += [self.execution] if self.execution is not None else []
        return ", ".join(words)


def run(
    options: Common,
    *,
    recipe_name: RecipeName = None,
    overrides: Overrides = None,
    batch: Batch = None,
    keep: Keep = None,
    compiles: Compile = True,
    largest: Annotated[
        bool, Option("--largest", help="Search the largest batch, too, in multiples of --batch (GPU only).")
    ] = False,
) -> dict[str, Any]:
    """Time a training step: plain PonderLM, our ponder, and adaponder compiled, eager and checkpointed.

    With --keep, training that skips halted tokens is compared with dense training.

    [dim]python -m benchmarks train --device cuda --batch 32 --largest[/]

    [dim]python -m benchmarks train --device cuda --batch 32 --keep 1,.5,.5,.5[/]
    """
    shares = harness.numbers("--keep", keep, float, 0, 1)
    if largest and shares:
        raise InputError("--largest and --keep exclude each other: the largest batch is searched at full depth")
    if largest and options.target.type != "cuda":
        raise InputError(f"--largest needs a GPU, not --device {options.device}: only a GPU reports full memory")
    work = models.choose_workload(options, recipe_name, overrides, batch, shares)
    recipe, depths = work.recipe, work.depths
    selected = variants(options.target, compiles=compiles, by=recipe.train.compile_by, halting=bool(shares))
    selected = harness.select(selected, options.only, always=PLAIN)
    # Two methods of one shape run the same compiled pass; another budget splits it elsewhere.
    keeps_graphs = {b: (a.memory_budget, a.by) == (b.memory_budget, b.by) for a, b in pairwise(selected)}
    bench = work.begin("train" if depths is None else "train-halting")
    if depths is not None:
        bench.keep(compact_over_dense_by_flops=promised_over_dense(recipe, depths))

    def row_of(variant: TrainVariant) -> Row:
        how: dict[str, Any] = {"device": options.target, "keep_graphs": keeps_graphs.get(variant, False)}
        how |= {"batch": work.batch, "depths": depths} | options.how_often
        done = harness.if_it_fits(lambda: measure_training(recipe, variant, **how))
        flops = flops_per_token(recipe, variant, depths)
        return as_row(recipe, variant, work.batch, done, flops=flops, matmul_rate=bench.hardware["matmul_flops"])

    rows = bench.measure_all(
        selected,
        row_of,
        compare=compare_with_plain,
        show=lambda found: harness.print_table(work.title("a training step"), _COLUMNS, found),
    )
    by_variant = dict(zip(selected, rows, strict=True))
    ratios = {"adaponder_over_ponder": over_ponder(by_variant)}
    if depths is not None:
        speeds = {variant.execution: row["tokens_per_second"] for variant, row in by_variant.items()}
        ratios["compact_over_dense"] = ratio(speeds.get("compact"), speeds.get("dense"))
    bench.keep(**ratios)
    for name, times in ratios.items():
        if times is not None:
            console.print(f"{name.replace('_', ' ')}: {times:.3f} times the tokens/s, both run the same way")
    if depths is not None:
        console.print(f"by FLOPs alone: {bench.metrics['compact_over_dense_by_flops']:.3f}")
    if largest:
        bench.keep(largest_batch=search_all(work, compiles))
    return bench.finish()


def variants(
    device: torch.device, *, compiles: bool = True, by: str = "layer", halting: bool = False
) -> list[TrainVariant]:
    """Returns the variants that are compared, the plain version first, those that share graphs together.

    With ``halting``, compact execution is compared with dense; without, options that save time or memory.
    """
    ponder, best = (TrainVariant(method, compiles, by) for method in ("ponder", METHOD))
    plain = TrainVariant(PLAIN, compile=False)
    if halting:
        return [plain, ponder, *(replace(best, execution=execution) for execution in ("dense", "compact"))]
    ours = [TrainVariant(METHOD, compile=False)] if compiles else []
    ours += [ponder, best, replace(best, keep_logits=True), replace(best, checkpointing=True)]
    if compiles and device.type == "cuda":
        ours.append(replace(best, memory_budget=0.5))
    return [plain, *ours]


# --- one variant ---------------------------------------------------------------------------------------------------


def measure_training(
    recipe: Recipe,
    variant: TrainVariant,
    *,
    batch: int,
    depths: Tensor | None = None,
    device: torch.device,
    warmup: int,
    repeats: int,
    keep_graphs: bool = False,
) -> tuple[Timing, float]:
    """Returns the timing of one variant's steps and the last loss; raises torch's error if memory does not suffice.

    AdaPonder's tokens have ``depths [batch, sequence]``, or without them those of its gates, which start open.
    """
    harness.forget(device, graphs=not keep_graphs)
    model = build_variant(recipe, variant, device)
    how: dict[str, Any] = {"execution": variant.execution or "dense"}
    if depths is not None and variant.method == METHOD:
        how["policy"] = ForcedDepths(depths.to(device))
    losses: list[Tensor] = []
    step = training_step(model, recipe, models.batches(recipe, batch, device), losses, **how)
    timing = measure(step, device, warmup=warmup, repeats=repeats)
    return timing, float(losses[0])


def build_variant(recipe: Recipe, variant: TrainVariant, device: torch.device) -> nn.Module:
    """Builds the variant's model on ``device``, in training mode."""
    if variant.method == PLAIN:
        return models.build_plain(recipe, device)
    model = models.build_ours(recipe, variant.method, device)
    model.method.keep_logits = variant.keep_logits
    if variant.compile:
        model.compile_passes(by=variant.by, memory_budget=variant.memory_budget)
    if variant.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def training_step(
    model: nn.Module, recipe: Recipe, draws: Iterator[tuple[Tensor, Tensor]], losses: list[Tensor], **how: Any
) -> Callable[[], None]:
    """Returns a function that does one training step of stage 2 and leaves its loss in ``losses``.

    ``how`` are further arguments of our models' forward: execution and policy.
    """
    train = recipe.train
    optimizer = build_optimizer(model, train)
    objective = Objective(ponder_weight=train.ponder_weight, ponder_fraction=train.k_max)

    def step() -> None:
        ids, targets = next(draws)
        with autocast(recipe.train.dtype, ids.device):
            if isinstance(model, AdaPonderForCausalLM):
                output: Any = model(input_ids=ids, targets=targets, objective=objective, output_logits=False, **how)
                loss = output.loss
            else:
                loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[:] = [loss.detach()]

    return step


def flops_per_token(recipe: Recipe, variant: TrainVariant, depths: Tensor | None = None) -> float:
    """Returns the matrix FLOPs of a training step per token: three times the forward's, without recomputation.

    Only compact execution depends on ``depths``.
    """
    config = models.config_of(recipe, variant.method)
    if depths is None or variant.execution != "compact":
        depths = torch.full((1, recipe.data.sequence), config.iterations)
    return 3 * cost_of(depths, config, every_gate=True).flops / depths.numel()


def promised_over_dense(recipe: Recipe, depths: Tensor) -> float:
    """Returns how much faster compact execution would be than dense if every FLOP took the same time."""
    ways = (TrainVariant(METHOD, execution=way) for way in ("dense", "compact"))
    dense, compact = (flops_per_token(recipe, variant, depths) for variant in ways)
    return dense / compact


# --- rows ----------------------------------------------------------------------------------------------------------


def as_row(
    recipe: Recipe,
    variant: TrainVariant,
    batch: int,
    done: tuple[Timing, float] | None,
    *,
    flops: float,
    matmul_rate: float,
) -> Row:
    """Returns a record's row; ``flops`` are per token."""
    timing, loss = done or (None, None)
    rate = None if timing is None else batch * recipe.data.sequence / timing.median
    share = ratio(rate and rate * flops, matmul_rate)
    row = {"variant": variant.name, "batch": batch, "tokens_per_second": rate, "loss": loss, "matmul_share": share}
    return row | harness.timing_fields(timing)


def compare_with_plain(rows: list[Row]) -> None:
    """Fills in each row's speed and memory relative to the plain version's."""
    plain = next((row for row in rows if row["variant"] == PLAIN), {})
    for row in rows:
        row["times_plain"] = ratio(row["tokens_per_second"], plain.get("tokens_per_second"))
        row["memory_of_plain"] = ratio(row["peak_bytes"], plain.get("peak_bytes"))


def over_ponder(rows: Mapping[TrainVariant, Row]) -> float | None:
    """Returns AdaPonder's tokens/s over PonderLM's, both dense and run the same way; ``None`` where one is missing."""
    speeds = {variant: row["tokens_per_second"] for variant, row in rows.items()}
    ponder = next((variant for variant in speeds if variant.method == "ponder"), TrainVariant("ponder"))
    dense = (speeds.get(replace(ponder, method=METHOD, execution=execution)) for execution in (None, "dense"))
    return ratio(next(filter(None, dense), None), speeds.get(ponder))


# --- the largest batch ---------------------------------------------------------------------------------------------


def search_all(work: Workload, compiles: bool) -> list[Row]:
    """Returns and prints the largest batch that fits: of the plain version, and of ours with checkpointing."""
    ours = TrainVariant(METHOD, compile=False, checkpointing=True)
    searched = [TrainVariant(PLAIN, compile=False), ours]
    searched += [replace(ours, compile=True, by=work.recipe.train.compile_by)] if compiles else []
    rows: list[Row] = []
    for variant in searched:
        console.print(f"searching the largest batch of {variant.name} …")
        batch, timing = search(work.recipe, variant, start=work.batch, device=work.options.target)
        rate = None if timing is None else batch * work.recipe.data.sequence / timing.median
        peak = None if timing is None else timing.peak_bytes
        rows.append({"variant": variant.name, "batch": batch, "tokens_per_second": rate, "peak_bytes": peak})
    columns = {
        "variant": lambda row: row["variant"],
        "sequences": lambda row: f"{row['batch']:,}" if row["batch"] else f"not even {work.batch}",
        "tokens/s": number("tokens_per_second", ",.0f"),
        "peak GiB": harness.PEAK,
    }
    harness.print_table(f"\nThe largest batch that fits, in multiples of {work.batch}", columns, rows)
    return rows


def search(recipe: Recipe, variant: TrainVariant, *, start: int, device: torch.device) -> tuple[int, Timing | None]:
    """Returns the largest multiple of ``start`` that fits into memory, and its timing; 0 if not even ``start`` fits.

    The batch doubles until it no longer fits, then bisects: the answer and the next multiple have both been tried. The
    second trial of a compiled variant compiles for a variable batch size, so that later ones need not. Timed is the
    second step, the first that has the optimizer's moments from its beginning.
    """
    fitting: dict[int, Timing] = {}
    below, above, trials = 0, 0, 0  # nothing has failed yet: above is 0
    while above - below != 1:
        multiple = (below + above) // 2 if above else max(1, 2 * below)
        batch = start * multiple
        how: dict[str, Any] = {"device": device, "warmup": 1, "repeats": 1, "keep_graphs": trials > 0}
        done = harness.if_it_fits(lambda how=how, batch=batch: measure_training(recipe, variant, batch=batch, **how))
        console.print(f"  {batch:,} sequences: {'does not fit' if done is None else 'fits'}")
        trials += 1
        if done is None:
            above = multiple
        else:
            below, fitting[multiple] = multiple, done[0]
    return below * start, fitting.get(below)
