"""What an engine may be opened with, and what it takes where nothing is said."""

from __future__ import annotations

import gc

import torch

from adaponder.backbones.families import read_whole, rope_types
from adaponder.errors import BackboneError, InputError, shown
from adaponder.inference.request import Request, forced_depths
from adaponder.modeling import AdaPonderForCausalLM

# Rows of a page.
PAGE = 16


def refuse(model: AdaPonderForCausalLM) -> None:
    """Raises where an engine cannot compute what the model computes."""
    reuse, family = model.method.reuse(), model.config.backbone_config.model_type
    if reuse in ("kv", "none"):
        raise InputError(
            f"reuse={reuse!r}: a halted token's hidden state moves on, so its rows cannot be skipped; only models with "
            "reuse='state' can be decoded by an engine (model.generate can do this one)"
        )
    if read_whole(model.config.backbone_config):
        raise BackboneError(
            f"{family} can be read only whole, without a cache; an engine cannot decode it (model.generate with "
            "use_cache=False can)"
        )
    if "dynamic" in rope_types(model.config.backbone_config):
        raise BackboneError(
            f"{family}: rope_type='dynamic' turns all rotary angles by the longest text of a batch, so what one "
            "request says would depend on others; an engine cannot decode it (model.generate can)"
        )
    if model.training:
        raise InputError("model: it is in training mode; call model.eval() first")


def check_options(**numbers: int | None) -> None:
    """Raises at an option that is no whole number of at least 1; ``None`` leaves it open."""
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name}={shown(value)}: a whole number of at least 1 is needed")


def check_top_k(model: AdaPonderForCausalLM, top_k: int) -> None:
    """Raises where the expected embedding cannot be that of the ``top_k`` likeliest tokens."""
    if not model.method.mixes_vocabulary:
        raise InputError(f"expectation_top_k={top_k}: {model.config.method} mixes no embeddings")
    if top_k > model.config.vocab_size:
        raise InputError(f"expectation_top_k={top_k}: from 1 to {model.config.vocab_size}, the vocabulary")


def longest(model: AdaPonderForCausalLM, tokens: int | None) -> int:
    """The longest sequence: ``tokens``, or where that is left open as far as positions reach."""
    limit = model.config.max_position_embeddings
    if tokens is None:
        return limit or 4096
    if tokens < 2 or (limit is not None and tokens > limit):
        raise InputError(f"tokens={tokens}: from 2 to {limit}, as far as the backbone's positions reach")
    return tokens


def rows_that_fit(model: AdaPonderForCausalLM, numbers: int, most: int) -> int:
    """As many rows as the lanes can use, as far as memory goes: nine tenths of a GPU's free memory, or 1 GiB."""
    free = 1 << 30
    if model.device.type == "cuda":
        gc.collect()  # an engine that was let go holds its pools until then
        torch.cuda.empty_cache()
        free = int(0.9 * torch.cuda.mem_get_info(model.device)[0])
    return min(most, max(4 * PAGE, free // (numbers * model.dtype.itemsize)))


def mean_depth(request: Request, iterations: int) -> float | None:
    """The mean depth that a request forces; ``None`` where it leaves some slots open."""
    depths, total = forced_depths(request), len(request.prompt) + request.max_new_tokens - 1
    if any(place not in depths for place in range(total)):
        return None
    return sum(min(depths[place], iterations) for place in range(total)) / total


def eos_ids(model: AdaPonderForCausalLM) -> frozenset[int]:
    """The token ids at which the model's texts end."""
    end = model.generation_config.eos_token_id
    return frozenset(() if end is None else (int(one) for one in (end if isinstance(end, (list, tuple)) else [end])))
