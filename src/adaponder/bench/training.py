"""One training step of each implementation: forward, backward, clipping, optimizer, on the same random tokens."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from adaponder.bench.record import checkout
from adaponder.bench.timing import Timing, forget, measure
from adaponder.compute import cost_of
from adaponder.errors import InputError
from adaponder.methods import Objective
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipe import Recipe
from adaponder.training.build import build_model
from adaponder.training.optim import build_optimizer


@dataclass(frozen=True)
class Variant:
    """One implementation: ``plain``, or a method of ours, compiled or not, checkpointed or not."""

    method: str
    compile: bool = True
    checkpointing: bool = False

    @property
    def name(self) -> str:
        if self.method == "plain":
            return "plain"
        return self.method + ("" if self.compile else ", eager") + (", checkpointed" if self.checkpointing else "")


@dataclass(frozen=True)
class Result:
    variant: Variant
    batch: int
    sequence: int
    timing: Timing
    loss: float

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.sequence / self.timing.median


def measure_training(
    recipe: Recipe, variant: Variant, *, batch: int, device: torch.device, warmup: int, repeats: int
) -> Result:
    """Times one variant of a recipe's model; raises torch's own error if memory does not suffice."""
    forget(device)
    sequence = recipe.data.sequence
    model = _model(recipe, variant, device)
    optimizer = _optimizer(model, recipe)
    last: list[Tensor] = []
    draws = _batches(vocabulary_of(recipe), batch, sequence, device)
    step = _step(model, variant, optimizer, draws, recipe, last)
    timing = measure(step, device, warmup=warmup, repeats=repeats)
    return Result(variant, batch, sequence, timing, float(last[0]))


def largest_batch(recipe: Recipe, variant: Variant, *, start: int, device: torch.device) -> int:
    """The largest multiple of ``start`` whose step fits into memory; 0 if not even ``start`` does."""
    fits = 0
    for batch in itertools.count(start, start):
        try:
            measure_training(recipe, variant, batch=batch, device=device, warmup=1, repeats=1)
        except torch.cuda.OutOfMemoryError:
            return fits
        fits = batch
    return fits


def flops_per_token(recipe: Recipe, method: str) -> float:
    """Matrix FLOPs of a training step per token: three times the forward's, nothing computed twice counted."""
    model_recipe = replace(recipe.model, method="ponder" if method == "plain" else method)
    with torch.device("meta"):
        config = build_model(replace(recipe, model=model_recipe), vocabulary_of(recipe)).config
    depth = torch.full((1, recipe.data.sequence), config.iterations)
    return 3 * cost_of(depth, config, every_gate=True).flops / recipe.data.sequence


def vocabulary_of(recipe: Recipe) -> int:
    if not isinstance(recipe.model.backbone, dict) or "vocab_size" not in recipe.model.backbone:
        raise InputError("bench: a recipe that states model.backbone.vocab_size is needed, as paper/adaponder-70m does")
    return recipe.model.backbone["vocab_size"]


def _model(recipe: Recipe, variant: Variant, device: torch.device) -> nn.Module:
    if variant.method == "plain":
        ours = replace(recipe, model=replace(recipe.model, method="ponder"))
        with torch.device("meta"):
            config = build_model(ours, vocabulary_of(recipe)).config
        plain = _load_plain().PlainPonder(
            config.backbone_config, iterations=config.iterations, scale=config.embedding_scale
        )
        return plain.to(device).train()
    chosen = replace(recipe.model, method=variant.method)
    model = build_model(replace(recipe, model=chosen), vocabulary_of(recipe)).to(device)
    if variant.compile:
        model.compile_passes()
    if variant.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _load_plain() -> Any:
    path = checkout() / "benchmarks" / "plain.py"
    spec = importlib.util.spec_from_file_location("adaponder_benchmarks_plain", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise InputError(f"{path} is not there: the plain version is part of a checkout, not of an installed package")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    return build_optimizer(model, recipe.train)


def _batches(vocabulary: int, batch: int, sequence: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Four batches in turn, so that no step finds its own data in a cache."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(vocabulary, (batch, sequence + 1), generator=generator).to(device) for _ in range(4)]
    return itertools.cycle([(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn])


def _step(
    model: nn.Module,
    variant: Variant,
    optimizer: torch.optim.Optimizer,
    draws: Iterator[tuple[Tensor, Tensor]],
    recipe: Recipe,
    last: list[Tensor],
) -> Callable[[], None]:
    train = recipe.train
    # As in stage 2, where AdaPonder has most to do.
    objective = Objective(ponder_weight=train.ponder_weight, ponder_fraction=train.k_max)

    def step() -> None:
        ids, targets = next(draws)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
            if isinstance(model, AdaPonderForCausalLM):
                output = model(input_ids=ids, targets=targets, objective=objective, output_logits=False)
                loss = output.loss
            else:
                loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last[:] = [loss.detach()]

    return step
