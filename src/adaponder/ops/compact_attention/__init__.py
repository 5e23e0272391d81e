"""Attention in which only some tokens ask: what a pass over active rows needs."""

from torch import Tensor

from adaponder.ops.compact_attention import torch as reference
from adaponder.ops.compact_attention.torch import Rows
from adaponder.ops.fused import runs_fused

__all__ = ["Rows", "compact_attention"]


def compact_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The torch version, or its Triton kernel where it runs and fits."""
    if runs_fused(query) and query.dtype.itemsize == 2:
        from adaponder.ops.compact_attention import triton as fused

        if fused.fits(query, keys, values, rows, window=window, dropout=dropout):
            return fused.compact_attention(query, keys, values, rows, scale=scale)
    return reference.compact_attention(query, keys, values, rows, window=window, scale=scale, dropout=dropout)
