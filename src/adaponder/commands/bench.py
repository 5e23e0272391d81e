"""adaponder bench: times our version and the plain one in one command; prints a table and writes a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from adaponder.bench import largest as largest_bench
from adaponder.bench import ops as op_bench
from adaponder.bench import prefill as prefill_bench
from adaponder.bench import training as training_bench
from adaponder.bench.depths import METHOD, check_keep, depths_of, disagreement
from adaponder.bench.models import PLAIN, config_of, vocabulary_of
from adaponder.bench.tables import (
    LARGEST_HEAD,
    OPS_HEAD,
    PREFILL_HEAD,
    TRAIN_HEAD,
    largest_cells,
    op_cells,
    prefill_cells,
    train_cells,
)
from adaponder.bench.timing import out_of_memory
from adaponder.commands.bench_record import Record, begin, checked
from adaponder.commands.options import OpsBenchOptions, PrefillBenchOptions, TrainBenchOptions
from adaponder.devices import product_dtype
from adaponder.errors import InputError
from adaponder.recipes import Recipe, load_recipe
from adaponder.terminal import STDOUT, console, table

ON_GPU, ON_CPU = "paper/adaponder-70m", "cpu/demo"

Measured = TypeVar("Measured")
Named = TypeVar("Named", training_bench.Variant, prefill_bench.Variant, op_bench.Case)


def run_train(options: TrainBenchOptions) -> dict[str, Any]:
    """Times a training step of each variant and returns the record; with ``largest``, also the largest batch that fits.

    With ``keep`` a share of the tokens halts, and compact execution is compared with dense; its record is apart.
    """
    device = checked(options)
    keep, compiles = options.keep, options.compiles
    if options.largest:
        _check_largest(options, device)
    chosen = choose_recipe(options, device)
    rows_per_step = choose_batch(options.batch, chosen)
    depths = choose_depths(keep, chosen, rows_per_step) if keep else None
    choice: dict[str, Any] = {"compiles": compiles, "by": chosen.train.compile_by, "halting": bool(keep)}
    variants = chosen_variants(training_bench.variants(device, **choice), options.only)
    told = {"batch": rows_per_step, "sequence": chosen.data.sequence, "dtype": dtype_name(chosen, device)}
    told |= {} if depths is None else halting_settings(keep, depths)
    record = begin(options, "train" if depths is None else "train-halting", device, told, chosen, options.overrides)
    matmul = record.hardware["matmul_flops"]
    flops = {variant: training_bench.flops_per_token(chosen, variant, depths) for variant in variants}
    if depths is not None:
        record.keep(compared_executions(chosen, depths, device))
        record.keep({"compact_over_dense_by_flops": training_bench.promised_over_dense(chosen, depths)})

    def as_rows(results: Sequence[training_bench.Result]) -> list[dict[str, Any]]:
        plain = next((result for result in results if result.variant.method == PLAIN), None)
        return [
            training_bench.as_row(result, plain, flops=flops[result.variant], matmul_rate=matmul) for result in results
        ]

    def show(results: Sequence[training_bench.Result]) -> None:
        title = f"\n{described(chosen, rows_per_step, device)}: a training step{reading(keep)}"
        console.print(table(title, TRAIN_HEAD, [train_cells(row) for row in as_rows(results)]))

    settings = {"batch": rows_per_step, "depths": depths, "device": device}
    settings |= {"warmup": options.warmup, "repeats": options.repeats}
    results = collect(training_bench.compare(chosen, announced(variants), **settings), show, as_rows, record)
    both = "both compiled" if compiles else "both eager"
    record.keep({"adaponder_over_ponder": (ratio := training_bench.over_ponder(results))})
    if ratio is not None:
        console.print(f"adaponder makes {ratio:.3f} of ponder's tokens/s, {both}")
    if depths is not None:
        record.keep({"compact_over_dense": (ratio := training_bench.over_dense(results))})
        if ratio is not None:
            promised = record.metrics["compact_over_dense_by_flops"]
            console.print(
                f"compact makes {ratio:.3f} of dense's tokens/s, {both}; by FLOPs alone it would make {promised:.3f}"
            )
    if options.largest:
        rows: list[dict[str, Any]] = []
        for row in search_largest(chosen, compiles, start=rows_per_step, device=device):
            rows.append(row)
            record.keep({"largest_batch": rows})
        title = f"\nThe largest batch that fits, in multiples of {rows_per_step}, with the speed of one step"
        console.print(table(title, LARGEST_HEAD, [largest_cells(row, rows_per_step) for row in rows]))
    return record.finish()


def _check_largest(options: TrainBenchOptions, device: torch.device) -> None:
    """Raises where the largest batch cannot be searched for."""
    if options.keep:
        raise InputError("--largest --keep: the largest batch is searched with every token read to the end; ask apart")
    if device.type != "cuda":
        raise InputError(
            f"--largest --device {options.device}: only a GPU says when its memory is full; use --device cuda"
        )


def run_prefill(options: PrefillBenchOptions) -> dict[str, Any]:
    """Times a forward of each variant over prompts of which a share of the tokens halts; returns the record."""
    device = checked(options)
    chosen = choose_recipe(options, device)
    prompts = choose_batch(options.batch, chosen)
    keep = tuple(options.keep) or (1.0, *[0.5] * (config_of(chosen, METHOD).iterations - 1))
    depths = choose_depths(keep, chosen, prompts)
    variants = chosen_variants(
        prefill_bench.variants(compiles=options.compiles, by=chosen.train.compile_by), options.only
    )
    told = {"batch": prompts, "sequence": chosen.data.sequence, "dtype": dtype_name(chosen, device)}
    record = begin(options, "prefill", device, told | halting_settings(keep, depths), chosen, options.overrides)
    record.keep(compared_executions(chosen, depths, device))

    def as_rows(results: Sequence[prefill_bench.Result]) -> list[dict[str, Any]]:
        by_variant = {result.variant: result for result in results}
        dense, compiled = (by_variant.get(prefill_bench.Variant("dense", by)) for by in (None, chosen.train.compile_by))
        return [prefill_bench.as_row(result, dense, compiled) for result in results]

    def show(results: Sequence[prefill_bench.Result]) -> None:
        title = f"\n{described(chosen, prompts, device)}: a prefill{reading(keep)}"
        console.print(table(title, PREFILL_HEAD, [prefill_cells(row) for row in as_rows(results)]))

    settings = {"device": device, "warmup": options.warmup, "repeats": options.repeats}
    collect(prefill_bench.compare(chosen, announced(variants), depths, **settings), show, as_rows, record)
    return record.finish()


def run_ops(options: OpsBenchOptions) -> dict[str, Any]:
    """Times every operation, plain and ours, forward alone and with its backward; returns the record."""
    device = checked(options)
    low = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if dtype not in low:
        raise InputError(f"--dtype {dtype}: {' or '.join(low)}, what training computes in")
    sizes = tuple(options.size) or (op_bench.ON_GPU if device.type == "cuda" else op_bench.ON_CPU)
    for size in sizes:
        if min(size) < 1:
            raise InputError(f"--size {','.join(map(str, size))}: tokens, d and vocabulary are at least 1")
    cases = chosen_variants(op_bench.cases(sizes), options.only)
    record = begin(options, "ops", device, {"sizes": [list(size) for size in sizes], "dtype": dtype})
    if not op_bench.torch_has_it():
        console.print(f"torch {torch.__version__} has no linear_cross_entropy of its own: no row for it")
    rates = {"matmul_rate": record.hardware["matmul_flops"], "copy_rate": record.hardware["copy_bytes"]}

    def as_rows(results: Sequence[op_bench.Result]) -> list[dict[str, Any]]:
        by_case = {result.case: result for result in results}
        plains = (by_case.get(replace(result.case, implementation=op_bench.PLAIN)) for result in results)
        return [op_bench.as_row(result, plain, **rates) for result, plain in zip(results, plains, strict=True)]

    def show(results: Sequence[op_bench.Result]) -> None:
        rows = as_rows(results)
        for op, size in dict.fromkeys((result.case.op, result.case.size) for result in results):
            own = [
                op_cells(result.case.name, row)
                for result, row in zip(results, rows, strict=True)
                if (result.case.op, result.case.size) == (op, size)
            ]
            console.print(table(f"\n{op}: {size}, {dtype}", OPS_HEAD, own))

    settings: dict[str, Any] = {"device": device, "dtype": low[dtype], "seed": options.seed or 0}
    settings |= {"warmup": options.warmup, "repeats": options.repeats}
    collect(op_bench.compare(announced(cases), **settings), show, as_rows, record)
    return record.finish()


# --- before --------------------------------------------------------------------------------------------------------


def choose_recipe(options: TrainBenchOptions | PrefillBenchOptions, device: torch.device) -> Recipe:
    """The recipe, with ``--seed`` if there is one; raises if bench cannot build its model."""
    recipe = load_recipe(options.recipe or (ON_GPU if device.type == "cuda" else ON_CPU), options.overrides)
    vocabulary_of(recipe)
    return recipe if options.seed is None else replace(recipe, train=replace(recipe.train, seed=options.seed))


def choose_batch(batch: int | None, recipe: Recipe) -> int:
    """Sequences per step: ``batch``, or else what one process of the recipe computes at a time."""
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch}: at least one sequence is needed")
    return batch or recipe.train.micro_batch or recipe.train.global_batch


def choose_depths(keep: Sequence[float], recipe: Recipe, batch: int) -> Tensor:
    """How often each token is read, ``[batch, sequence]``; raises if these shares are impossible."""
    check_keep(keep, config_of(recipe, METHOD).iterations)
    return depths_of(keep, batch, recipe.data.sequence, seed=recipe.train.seed)


def halting_settings(keep: Sequence[float], depths: Tensor) -> dict[str, Any]:
    """What a record says of halting: the shares that read on, and the mean depth."""
    return {"keep": list(keep), "mean_depth": float(depths.double().mean())}


def compared_executions(recipe: Recipe, depths: Tensor, device: torch.device) -> dict[str, Any]:
    """By how much dense and compact execution differ; raises if that is more than rounding."""
    console.print("comparing dense and compact execution …")
    try:
        return {"dense_and_compact_differ_by": disagreement(recipe, depths, device=device)}
    except Exception as error:
        if not out_of_memory(error):
            raise
    raise InputError(
        f"--batch {depths.shape[0]}: memory does not suffice to compare dense and compact; use a smaller one"
    )


def label(variant: Any) -> str:
    """The name of a variant on the screen; that of an operation's begins with the operation."""
    return f"{variant.op}: {variant.name}" if hasattr(variant, "op") else variant.name


def announced(chosen: Iterable[Any]) -> Iterator[Any]:
    """The same variants, each printed as its measurement begins."""
    for one in chosen:
        console.print(f"measuring {label(one)} …")
        yield one


def chosen_variants(variants: Sequence[Named], only: Sequence[str]) -> list[Named]:
    """The plain version, and the variants with a word of ``only`` in their names; all if ``only`` is empty."""
    for word in only:
        if not any(word in label(variant) for variant in variants):
            names = "; ".join(dict.fromkeys(map(label, variants)))
            raise InputError(f"--only {word}: in none of the names: {names}")
    return [
        variant
        for variant in variants
        if not only or variant.name.startswith(PLAIN) or any(word in label(variant) for word in only)
    ]


def collect(
    results: Iterable[Measured],
    show: Callable[[Sequence[Measured]], None],
    as_rows: Callable[[Sequence[Measured]], list[dict[str, Any]]],
    record: Record,
) -> list[Measured]:
    """All results as a list: each is written as it comes, and at the end, or when interrupted, all are printed."""
    measured: list[Measured] = []
    try:
        for result in results:
            measured.append(result)
            record.keep({"rows": as_rows(measured)})
    except KeyboardInterrupt:
        path = record.options.json
        name = "standard output" if path == STDOUT else path
        where = f"; {name} has what there is" if measured and path is not None else ""
        console.print(f"interrupted: no record is written{where}")
        if measured:
            show(measured)
        raise
    show(measured)
    return measured


# --- after ---------------------------------------------------------------------------------------------------------


def search_largest(recipe: Recipe, compiles: bool, *, start: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """The largest batch that fits, a row each: of the plain version, and of ours with checkpointing.

    Both are searched uncompiled; the search for the compiled variant starts at the batch of the uncompiled one.
    """
    eager = training_bench.Variant(METHOD, compile=False, checkpointing=True)
    settings: dict[str, Any] = {"start": start, "device": device, "tried": _say_fit}
    best = None
    for variant in (training_bench.Variant(PLAIN, compile=False), eager):
        console.print(f"searching the largest batch of {variant.name} …")
        best = largest_bench.search(recipe, variant, **settings)
        yield largest_bench.as_row(variant, best)
    if compiles:
        variant = replace(eager, compile=True, by=recipe.train.compile_by)
        console.print(f"searching the largest batch of {variant.name} …")
        guess = start if best is None else best.batch
        yield largest_bench.as_row(variant, largest_bench.around(recipe, variant, guess=guess, **settings))


def _say_fit(batch: int, fits: bool) -> None:
    console.print(f"  {batch:,} sequences: {'fits' if fits else 'does not fit'}")


def reading(keep: Sequence[float]) -> str:
    """The part of a title that names the shares of tokens read; empty if all are."""
    return f" that reads {', '.join(f'{share:g}' for share in keep)} of the tokens" if keep else ""


def described(recipe: Recipe, batch: int, device: torch.device) -> str:
    return f"{recipe.name}, {batch} x {recipe.data.sequence:,} tokens, {dtype_name(recipe, device)}"


def dtype_name(recipe: Recipe, device: torch.device) -> str:
    return str(product_dtype(recipe.train.dtype, device)).removeprefix("torch.")
