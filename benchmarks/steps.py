"""Times a training step or a prefill with each implementation, on the same random tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from adaponder.commands.shared import Overrides, listed, opt
from adaponder.devices import autocast, product_dtype
from adaponder.methods import Objective
from adaponder.methods.cost import cost_of
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe, load_recipe
from adaponder.terminal import console, line
from adaponder.training.graphs import StepGraphs, add_gradients
from adaponder.training.schedule import build_optimizer
from benchmarks import harness, models
from benchmarks.harness import Common, Row, Run, number, ratio, speed
from benchmarks.models import DOCUMENTS, METHOD, PADDING, PLAIN

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
    "x by FLOPs": number("times_promised", ".2f"),
}


@dataclass(frozen=True)
class StepOptions(Common):
    """Options of train and prefill: a recipe's model and its batches of random tokens."""

    recipe_name: Annotated[
        str | None, opt("Default: paper/adaponder-70m, on a CPU cpu/demo.", "RECIPE", flag="--recipe")
    ] = None
    overrides: Overrides = None
    batch: Annotated[int | None, opt("Sequences at once; default: micro_batch.", "N", min=1)] = None
    keep: Annotated[str | None, opt("Share of tokens that each iteration reads.", "1,.5,…")] = None
    compiles: Annotated[bool, opt("Measure compiled variants, too.", flag="--compile/--no-compile")] = True

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
        return list(listed("--keep", self.keep, float, "[0, 1]"))

    @cached_property
    def depths(self) -> Tensor | None:
        """Returns the forced depths, ``int64[batch, sequence]``; ``None`` without ``--keep``."""
        return models.choose_depths(self.shares, self.recipe, self.sequences) if self.shares else None

    @property
    def by(self) -> str | None:
        """Returns the unit of compilation of our compiled variants; ``None`` with ``--no-compile``."""
        return self.recipe.train.compile_by if self.compiles else None

    @property
    def dtype(self) -> str:
        return str(product_dtype(self.recipe.train.dtype, self.target)).removeprefix("torch.")

    def title(self, what: str) -> str:
        title = f"\n{self.recipe.name}, {self.sequences} x {self.recipe.data.sequence:,} tokens, {self.dtype}: {what}"
        shares = ", ".join(f"{share:g}" for share in self.shares)
        return f"{title} that reads {shares} of the tokens" if shares else title

    def begin(self, name: str) -> Run:
        """Begins the record ``name``; if tokens halt, checks that dense and compact execution agree."""
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
        by: the unit of compilation: ``layer`` or ``pass`` (``plain`` is compiled as a whole); ``None``: eager.
        checkpointing: keeps the activations of one pass at a time and recomputes the others.
        memory_budget: the share of a compiled pass's activations that is kept; the rest is recomputed.
        keep_logits: keeps the vocabulary's logits of every iteration for backward.
        cuda_graphs: runs forward and backward of a training step as CUDA graphs.
        masked: ``DOCUMENTS`` or ``PADDING``, which mask attention further; empty: attention is only causal.
    """

    method: str
    by: str | None = "layer"
    execution: str | None = None
    checkpointing: bool = False
    memory_budget: float = 1.0
    keep_logits: bool = False
    cuda_graphs: bool = False
    masked: str = ""

    @property
    def graphs(self) -> tuple[Any, ...]:
        """Returns a key of the compiled graphs; our methods share one, since they run the same compiled pass."""
        return self.method == PLAIN, self.memory_budget, self.by

    @property
    def name(self) -> str:
        if self.method == PLAIN:
            return PLAIN if self.by is None else COMPILED_PLAIN
        words = [self.method, {None: "eager", "layer": "compiled"}.get(self.by, f"compiled by {self.by}")]
        words += [f"memory budget {self.memory_budget:g}" if self.memory_budget != 1 else ""]
        words += ["checkpointed" * self.checkpointing, "logits kept" * self.keep_logits, self.execution or ""]
        words += ["CUDA graphs" * self.cuda_graphs, self.masked]
        return ", ".join(filter(None, words))

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
        """Returns the number of iterations that compute each token: ``depths`` in compact execution, else K."""
        if depths is not None and self.execution == "compact":
            return depths
        shape = (1, recipe.data.sequence) if depths is None else depths.shape
        return torch.full(shape, models.config_of(recipe, self.method).iterations)


def train(options: StepOptions) -> dict[str, Any]:
    """Time a training step of plain PonderLM, our ponder, and adaponder compiled, eager and checkpointed.

    With --keep, tokens halt: compact training, which skips them, is compared with dense training, which does not.

    [dim]python -m benchmarks train --device cuda --batch 32[/]

    [dim]python -m benchmarks train --device cuda --batch 32 --keep 1,.5,.5,.5[/]
    """
    recipe, depths, device = options.recipe, options.depths, options.target
    variants = train_variants(options.by, device, halting=depths is not None)
    selected = harness.select(variants, options.only, always=PLAIN)
    bench = options.begin("train" if depths is None else "train-halting")
    losses: dict[str, Tensor] = {}

    def prepare(variant: Variant) -> Callable[[], None]:
        step = training_step(recipe, variant, options.sequences, device, depths)
        return lambda: losses.update({variant.name: step()})

    def report(variant: Variant, median: float | None) -> Row:
        rate = ratio(options.sequences * recipe.data.sequence, median)
        flops = rate and rate * flops_per_token(recipe, variant, depths)
        row = {"variant": variant.name, "batch": options.sequences, "tokens_per_second": rate}
        row |= {"loss": None if rate is None else float(losses[variant.name])}
        return row | {"matmul_share": ratio(flops, bench.hardware["matmul_flops"])}

    rows = bench.time_all(
        selected,
        prepare,
        report,
        compare=compare_with_plain,
        title=lambda row: options.title("a training step"),
        columns=_TRAIN_COLUMNS,
    )
    best = Variant(METHOD, options.by, None if depths is None else "dense")
    ponder, compact = Variant("ponder", options.by), replace(best, execution="compact")
    speeds = {row["variant"]: row["tokens_per_second"] for row in rows}
    fast = [replace(variant, cuda_graphs=True).name for variant in (best, compact)]
    ratios = {"adaponder_over_ponder": ratio(speeds.get(best.name), speeds.get(ponder.name))}
    if depths is not None:
        flops = [flops_per_token(recipe, variant, depths) for variant in (best, compact)]
        ratios["compact_over_dense"] = ratio(speeds.get(compact.name), speeds.get(best.name))
        if fast[0] in speeds:
            ratios["compact_over_dense_as_graphs"] = ratio(speeds.get(fast[1]), speeds[fast[0]])
        ratios["compact_over_dense_by_flops"] = flops[0] / flops[1]
    bench.keep(**ratios)
    return bench.finish()


def train_variants(by: str | None, device: torch.device, *, halting: bool = False) -> list[Variant]:
    """Returns the variants to compare: plain versions first, and variants that share compiled graphs side by side.

    ``by`` is the unit of compilation; ``None``: no variant is compiled. With ``halting``, the variants compare compact
    with dense execution; otherwise they compare options that save time or memory.
    """
    plain = [Variant(PLAIN, None), *([Variant(PLAIN)] if by else [])]
    ponder, best = (Variant(method, by) for method in ("ponder", METHOD))
    compiled_on_gpu = by is not None and device.type == "cuda"
    if halting:
        ours = [replace(best, execution=execution) for execution in ("dense", "compact")]
        if compiled_on_gpu:
            graphs = [replace(variant, cuda_graphs=True) for variant in ours]
            ours += graphs + [replace(variant, masked=DOCUMENTS) for variant in ours]
        return [*plain, ponder, *ours]
    ours = [Variant(METHOD, None)] if by else []
    ours += [ponder, best, replace(best, keep_logits=True), replace(best, checkpointing=True)]
    if compiled_on_gpu:
        ours += [replace(best, masked=kind) for kind in (DOCUMENTS, PADDING)]
        ours += [replace(best, keep_logits=keep, cuda_graphs=True) for keep in (False, True)]
        ours += [replace(best, memory_budget=0.5)]
    return [*plain, *ours]


def training_step(
    recipe: Recipe, variant: Variant, batch: int, device: torch.device, depths: Tensor | None = None
) -> Callable[[], Tensor]:
    """Builds the variant's model and returns a function that runs a training step of stage 2 and returns its loss.

    ``depths``, ``int64[batch, sequence]``, forces AdaPonder's depths; else the gates decide, open at first.
    """
    settings, model, draws = recipe.train, variant.build(recipe, device), models.batches(recipe, batch, device)
    optimizer = build_optimizer(model, settings)
    execution = variant.execution or "dense"
    arguments: dict[str, Any] = {"output_logits": False}
    arguments["objective"] = Objective(ponder_weight=settings.ponder_weight, ponder_fraction=settings.k_max)
    if depths is not None and variant.method == METHOD:
        arguments["policy"] = ForcedDepths(depths.to(device))

    masks = models.mask_inputs(variant.masked, recipe, batch, device)
    graphs = StepGraphs(model, execution, patience=1) if variant.cuda_graphs else None

    def forward(inputs: dict[str, Tensor], execution: Any) -> Any:
        with autocast(settings.dtype, device):
            return model(**inputs, execution=execution, **arguments)

    def backward(ids: Tensor, targets: Tensor) -> Any:
        if variant.method == PLAIN:
            with autocast(settings.dtype, device):
                loss = model(ids, targets)
            loss.backward()
            return loss
        inputs = {"input_ids": ids, "targets": targets, **masks}
        if graphs is not None:
            return graphs.run(None, inputs, forward).loss
        return add_gradients(forward(inputs, execution), 1).loss

    def step() -> Tensor:
        loss = backward(*next(draws))
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    return step


def flops_per_token(recipe: Recipe, variant: Variant, depths: Tensor | None = None) -> float:
    """Returns the FLOPs of matrix products in a training step per token: three times those of the forward."""
    read = variant.depths_read(recipe, depths)
    return 3 * cost_of(read, models.config_of(recipe, variant.method), every_gate=True).flops / read.numel()


def compare_with_plain(rows: list[Row]) -> None:
    """Fills in each row's speed and memory relative to both plain versions, eager and compiled."""
    harness.add_ratios(rows, PLAIN, times_plain="tokens_per_second", memory_of_plain="peak_bytes")
    fields = {"times_compiled_plain": "tokens_per_second", "memory_of_compiled_plain": "peak_bytes"}
    harness.add_ratios(rows, COMPILED_PLAIN, **fields)


def prefill(options: StepOptions) -> dict[str, Any]:
    """Benchmark prefill when some tokens halt: compact execution, which skips them, against dense, which does not.

    Without --keep, the first iteration computes every token, and each later one computes half of them.

    [dim]python -m benchmarks prefill --device cuda --batch 8 --keep 1,.5,.5,.5[/]
    """
    recipe = options.recipe
    if not options.shares:
        halves = ",.5" * (models.config_of(recipe, METHOD).iterations - 1)
        options = replace(options, keep=f"1{halves}")
    depths: Any = options.depths  # there are shares, so there are depths
    ours = itertools.product((METHOD,), dict.fromkeys((None, options.by)), ("dense", "compact"))
    variants = [Variant(PLAIN, None), *itertools.starmap(Variant, ours)]
    selected = harness.select(variants, options.only, always=PLAIN)
    bench = options.begin("prefill")

    def flops_of(variant: Variant) -> float:
        config = models.config_of(recipe, variant.method)
        return cost_of(variant.depths_read(recipe, depths), config, logits=len(depths)).flops

    def report(variant: Variant, median: float | None) -> Row:
        row = {"variant": variant.name, "median_seconds": median, "flops": flops_of(variant)}
        row |= {"times_promised": flops_of(Variant(METHOD, None, "dense")) / row["flops"]}
        return row | {"tokens_per_second": ratio(depths.numel(), median)}

    def compare(rows: list[Row]) -> None:
        dense, compiled = (Variant(METHOD, by, "dense").name for by in (None, recipe.train.compile_by))
        harness.add_ratios(rows, dense, times_dense="tokens_per_second")
        harness.add_ratios(rows, compiled, times_compiled="tokens_per_second")

    bench.time_all(
        selected,
        lambda variant: prefill_step(recipe, variant, depths, options.target),
        report,
        compare=compare,
        title=lambda row: options.title("a prefill"),
        columns=_PREFILL_COLUMNS,
    )
    return bench.finish()


def prefill_step(recipe: Recipe, variant: Variant, depths: Tensor, device: torch.device) -> Callable[[], object]:
    """Builds the variant's model; returns a function that computes the last token's logits in the next batch."""
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
