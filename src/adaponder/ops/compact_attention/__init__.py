"""Attention in which only some tokens ask: what a pass over active rows needs."""

from torch import Tensor
from torch.compiler import is_compiling

from adaponder.ops.compact_attention import opaque
from adaponder.ops.compact_attention import torch as reference
from adaponder.ops.compact_attention.choice import kernels_for
from adaponder.ops.compact_attention.torch import PackedRows

__all__ = ["PackedRows", "compact_attention"]


def compact_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PackedRows,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The torch version, or its Triton kernels where they run and fit; while compiling, one opaque call of either."""
    if is_compiling():
        return opaque.compact_attention(query, keys, values, rows, window=window, scale=scale, dropout=dropout)
    if kernels := kernels_for(query, keys, values, rows, window=window, dropout=dropout):
        return kernels.compact_attention(query, keys, values, rows, scale=scale)
    return reference.compact_attention(query, keys, values, rows, window=window, scale=scale, dropout=dropout)
