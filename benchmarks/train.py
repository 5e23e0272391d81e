"""Times a training step of each implementation: forward, backward, clipping, optimizer, on the same random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from typer import Option

from adaponder.devices import autocast, product_dtype
from adaponder.errors import InputError
from adaponder.methods import Objective
from adaponder.methods.cost import cost_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe
from adaponder.terminal import console
from adaponder.training.schedule import build_optimizer
from benchmarks import harness, models
from benchmarks.harness import (
    Batch,
    Common,
    Compile,
    Keep,
    Overrides,
    RecipeName,
    Run,
    Timing,
    measure,
    number,
    ratio,
    speed,
)
from benchmarks.models import METHOD, PLAIN

Row = dict[str, Any]
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
    device, shares = options.target, harness.numbers("--keep", keep, float, 0, 1)
    if largest and shares:
        raise InputError("--largest and --keep exclude each other: the largest batch is searched at full depth")
    if largest and device.type != "cuda":
        raise InputError(f"--largest needs a GPU, not --device {options.device}: only a GPU reports full memory")
    recipe = models.choose_recipe(recipe_name, overrides, options)
    rows_per_step = models.batch_of(batch, recipe)
    depths = models.choose_depths(shares, recipe, rows_per_step) if shares else None
    chosen = variants(device, compiles=compiles, by=recipe.train.compile_by, halting=bool(shares))
    chosen = harness.select(chosen, options.only, always=PLAIN)
    dtype = str(product_dtype(recipe.train.dtype, device)).removeprefix("torch.")
    settings: dict[str, Any] = {"batch": rows_per_step, "sequence": recipe.data.sequence, "dtype": dtype}
    if depths is not None:
        settings |= {"keep": shares, "mean_depth": float(depths.double().mean())}
    bench = Run.begin(options, "train" if depths is None else "train-halting", settings, recipe, overrides)
    if depths is not None:
        bench.keep(dense_and_compact_differ_by=models.check_executions(recipe, depths, device))
        bench.keep(compact_over_dense_by_flops=promised_over_dense(recipe, depths))
    title = f"\n{recipe.name}, {rows_per_step} x {recipe.data.sequence:,} tokens, {dtype}: a training step"
    title += f" that reads {', '.join(f'{share:g}' for share in shares)} of the tokens" if shares else ""
    how: dict[str, Any] = {"batch": rows_per_step, "depths": depths, "device": device, **options.how_often}
    rows = bench.measure_all(
        chosen,
        _row_of(recipe, how, bench.hardware["matmul_flops"]),
        compare=compare_with_plain,
        show=lambda found: harness.print_table(title, _COLUMNS, found),
    )
    _print_ratios(bench, dict(zip(chosen, rows, strict=True)), depths, "compiled" if compiles else "eager")
    if largest:
        found: list[Row] = []
        for row in search_largest(recipe, compiles, start=rows_per_step, device=device):
            found.append(row)
            bench.keep(largest_batch=found)
        columns = {
            "variant": lambda row: row["variant"],
            "sequences": lambda row: f"{row['batch']:,}" if row["batch"] else f"not even {rows_per_step}",
            "tokens/s": number("tokens_per_second", ",.0f"),
            "peak GiB": harness.PEAK,
        }
        harness.print_table(f"\nThe largest batch that fits, in multiples of {rows_per_step}", columns, found)
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
    dense, compact = (
        flops_per_token(recipe, TrainVariant(METHOD, execution=way), depths) for way in ("dense", "compact")
    )
    return dense / compact


# --- rows ----------------------------------------------------------------------------------------------------------


def _row_of(recipe: Recipe, how: dict[str, Any], matmul_rate: float) -> Callable[[TrainVariant], Row]:
    """Returns a function that measures a variant; consecutive variants of one shape share compiled graphs."""
    before: list[TrainVariant] = []

    def row(variant: TrainVariant) -> Row:
        # Two methods of one shape run the same compiled pass; another budget splits it elsewhere.
        shared = bool(before) and (before[0].memory_budget, before[0].by) == (variant.memory_budget, variant.by)
        before[:] = [variant]
        done = harness.if_it_fits(lambda: measure_training(recipe, variant, **how, keep_graphs=shared))
        flops = flops_per_token(recipe, variant, how["depths"])
        return as_row(recipe, variant, how["batch"], done, flops=flops, matmul_rate=matmul_rate)

    return row


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
    ponder = next((variant for variant in speeds if variant.method == "ponder"), None)
    if ponder is None:
        return None
    dense = [replace(ponder, method=METHOD, execution=execution) for execution in (None, "dense")]
    return ratio(next((speeds[variant] for variant in dense if variant in speeds), None), speeds[ponder])


def _print_ratios(bench: Run, rows: Mapping[TrainVariant, Row], depths: Tensor | None, both: str) -> None:
    bench.keep(adaponder_over_ponder=(times := over_ponder(rows)))
    if times is not None:
        console.print(f"adaponder makes {times:.3f} of ponder's tokens/s, both {both}")
    if depths is None:
        return
    speeds = {variant.execution: row["tokens_per_second"] for variant, row in rows.items()}
    bench.keep(compact_over_dense=(times := ratio(speeds.get("compact"), speeds.get("dense"))))
    if times is not None:
        promised = bench.metrics["compact_over_dense_by_flops"]
        console.print(f"compact makes {times:.3f} of dense's tokens/s, both {both}; {promised:.3f} by FLOPs alone")


# --- the largest batch ---------------------------------------------------------------------------------------------


def search_largest(recipe: Recipe, compiles: bool, *, start: int, device: torch.device) -> Iterator[Row]:
    """Yields a row with the largest batch that fits: of the plain version, and of ours with checkpointing.

    Both are searched uncompiled; the search for the compiled variant starts at the batch of the uncompiled one.
    """
    eager = TrainVariant(METHOD, compile=False, checkpointing=True)
    best = 0
    for variant in (TrainVariant(PLAIN, compile=False), eager):
        console.print(f"searching the largest batch of {variant.name} …")
        best, timing = search(recipe, variant, start=start, device=device)
        yield _largest_row(recipe, variant, best, timing)
    if compiles:
        variant = replace(eager, compile=True, by=recipe.train.compile_by)
        console.print(f"searching the largest batch of {variant.name} …")
        yield _largest_row(
            recipe, variant, *search_around(recipe, variant, guess=best or start, start=start, device=device)
        )


def search(recipe: Recipe, variant: TrainVariant, *, start: int, device: torch.device) -> tuple[int, Timing | None]:
    """Returns the largest multiple of ``start`` that fits into memory, and its timing; 0 if not even ``start`` fits.

    Memory grows linearly with the batch, so two trials predict where it is full, and the rest search around that.
    Where memory is not counted the batch doubles until it no longer fits. The answer and the next multiple have
    both been tried.
    """
    fitting: dict[int, Timing] = {}
    below, above, probe, stride = 0, 0, 1, 1  # nothing has failed yet: above is 0
    while above - below != 1:
        timing = _second_step(recipe, variant, probe * start, device)
        if timing is None:
            above = probe
        else:
            below, fitting[probe] = probe, timing
        peaks = {multiple: done.peak_bytes for multiple, done in fitting.items() if done.peak_bytes is not None}
        if not above and (full := full_at(peaks, harness.capacity(device))) > below:
            probe, stride = full, 1
            continue
        probe = above - stride if above else below + stride
        if above and probe <= below:
            probe = (below + above) // 2
        stride *= 2
    return below * start, fitting.get(below)


def search_around(
    recipe: Recipe, variant: TrainVariant, *, guess: int, start: int, device: torch.device
) -> tuple[int, Timing | None]:
    """Returns the same as :func:`search`, going up or down from a good guess, because each trial compiles.

    The second trial compiles for a variable batch size, so that later ones need not.
    """
    best: tuple[int, Timing | None] = (0, None)
    batch, direction = guess, 0
    while batch > 0:
        timing = _second_step(recipe, variant, batch, device, keep_graphs=direction != 0)
        direction = direction or (-1 if timing is None else 1)
        best = best if timing is None else (batch, timing)
        if (timing is not None) != (direction == 1):
            break
        batch += direction * start
    return best


def full_at(peaks: dict[int, int], room: int | None) -> int:
    """Returns the largest multiple that should fit, extrapolated from the two largest peaks; 0 if unknown."""
    if room is None or len(peaks) < 2:
        return 0
    less, more = sorted(peaks)[-2:]
    slope = (peaks[more] - peaks[less]) / (more - less)
    return int(more + (room - peaks[more]) / slope) if slope > 0 else 0


def _second_step(
    recipe: Recipe, variant: TrainVariant, batch: int, device: torch.device, *, keep_graphs: bool = False
) -> Timing | None:
    """Times the second step, the first that has the optimizer's moments from its beginning; ``None`` if it fails."""
    how: dict[str, Any] = {"device": device, "warmup": 1, "repeats": 1, "keep_graphs": keep_graphs}
    done = harness.if_it_fits(lambda: measure_training(recipe, variant, batch=batch, **how))
    console.print(f"  {batch:,} sequences: {'does not fit' if done is None else 'fits'}")
    return None if done is None else done[0]


def _largest_row(recipe: Recipe, variant: TrainVariant, batch: int, timing: Timing | None) -> Row:
    rate = None if timing is None else batch * recipe.data.sequence / timing.median
    peak = None if timing is None else timing.peak_bytes
    return {"variant": variant.name, "batch": batch, "tokens_per_second": rate, "peak_bytes": peak}
