"""Builds the compared models, random batches, and token depths in given shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from adaponder.backbones.wrapper import relative_difference, rounding_bound
from adaponder.checkpoints.looped import LAYOUTS, translated_config
from adaponder.config import AdaPonderConfig
from adaponder.data.tokenizers import TRAIN
from adaponder.devices import autocast, product_dtype
from adaponder.errors import EvaluationError, InputError
from adaponder.methods import Iteration
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe
from adaponder.terminal import console
from adaponder.training.build import build_model
from benchmarks.harness import forget
from benchmarks.plain import PlainPonder

# The method that is measured, and the name of the plain PonderLM, which computes what our ``ponder`` does.
METHOD, PLAIN = "adaponder", "plain"
CPU = torch.device("cpu")


def vocabulary_of(recipe: Recipe) -> int:
    """Returns the vocabulary size of the recipe's backbone or of its tokenizer, if to be trained; else raises."""
    if not isinstance(recipe.model.backbone, dict):
        raise InputError(f"--recipe {recipe.name} continues a checkpoint: choose one with a shape in model.backbone")
    size = str(recipe.model.backbone.get("vocab_size") or recipe.data.tokenizer.removeprefix(TRAIN))
    if not size.isdecimal():
        raise InputError(f"--recipe {recipe.name} has no vocabulary size: add --set model.backbone.vocab_size=50304")
    return int(size)


def build_ours(recipe: Recipe, method: str, device: torch.device = CPU) -> AdaPonderForCausalLM:
    """Builds the recipe's model in training mode with ``method``; if that is ``plain``, with our ``ponder``."""
    method = "ponder" if method == PLAIN else method
    with device:
        return build_model(replace(recipe, model=replace(recipe.model, method=method)), vocabulary_of(recipe))


def build_plain(recipe: Recipe, device: torch.device = CPU) -> PlainPonder:
    """Builds the plain PonderLM with the weights of our method ``ponder``; both models compute the same function."""
    ours = build_ours(recipe, PLAIN, device)
    config = ours.config
    shape = {"iterations": config.iterations, "scale": config.table_scale, "first": config.input_scale}
    with device:
        plain = PlainPonder(config.backbone_config, **shape).to(ours.dtype)
    plain.stock.load_state_dict(ours.backbone.state_dict())
    return plain.train()


def config_of(recipe: Recipe, method: str) -> AdaPonderConfig:
    """Returns the config of the recipe's model without allocating weights."""
    return build_ours(recipe, method, torch.device("meta")).config


def batches(recipe: Recipe, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Cycles through four random batches of (tokens, targets), so that no step finds its data in a cache."""
    generator, shape = torch.Generator().manual_seed(recipe.train.seed), (batch, recipe.data.sequence + 1)
    tokens = [torch.randint(vocabulary_of(recipe), shape, generator=generator).to(device) for _ in range(4)]
    return itertools.cycle([(row[:, :-1], row[:, 1:]) for row in tokens])


# Masks of a batch: documents of 512 tokens on average, or padding of up to a quarter of each sequence.
DOCUMENTS, PADDING = "packed documents", "left padding"


def mask_inputs(kind: str, recipe: Recipe, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Returns document ids or an attention mask as an argument of a forward; {} if ``kind`` is empty."""
    if not kind:
        return {}
    generator, time = torch.Generator().manual_seed(recipe.train.seed), recipe.data.sequence
    if kind == DOCUMENTS:
        starts = torch.rand(batch, time, generator=generator) < 1 / 512
        return {"document_ids": starts.cumsum(1).to(device)}
    padding = torch.randint(1 + time // 4, (batch, 1), generator=generator)
    return {"attention_mask": (torch.arange(time) >= padding).long().to(device)}


def choose_depths(keep: Sequence[float], recipe: Recipe, batch: int) -> Tensor:
    """Returns random depths for ``--keep`` (the share of tokens that each iteration computes); raises if invalid."""
    text, iterations = "--keep " + ",".join(f"{share:g}" for share in keep), config_of(recipe, METHOD).iterations
    if len(keep) != iterations:
        raise InputError(f"{text} must have {iterations} shares, one per iteration of the recipe")
    if keep[0] != 1 or any(not 0 <= later <= earlier for earlier, later in pairwise(keep)):
        raise InputError(f"{text} must begin with 1, since the first iteration reads every token, and must not rise")
    return depths_of(keep, batch, recipe.data.sequence, seed=recipe.train.seed)


def depths_of(keep: Sequence[float], batch: int, sequence: int, *, seed: int) -> Tensor:
    """Returns random depths, ``int64[batch, sequence]``; iteration i computes a share ``keep[i]`` of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(batch, sequence, generator=generator).argsort(dim=1).argsort(dim=1)
    return sum(((rank < round(share * sequence)).long() for share in keep), torch.zeros_like(rank))


@torch.no_grad()
def check_executions(recipe: Recipe, depths: Tensor, device: torch.device) -> float:
    """Returns the relative difference of dense and compact execution; raises if rounding does not explain it."""
    console.print("comparing dense and compact execution …")
    forget(device)
    ids, _ = next(batches(recipe, depths.shape[0], device))
    model = build_ours(recipe, METHOD, device).eval()
    policy = ForcedDepths(depths.to(device))
    states: list[Tensor] = []
    for execution in ("compact", "dense"):
        iterations: list[Iteration] = []
        options: dict[str, Any] = {"execution": execution, "policy": policy, "on_iteration": iterations.append}
        with autocast(recipe.train.dtype, device):
            output = model(ids, **options, logits_to_keep=1, output_gates=False)
        if not torch.equal(output.depth.cpu(), depths):
            raise EvaluationError(f"{execution} execution did not use the forced depths: nothing is timed")
        states.append(iterations[-1].hidden)
    error, bound = relative_difference(*states), rounding_bound(product_dtype(recipe.train.dtype, device))
    if not error <= bound:
        difference = f"dense and compact hidden states differ by {error:.1e} (rounding explains {bound:.1e})"
        raise EvaluationError(f"{difference}: nothing is timed")
    return error


ITERATIONS = 4


def _backbone(hidden: int, layers: int, heads: int, inner: int, **family: Any) -> dict[str, Any]:
    """Returns a backbone's config; GPT-NeoX unless ``family`` says otherwise."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    common = {"model_type": "gpt_neox", "vocab_size": 50304, "max_position_embeddings": 4096}
    return common | sizes | {"intermediate_size": inner} | family


def _ouro(*sizes: int, **family: int) -> dict[str, Any]:
    """Returns the backbone config to which the config of a published Ouro checkpoint of these sizes is translated."""
    published = {"model_type": "ouro", "vocab_size": 49152, "max_position_embeddings": 65536, "rope_theta": 1e6}
    config = translated_config("Ouro", _backbone(*sizes, **published | family), LAYOUTS["ouro"])
    return {"model_type": LAYOUTS["ouro"].family} | {name: value for name, value in config.items() if value is not None}


# The method and the backbone of each shape.
SHAPES = {
    "70m": ("adaponder", _backbone(512, 6, 8, 2048)),
    "410m": ("adaponder", _backbone(1024, 24, 16, 4096)),
    "ouro-1.4b": ("ouro", _ouro(2048, 24, 16, 5632)),
    "ouro-tiny": ("ouro", _ouro(16, 2, 2, 24, vocab_size=61, max_position_embeddings=512)),
    "tiny": ("adaponder", _backbone(16, 2, 2, 24, vocab_size=61, max_position_embeddings=512)),
}


def shape_config(name: str, *, vanilla: bool = False, **sizes: int) -> AdaPonderConfig:
    """Returns the config of a shape with its method, or the plain decoder's; ``sizes`` change the backbone's config."""
    method, backbone = SHAPES[name]
    method = "vanilla" if vanilla else method
    return AdaPonderConfig(backbone_config=backbone | sizes, method=method, iterations=ITERATIONS)


def build(config: AdaPonderConfig, *, device: torch.device, dtype: torch.dtype, seed: int, stock: bool = False) -> Any:
    """Builds our model with random weights; if ``stock``, Hugging Face's decoder of the same shape instead."""
    torch.manual_seed(seed)
    with device:
        if stock:
            return AutoModelForCausalLM.from_config(config.backbone_config, dtype=dtype).eval()
        return nn.Module.to(AdaPonderForCausalLM(config), dtype).eval()


# Shares of tokens with depth 1, 2, 3, 4, by mean depth. Between 2 and 3, at 2.5, is the uniform prior of Ouro's exits.
SHARES = {
    4.0: (0.0, 0.0, 0.0, 1.0),
    3.7: (0.0, 0.1, 0.1, 0.8),
    3.0: (0.1, 0.2, 0.3, 0.4),
    2.0: (0.4, 0.3, 0.2, 0.1),
    1.0: (1.0, 0.0, 0.0, 0.0),
}


def shares_of(mean: float) -> tuple[float, ...]:
    """Returns shares of depths 1 … 4 with the mean depth ``mean``, interpolated between entries of :data:`SHARES`."""
    means = sorted(SHARES)
    by_depth = np.array([SHARES[key] for key in means]).T
    return tuple(float(np.interp(mean, means, shares)) for shares in by_depth)


def mean_depth(shares: Sequence[float]) -> float:
    """Returns the mean depth; ``shares[d - 1]`` is the share of depth d."""
    return sum(depth * share for depth, share in enumerate(shares, start=1))


def draw_depths(shares: Sequence[float], count: int, *, seed: int) -> list[int]:
    """Returns ``count`` depths in random order; the share of each depth is exact up to rounding."""
    keep = [sum(shares[depth:]) for depth in range(len(shares))]
    return depths_of(keep, 1, count, seed=seed)[0].tolist()
