"""The models that are compared: ours as a recipe builds it, and the plain one with the same weights."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adaponder.bench.record import checkout
from adaponder.config import AdaPonderConfig
from adaponder.data.tokenizers import TRAIN
from adaponder.errors import InputError
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import Recipe
from adaponder.training.build import build_model

PLAIN = "plain"
CPU = torch.device("cpu")


def vocabulary_of(recipe: Recipe) -> int:
    """The vocabulary size that the recipe states, or that of the tokenizer it trains."""
    if not isinstance(recipe.model.backbone, dict):
        raise InputError(
            f"--recipe {recipe.name} goes on from a checkpoint; bench builds its models from scratch: choose a recipe "
            "with a shape under model.backbone, as paper/adaponder-70m"
        )
    stated = recipe.model.backbone.get("vocab_size")
    if stated is not None:
        return int(stated)
    learned = recipe.data.tokenizer.removeprefix(TRAIN)
    if learned == recipe.data.tokenizer or not learned.isdecimal():
        raise InputError(
            f"--recipe {recipe.name} states no vocabulary, and bench opens no tokenizer: "
            "add --set model.backbone.vocab_size=50304"
        )
    return int(learned)


def build_ours(recipe: Recipe, method: str, device: torch.device = CPU) -> AdaPonderForCausalLM:
    """The recipe's model with that method, in training mode, initialised on ``device``."""
    with device:
        return build_model(replace(recipe, model=replace(recipe.model, method=_ours(method))), vocabulary_of(recipe))


def build_plain(recipe: Recipe, device: torch.device = CPU) -> Any:
    """The plain PonderLM with the weights of our ``ponder``; both compute the same function."""
    ours = build_ours(recipe, PLAIN, device)
    config = ours.config
    shape = {"iterations": config.iterations, "scale": config.table_scale, "first": config.input_scale}
    with device:
        plain = _plain_module().PlainPonder(config.backbone_config, **shape).to(ours.dtype)
    plain.stock.load_state_dict(ours.backbone.state_dict())
    return plain.train()


def config_of(recipe: Recipe, method: str) -> AdaPonderConfig:
    """The config of the recipe's model; no weight is allocated."""
    return build_ours(recipe, method, torch.device("meta")).config


def compiled_how(by: str) -> str:
    """How a variant's name says what is compiled; by layer is the default."""
    return "compiled" if by == "layer" else f"compiled by {by}"


def batches(recipe: Recipe, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, targets) of four random batches in turn, so that no step finds its data in a cache."""
    generator = torch.Generator().manual_seed(recipe.train.seed)
    shape = (batch, recipe.data.sequence + 1)
    drawn = [torch.randint(vocabulary_of(recipe), shape, generator=generator).to(device) for _ in range(4)]
    return itertools.cycle([(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn])


def _ours(method: str) -> str:
    """The name of our method; ``plain`` computes what ``ponder`` does."""
    return "ponder" if method == PLAIN else method


def _plain_module() -> Any:
    path = checkout() / "benchmarks" / "plain.py"
    spec = importlib.util.spec_from_file_location("adaponder_benchmarks_plain", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise InputError("benchmarks/plain.py is not there: bench runs from a checkout, not from an installed package")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
