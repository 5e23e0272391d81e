"""Times a training step of each implementation: forward, backward, clipping, optimizer, on the same random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from adaponder.bench.depths import METHOD
from adaponder.bench.models import PLAIN, batches, build_ours, build_plain, compiled_how, config_of
from adaponder.bench.timing import Timing, forget, measure, out_of_memory
from adaponder.devices import autocast
from adaponder.methods import Objective
from adaponder.methods.cost import cost_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe
from adaponder.training.schedule import build_optimizer


@dataclass(frozen=True)
class Variant:
    """One implementation: ``plain``, or a method of ours.

    Attributes:
        method: ``plain``, ``ponder`` or ``adaponder``.
        compile: as ``train.compile``; ``plain`` never is.
        by: what is compiled at once, one ``layer`` for all or a whole ``pass``.
        checkpointing: keep one pass's activations at a time and compute the others' again.
        memory_budget: the share of a compiled pass's activations that is kept; the rest is computed again.
        keep_logits: keep the vocabulary's logits of every iteration for backward.
        execution: as ``train.execution``, ``None`` being dense: ``compact`` skips tokens that have halted.
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
        words = [self.method, compiled_how(self.by) if self.compile else "eager"]
        words += [f"memory budget {self.memory_budget:g}"] if self.memory_budget != 1 else []
        words += ["checkpointed"] if self.checkpointing else []
        words += ["logits kept"] if self.keep_logits else []
        words += [self.execution] if self.execution is not None else []
        return ", ".join(words)


@dataclass(frozen=True)
class Result:
    """One variant's steps; without a ``timing``, memory did not suffice for them."""

    variant: Variant
    batch: int
    sequence: int
    timing: Timing | None = None
    loss: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.timing is None else self.batch * self.sequence / self.timing.median


def variants(device: torch.device, *, compiles: bool = True, by: str = "layer", halting: bool = False) -> list[Variant]:
    """The variants that ``adaponder bench train`` compares, the plain version first, those that share graphs together.

    With ``halting``, compact execution is compared with dense; without, options that save time or memory.
    """
    ponder, best = (Variant(method, compiles, by) for method in ("ponder", METHOD))
    plain = Variant(PLAIN, compile=False)
    if halting:
        return [plain, ponder, *(replace(best, execution=execution) for execution in ("dense", "compact"))]
    ours = [Variant(METHOD, compile=False)] if compiles else []
    ours += [ponder, best, replace(best, keep_logits=True), replace(best, checkpointing=True)]
    if compiles and device.type == "cuda":
        ours.append(replace(best, memory_budget=0.5))
    return [plain, *ours]


def compare(
    recipe: Recipe,
    chosen: Iterable[Variant],
    *,
    batch: int,
    depths: Tensor | None = None,
    device: torch.device,
    warmup: int,
    repeats: int,
) -> Iterator[Result]:
    """Yields each variant's result as soon as it is measured, with one model in memory at a time."""
    before: Variant | None = None
    for variant in chosen:
        # Two methods of one shape run the same compiled pass; another budget splits it elsewhere.
        shared = before is not None and (before.memory_budget, before.by) == (variant.memory_budget, variant.by)
        settings = {"device": device, "warmup": warmup, "repeats": repeats, "keep_graphs": shared}
        yield measure_if_it_fits(recipe, variant, batch=batch, depths=depths, **settings)
        before = variant


def measure_training(
    recipe: Recipe,
    variant: Variant,
    *,
    batch: int,
    depths: Tensor | None = None,
    device: torch.device,
    warmup: int,
    repeats: int,
    keep_graphs: bool = False,
) -> Result:
    """Times one variant of a recipe's model; raises torch's own error if memory does not suffice.

    AdaPonder's tokens have ``depths [batch, sequence]``, or without them those of its gates, which start open.
    """
    forget(device, graphs=not keep_graphs)
    model = build(recipe, variant, device)
    how: dict[str, Any] = {"execution": variant.execution or "dense"}
    if depths is not None and variant.method == METHOD:
        how["policy"] = ForcedDepths(depths.to(device))
    last: list[Tensor] = []
    step = training_step(model, recipe, batches(recipe, batch, device), last, **how)
    timing = measure(step, device, warmup=warmup, repeats=repeats)
    return Result(variant, batch, recipe.data.sequence, timing, float(last[0]))


def flops_per_token(recipe: Recipe, variant: Variant, depths: Tensor | None = None) -> float:
    """Matrix FLOPs of a training step per token: three times the forward's, without recomputation.

    Only compact execution depends on ``depths``.
    """
    config = config_of(recipe, variant.method)
    if depths is None or variant.execution != "compact":
        depths = torch.full((1, recipe.data.sequence), config.iterations)
    return 3 * cost_of(depths, config, every_gate=True).flops / depths.numel()


def as_row(result: Result, plain: Result | None, *, flops: float, matmul_rate: float) -> dict[str, Any]:
    """A record's line: the result, relative to the plain one; ``flops`` are per token."""
    row: dict[str, Any] = {
        "variant": result.variant.name,
        "batch": result.batch,
        "fits": result.timing is not None,
        "tokens_per_second": result.tokens_per_second,
        "spread": None,
        "seconds": [],
        "peak_bytes": None,
        "loss": result.loss,
        "times_plain": _ratio(result.tokens_per_second, plain and plain.tokens_per_second),
        "memory_of_plain": None,
        "matmul_share": _ratio(result.tokens_per_second and result.tokens_per_second * flops, matmul_rate),
    }
    if result.timing is not None:
        reference = plain.timing.peak_bytes if plain is not None and plain.timing is not None else None
        peak = result.timing.peak_bytes
        row |= {"spread": result.timing.spread, "seconds": result.timing.seconds, "peak_bytes": peak}
        row |= {"memory_of_plain": _ratio(peak, reference)}
    return row


def over_ponder(results: Sequence[Result]) -> float | None:
    """AdaPonder's tokens/s over PonderLM's, both dense and run the same way; ``None`` where one is missing."""
    speed = {result.variant: result.tokens_per_second for result in results}
    ponder = next((variant for variant in speed if variant.method == "ponder"), None)
    if ponder is None:
        return None
    dense = [replace(ponder, method=METHOD, execution=execution) for execution in (None, "dense")]
    return _ratio(next((speed[variant] for variant in dense if variant in speed), None), speed[ponder])


def over_dense(results: Sequence[Result]) -> float | None:
    """Compact execution's tokens/s over dense execution's; ``None`` where one is missing."""
    speed = {result.variant.execution: result.tokens_per_second for result in results}
    return _ratio(speed.get("compact"), speed.get("dense"))


def promised_over_dense(recipe: Recipe, depths: Tensor) -> float:
    """What :func:`over_dense` would be if every FLOP took the same time."""
    dense, compact = (flops_per_token(recipe, Variant(METHOD, execution=way), depths) for way in ("dense", "compact"))
    return dense / compact


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def measure_if_it_fits(recipe: Recipe, variant: Variant, *, batch: int, **settings: Any) -> Result:
    """:func:`measure_training`, or a result without a timing if memory does not suffice."""
    try:
        return measure_training(recipe, variant, batch=batch, **settings)
    except Exception as error:
        if not out_of_memory(error):
            raise
    return Result(variant, batch, recipe.data.sequence)


def build(recipe: Recipe, variant: Variant, device: torch.device) -> nn.Module:
    """The variant's model on ``device``, in training mode."""
    if variant.method == PLAIN:
        return build_plain(recipe, device)
    model = build_ours(recipe, variant.method, device)
    model.method.keep_logits = variant.keep_logits
    if variant.compile:
        model.compile_passes(by=variant.by, memory_budget=variant.memory_budget)
    if variant.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def training_step(
    model: nn.Module, recipe: Recipe, draws: Iterator[tuple[Tensor, Tensor]], last: list[Tensor], **how: Any
) -> Callable[[], None]:
    """A function that does one training step of stage 2 and leaves the loss in ``last``.

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
        last[:] = [loss.detach()]

    return step
