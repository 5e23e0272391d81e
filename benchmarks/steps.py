"""Times a training step or a prefill with each implementation, on the same random tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from typer import Option

from adaponder.devices import autocast, product_dtype
from adaponder.errors import InputError
from adaponder.methods import Objective
from adaponder.methods.cost import cost_of
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe, load_recipe
from adaponder.terminal import console, line
from adaponder.training.schedule import build_optimizer
from benchmarks import harness, models
from benchmarks.harness import SEVERAL, Common, Row, Run, Timing, number, ratio, speed
from benchmarks.models import METHOD, PLAIN

COMPILED_PLAIN = f"{PLAIN}, compiled"
_TRAIN_COLUMNS = {
    "variant": lambda row: row["variant"],
    "tokens/s": speed("tokens_per_second", ",.0f"),
    "spread": harness.SPREAD,
    "peak GiB": harness.PEAK,
    "x plain": number("times_plain", ".2f"),
    "x memory": number("memory_of_plain", ".2f"),
    "x compiled plain": number("times_compiled_plain", ".2f"),
    "x its memory": number("memory_of_compiled_plain", ".2f"),
    "of matmul": number("matmul_share", ".1%"),
}
_PREFILL_COLUMNS = {
    "variant": lambda row: row["variant"],
    "ms": speed("median_seconds", ",.2f", 1e3),
    "spread": harness.SPREAD,
    "tokens/s": number("tokens_per_second", ",.0f"),
    "x dense": number("times_dense", ".2f"),
    "x compiled dense": number("times_compiled", ".2f"),
    "promised": number("times_promised", ".2f"),
}


@dataclass(frozen=True)
class StepOptions(Common):
    """Options of train and prefill: a recipe's model and its batches of random tokens."""

    recipe_name: Annotated[
        str | None, Option("--recipe", metavar="RECIPE", help="Default: paper/adaponder-70m, on a CPU cpu/demo.")
    ] = None
    overrides: Annotated[
        list[str] | None, Option("--set", metavar="a.b=c", help=f"Change a field of the recipe{SEVERAL}")
    ] = None
    batch: Annotated[int | None, Option(metavar="N", min=1, help="Sequences at once; default: micro_batch.")] = None
    keep: Annotated[str | None, Option(metavar="1,.5,…", help="Share of random tokens that each iteration reads.")] = (
        None
    )
    compiles: Annotated[bool, Option("--compile/--no-compile", help="Measure compiled variants, too.")] = True

    @cached_property
    def recipe(self) -> Recipe:
        """Returns the recipe, with ``--seed`` if given; raises if its model cannot be built."""
        default = "paper/adaponder-70m" if self.target.type == "cuda" else "cpu/demo"
        recipe = load_recipe(self.recipe_name or default, self.overrides or ())
        models.vocabulary_of(recipe)
        return recipe if self.seed is None else replace(recipe, train=replace(recipe.train, seed=self.seed))

    @cached_property
    def sequences(self) -> int:
        return self.batch or self.recipe.train.micro_batch or self.recipe.train.global_batch

    @cached_property
    def shares(self) -> list[float]:
        return harness.numbers("--keep", self.keep, float, 0, 1)

    @cached_property
    def depths(self) -> Tensor | None:
        """Returns the forced depth of each token, ``[batch, sequence]``; ``None`` if no token halts."""
        return models.choose_depths(self.shares, self.recipe, self.sequences) if self.shares else None

    @property
    def dtype(self) -> str:
        return str(product_dtype(self.recipe.train.dtype, self.target)).removeprefix("torch.")

    def title(self, what: str) -> str:
        title = f"\n{self.recipe.name}, {self.sequences} x {self.recipe.data.sequence:,} tokens, {self.dtype}: {what}"
        shares = ", ".join(f"{share:g}" for share in self.shares)
        return f"{title} that reads {shares} of the tokens" if shares else title

    def begin(self, name: str) -> Run:
        """Begins the record called ``name``; where tokens halt, dense and compact execution are compared first."""
        recipe, depths = self.recipe, self.depths
        settings: dict[str, Any] = {"batch": self.sequences, "sequence": recipe.data.sequence, "dtype": self.dtype}
        if depths is not None:
            settings |= {"keep": self.shares, "mean_depth": float(depths.double().mean())}
        console.print(line((recipe.name, "bold"), f"  {recipe.fingerprint}  {recipe.about}"))
        about = {"name": recipe.name, "hash": recipe.fingerprint, "set": self.overrides or []}
        name = "-".join([name, *harness.words_of(recipe.name)])
        bench = Run(self, name, settings, recipe=about, seed=recipe.train.seed)
        if depths is not None:
            bench.keep(dense_and_compact_differ_by=models.check_executions(recipe, depths, self.target))
        return bench


@dataclass(frozen=True)
class Variant:
    """One implementation of a training step or a prefill by ``plain``, ``ponder`` or ``adaponder``.

    Attributes:
        by: what is compiled at once, one ``layer`` or a whole ``pass`` (``plain`` as a whole); ``None``: nothing.
        checkpointing: keeps the activations of one pass at a time and recomputes the others.
        memory_budget: the share of a compiled pass's activations that is kept; the rest is recomputed.
        keep_logits: keeps the vocabulary's logits of every iteration for backward.
    """

    method: str
    by: str | None = "layer"
    execution: str | None = None
    checkpointing: bool = False
    memory_budget: float = 1.0
    keep_logits: bool = False

    @property
    def graphs(self) -> tuple[Any, ...]:
        """Returns a key of the compiled graphs; our methods share one, since they run the same compiled pass."""
        return self.method == PLAIN, self.memory_budget, self.by

    @property
    def name(self) -> str:
        if self.method == PLAIN:
            return PLAIN if self.by is None else COMPILED_PLAIN
        words = [self.method, {None: "eager", "layer": "compiled"}.get(self.by, f"compiled by {self.by}")]
        words += [f"memory budget {self.memory_budget:g}"] if self.memory_budget != 1 else []
        words += ["checkpointed"] if self.checkpointing else []
        words += ["logits kept"] if self.keep_logits else []
        words += [self.execution] if self.execution is not None else []
        return ", ".join(words)

    def build(self, recipe: Recipe, device: torch.device) -> Any:
        """Builds the variant's model on ``device``, in training mode."""
        if self.method == PLAIN:
            plain = models.build_plain(recipe, device)
            return plain if self.by is None else torch.compile(plain)
        model = models.build_ours(recipe, self.method, device)
        model.method.keep_logits = self.keep_logits
        if self.by is not None:
            model.compile_passes(by=self.by, memory_budget=self.memory_budget)
        if self.checkpointing:
            model.gradient_checkpointing_enable()
        return model

    def depths_read(self, recipe: Recipe, depths: Tensor | None) -> Tensor:
        """Returns how many iterations compute each token: ``depths`` in compact execution, else all of them."""
        if depths is not None and self.execution == "compact":
            return depths
        shape = (1, recipe.data.sequence) if depths is None else depths.shape
        return torch.full(shape, models.config_of(recipe, self.method).iterations)


def train(
    options: StepOptions,
    *,
    largest: Annotated[bool, Option("--largest", help="Search the largest batch, too (GPU only).")] = False,
) -> dict[str, Any]:
    """Time a training step: plain PonderLM, our ponder, and adaponder compiled, eager and checkpointed.

    With --keep, training that skips halted tokens is compared with dense training.

    [dim]python -m benchmarks train --device cuda --batch 32 --largest[/]

    [dim]python -m benchmarks train --device cuda --batch 32 --keep 1,.5,.5,.5[/]
    """
    if largest and options.shares:
        raise InputError("--largest and --keep exclude each other: the largest batch is searched at full depth")
    if largest and options.target.type != "cuda":
        raise InputError(f"--largest needs a GPU, not --device {options.device}: only a GPU reports full memory")
    recipe, depths, device = options.recipe, options.depths, options.target
    selected = train_variants(recipe, device, compiles=options.compiles, halting=depths is not None)
    selected = harness.select(selected, options.only, always=PLAIN)
    bench = options.begin("train" if depths is None else "train-halting")
    if depths is not None:
        bench.keep(compact_over_dense_by_flops=promised_over_dense(recipe, depths))
    losses: dict[str, list[Tensor]] = {variant.name: [] for variant in selected}

    def report(variant: Variant, median: float | None) -> Row:
        rate = ratio(options.sequences * recipe.data.sequence, median)
        flops = rate and rate * flops_per_token(recipe, variant, depths)
        row = {"variant": variant.name, "batch": options.sequences, "tokens_per_second": rate}
        row |= {"loss": None if rate is None else float(losses[variant.name][0])}
        return row | {"matmul_share": ratio(flops, bench.hardware["matmul_flops"])}

    rows = bench.time_all(
        selected,
        lambda variant: training_step(recipe, variant, options.sequences, device, losses[variant.name], depths),
        report,
        compare=compare_with_plain,
        show=lambda rows: harness.print_table(options.title("a training step"), _TRAIN_COLUMNS, rows),
    )
    ratios = ratios_of(dict(zip(selected, rows, strict=True)))
    bench.keep(**ratios)
    for name, times in ratios.items():
        if times is not None:
            console.print(f"{name.replace('_', ' ')}: {times:.3f} times the tokens/s, both run the same way")
    if depths is not None:
        console.print(f"by FLOPs alone: {bench.metrics['compact_over_dense_by_flops']:.3f}")
    if largest:
        bench.keep(largest_batch=search_all(options))
    return bench.finish()


def train_variants(
    recipe: Recipe, device: torch.device, *, compiles: bool = True, halting: bool = False
) -> list[Variant]:
    """Returns the variants that are compared, the plain versions first, those that share graphs together.

    With ``halting``, compact execution is compared with dense; without, options that save time or memory.
    """
    by = recipe.train.compile_by if compiles else None
    plain = [Variant(PLAIN, None), *([Variant(PLAIN)] if compiles else [])]
    ponder, best = (Variant(method, by) for method in ("ponder", METHOD))
    if halting:
        return [*plain, ponder, *(replace(best, execution=execution) for execution in ("dense", "compact"))]
    ours = [Variant(METHOD, None)] if compiles else []
    ours += [ponder, best, replace(best, keep_logits=True), replace(best, checkpointing=True)]
    if compiles and device.type == "cuda":
        ours.append(replace(best, memory_budget=0.5))
    return [*plain, *ours]


def training_step(
    recipe: Recipe,
    variant: Variant,
    batch: int,
    device: torch.device,
    losses: list[Tensor],
    depths: Tensor | None = None,
) -> Callable[[], None]:
    """Builds the variant's model and returns its training step of stage 2, which leaves its loss in ``losses``.

    AdaPonder's tokens have ``depths [batch, sequence]``, or without them those of its gates, which start open.
    """
    settings, model, draws = recipe.train, variant.build(recipe, device), models.batches(recipe, batch, device)
    optimizer = build_optimizer(model, settings)
    how: dict[str, Any] = {"execution": variant.execution or "dense", "output_logits": False}
    how["objective"] = Objective(ponder_weight=settings.ponder_weight, ponder_fraction=settings.k_max)
    if depths is not None and variant.method == METHOD:
        how["policy"] = ForcedDepths(depths.to(device))

    def step() -> None:
        ids, targets = next(draws)
        with autocast(settings.dtype, device):
            loss = model(ids, targets) if variant.method == PLAIN else model(ids, targets=targets, **how).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[:] = [loss.detach()]

    return step


def flops_per_token(recipe: Recipe, variant: Variant, depths: Tensor | None = None) -> float:
    """Returns the matrix FLOPs of a training step per token: three times the forward's, without recomputation."""
    read = variant.depths_read(recipe, depths)
    return 3 * cost_of(read, models.config_of(recipe, variant.method), every_gate=True).flops / read.numel()


def promised_over_dense(recipe: Recipe, depths: Tensor) -> float:
    """Returns how much faster compact execution would be than dense if every FLOP took the same time."""
    ways = (Variant(METHOD, execution=way) for way in ("dense", "compact"))
    dense, compact = (flops_per_token(recipe, variant, depths) for variant in ways)
    return dense / compact


def compare_with_plain(rows: list[Row]) -> None:
    """Fills in each row's speed and memory relative to both plain versions, eager and compiled."""
    named = {row["variant"]: row for row in rows}
    eager, compiled = named.get(PLAIN, {}), named.get(COMPILED_PLAIN, {})
    harness.add_ratios(rows, eager, times_plain="tokens_per_second", memory_of_plain="peak_bytes")
    fields = {"times_compiled_plain": "tokens_per_second", "memory_of_compiled_plain": "peak_bytes"}
    harness.add_ratios(rows, compiled, **fields)


def ratios_of(rows: Mapping[Variant, Row]) -> dict[str, float | None]:
    """Returns AdaPonder's tokens/s over PonderLM's, both dense and run the same way; ``None`` where a row is missing.

    Where tokens halt, the tokens/s of compact over dense execution are returned too.
    """
    speeds = {variant: row["tokens_per_second"] for variant, row in rows.items()}
    ponder = next((variant for variant in speeds if variant.method == "ponder"), Variant("ponder"))
    dense = (speeds.get(replace(ponder, method=METHOD, execution=execution)) for execution in (None, "dense"))
    ratios = {"adaponder_over_ponder": ratio(next(filter(None, dense), None), speeds.get(ponder))}
    by_execution = {variant.execution: speed for variant, speed in speeds.items() if variant.execution}
    if by_execution:
        ratios["compact_over_dense"] = ratio(by_execution.get("compact"), by_execution.get("dense"))
    return ratios


def search_all(options: StepOptions) -> list[Row]:
    """Returns and prints the largest batch that fits: of the plain version, and of ours with checkpointing."""
    recipe, device = options.recipe, options.target
    ways = (None, recipe.train.compile_by) if options.compiles else (None,)
    rows: list[Row] = []
    for variant in (Variant(PLAIN, None), *(Variant(METHOD, by, checkpointing=True) for by in ways)):
        console.print(f"searching the largest batch of {variant.name} …")

        def time_batch(batch: int, keep_graphs: bool, variant: Variant = variant) -> Timing | None:
            how: dict[str, Any] = {"warmup": 1, "repeats": 1, "keep_graphs": keep_graphs}
            timing = harness.time_step(lambda: training_step(recipe, variant, batch, device, []), device, **how)
            console.print(f"  {batch:,} sequences: {'does not fit' if timing is None else 'fits'}")
            return timing

        batch, timing = search(time_batch, start=options.sequences)
        rate = ratio(batch * recipe.data.sequence, timing and timing.median)
        peak = timing and timing.peak_bytes
        rows.append({"variant": variant.name, "batch": batch, "tokens_per_second": rate, "peak_bytes": peak})
    columns = {
        "variant": lambda row: row["variant"],
        "sequences": lambda row: f"{row['batch']:,}" if row["batch"] else f"not even {options.sequences}",
        "tokens/s": number("tokens_per_second", ",.0f"),
        "peak GiB": harness.PEAK,
    }
    harness.print_table(f"\nThe largest batch that fits, in multiples of {options.sequences}", columns, rows)
    return rows


def search(time_batch: Callable[[int, bool], Timing | None], *, start: int) -> tuple[int, Timing | None]:
    """Returns the largest multiple of ``start`` that fits into memory, and its timing; 0 if not even ``start`` fits.

    The batch doubles until it no longer fits, then bisects: the answer and the next multiple have both been tried.
    ``time_batch(batch, keep_graphs)`` times the second step of a batch, or returns ``None`` if it does not fit. The
    second trial of a compiled variant compiles for a variable batch size, so that later trials keep the graphs.
    """
    timings: dict[int, Timing | None] = {}
    below, above = 0, 0  # nothing has failed yet: above is 0
    while above - below != 1:
        multiple = (below + above) // 2 if above else max(1, 2 * below)
        timings[multiple] = time_batch(start * multiple, bool(timings))
        if timings[multiple] is None:
            above = multiple
        else:
            below = multiple
    return below * start, timings.get(below)


def prefill(options: StepOptions) -> dict[str, Any]:
    """Time reading a prompt of which a share halts: skipping their work (compact) against computing all (dense).

    Without --keep the first iteration reads every token, the others half of them.

    [dim]python -m benchmarks prefill --device cuda --batch 8 --keep 1,.5,.5,.5[/]
    """
    recipe = options.recipe
    if not options.shares:
        halves = ",.5" * (models.config_of(recipe, METHOD).iterations - 1)
        options = replace(options, keep=f"1{halves}")
    depths: Any = options.depths  # there are shares, so there are depths
    ways = (None, recipe.train.compile_by) if options.compiles else (None,)
    variants = [Variant(METHOD, by, execution) for by in ways for execution in ("dense", "compact")]
    selected = harness.select([Variant(PLAIN, None), *variants], options.only, always=PLAIN)
    bench = options.begin("prefill")

    def report(variant: Variant, median: float | None) -> Row:
        read, config = variant.depths_read(recipe, depths), models.config_of(recipe, variant.method)
        flops = cost_of(read, config, logits=len(depths)).flops
        row = {"variant": variant.name, "median_seconds": median, "flops": flops}
        return row | {"tokens_per_second": ratio(depths.numel(), median)}

    def compare(rows: list[Row]) -> None:
        named = {row["variant"]: row for row in rows}
        dense, compiled = (named.get(Variant(METHOD, by, "dense").name, {}) for by in (None, recipe.train.compile_by))
        harness.add_ratios(rows, dense, times_dense="tokens_per_second")
        harness.add_ratios(rows, compiled, times_compiled="tokens_per_second")
        for row in rows:
            row["times_promised"] = ratio(dense.get("flops"), row["flops"])

    bench.time_all(
        selected,
        lambda variant: prefill_step(recipe, variant, depths, options.target),
        report,
        compare=compare,
        show=lambda rows: harness.print_table(options.title("a prefill"), _PREFILL_COLUMNS, rows),
    )
    return bench.finish()


def prefill_step(recipe: Recipe, variant: Variant, depths: Tensor, device: torch.device) -> Callable[[], object]:
    """Builds the variant's model and returns its forward over the next batch, to the last position's logits."""
    draws, model = models.batches(recipe, len(depths), device), variant.build(recipe, device).eval()
    if variant.method == PLAIN:

        def forward(ids: Tensor) -> Tensor:
            return model.stock.get_output_embeddings()(model.hidden(ids)[:, -1:])

    else:
        policy = ForcedDepths(depths.to(device))
        forward = partial(model, execution=variant.execution, policy=policy, logits_to_keep=1, output_gates=False)

    @torch.no_grad()
    def step() -> None:
        with autocast(recipe.train.dtype, device):
            forward(next(draws)[0])

    return step
