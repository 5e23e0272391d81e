"""Counts a decoder's multiply-adds per row, K/V elements and parameters without allocating weights."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adaponder.backbones.families import layer_windows
from adaponder.errors import BackboneError


@dataclass(frozen=True)
class Shape:
    """Counts of a decoder's multiply-adds per row, of K/V elements and of parameters; built by :func:`shape_of`.

    Attributes:
        parameters: number of parameters of the stock model, tied ones counted once.
        body: multiply-adds of one row in the matrices of all layers, without embedding and head.
        expansion: multiply-adds per key slot to expand cached rows in each pass; 0 unless attention is latent (MLA).
        attention: per layer, multiply-adds of one query with one key: heads x (key size + value size).
        windows: per layer, the maximum number of tokens that a query attends to; ``None``: no limit.
        kv: elements of keys and values of one row, summed over layers.
    """

    hidden: int
    vocabulary: int
    parameters: int
    body: int
    expansion: int
    attention: tuple[int, ...]
    windows: tuple[int | None, ...]
    kv: int

    @property
    def layers(self) -> int:
        return len(self.attention)


_SHAPES: dict[tuple[type, str], Shape] = {}


@torch.no_grad()
def shape_of(source: PreTrainedModel | PreTrainedConfig) -> Shape:
    """Returns the shape of a decoder, measured on a copy on the meta device, which needs no memory.

    ``source`` is a decoder, stock or wrapped, or its config. Raises if the number of multiply-adds depends on more than
    the number of rows. Shapes are cached by config, because a measurement takes up to a second.
    """
    # A wrapped decoder's text config is its backbone's.
    config = (source if isinstance(source, PreTrainedConfig) else source.config).get_text_config()
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _SHAPES:
        _SHAPES[key] = _count(config)
    return _SHAPES[key]


def _count(config: PreTrainedConfig) -> Shape:
    twin = meta_twin(config)
    _refuse_uncounted(twin)
    rows, cache = _watch(twin)
    cached = [(x.keys, x.values) for x in cache.layers if x.keys is not None and x.values is not None]
    if len(cached) != config.num_hidden_layers:
        raise _uncountable(config, f"{len(cached)} of its {config.num_hidden_layers} layers keep keys and values")
    return Shape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        parameters=sum(parameter.numel() for parameter in twin.parameters()),
        body=sum(linear.weight.numel() for linear, count in rows.items() if count == 1),
        expansion=sum(linear.weight.numel() for linear, count in rows.items() if count == 2),
        attention=tuple(_pair(config, keys, values) for keys, values in cached),
        windows=tuple(layer_windows(config)),
        kv=sum(rows.shape[1] * rows.shape[3] for keys_values in cached for rows in keys_values),
    )


def meta_twin(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a decoder with this config on the meta device, where nothing is allocated."""
    with torch.device("meta"):
        # Other attention implementations may refuse the meta device; shapes are the same.
        settings: dict[str, Any] = {"attn_implementation": "eager", "trust_remote_code": False}
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **settings)


def _refuse_uncounted(twin: PreTrainedModel) -> None:
    """Raises if there are matrices outside linear layers, such as experts and convolutions."""
    for owner, module in twin.base_model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                raise _uncountable(
                    twin.config,
                    f"{owner}.{name} {tuple(parameter.shape)} is multiplied outside a linear layer, "
                    "and how often depends on more than the number of rows",
                )


def _watch(twin: PreTrainedModel) -> tuple[Counter[nn.Module], DynamicCache]:
    """Decodes two tokens; returns how many rows each linear layer computed for the second token, and the cache.

    The count is 1 (the new token's row), or 2 if the layer also expands the cached row.
    """
    rows: Counter[nn.Module] = Counter()

    def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows[module] += args[0].shape[:-1].numel()

    linears = {}
    for name, module in twin.base_model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.register_forward_pre_hook(count)
            linears[name] = module
        # Dynamic rotary angles compare lengths, which the meta device cannot; shapes stay the same.
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"  # type: ignore[assignment]
    cache = DynamicCache()
    token = torch.empty(1, 1, twin.config.hidden_size, dtype=twin.dtype, device="meta")
    for cached_tokens in (1, 2):
        rows.clear()
        try:
            twin.base_model(inputs_embeds=token, past_key_values=cache, use_cache=True)
        except RuntimeError as error:
            raise _uncountable(twin.config, f"its work depends on more than shapes ({error})") from error
        for name, linear in linears.items():
            if rows[linear] not in (1, cached_tokens):
                raise _uncountable(twin.config, f"{name} computed {rows[linear]} rows for one token")
    return rows, cache


def _pair(config: PreTrainedConfig, keys: Tensor, values: Tensor) -> int:
    """Returns a layer's multiply-adds for one query with one key and its value, over all heads."""
    # Latent attention caches compressed rows; the config has the sizes that it attends with.
    key_size = getattr(config, "qk_head_dim", None) or keys.shape[3]
    value_size = getattr(config, "v_head_dim", None) or values.shape[3]
    return config.num_attention_heads * (key_size + value_size)


def _uncountable(config: PreTrainedConfig, reason: str) -> BackboneError:
    return BackboneError(f"the FLOPs of {config.model_type} cannot be counted: {reason}")
