"""Attention as a compiled pass wants it: torch's own, told that it is causal, on rows laid out as they are used.

Hugging Face looks this up by name (``attn_implementation="adaponder"``); it computes what ``sdpa`` computes. Two things
are different. A plain causal pass is given no mask while compiling either: with one, attention does twice the work.
And the queries are laid out token by token, so that the result is too, and need not be copied to be multiplied on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "adaponder"


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any):
    if torch.compiler.is_compiling():
        # Under autocast rotary angles have widened the queries; attention would narrow them anyway.
        query = query.to(value.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """No mask where the pass is plain and causal, ``sdpa``'s elsewhere."""
    whole = q_length == kv_length and (local_size is None or kv_length < local_size)
    if attention_mask is None and allow_is_causal_skip and whole:
        return None
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def use(stock: PreTrainedModel) -> None:
    """Gives a decoder that attends by ``sdpa`` this attention; any other keeps its own."""
    if stock.config._attn_implementation == "sdpa":
        stock.set_attn_implementation(NAME)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
