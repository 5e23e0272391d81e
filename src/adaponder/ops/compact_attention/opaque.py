"""Wraps the operation for torch.compile: one call with results of known shape, forward and backward, never traced.

It knows no windows, packed documents or dropout; passes with those are not compiled.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from adaponder.ops.compact_attention import torch as reference
from adaponder.ops.compact_attention.torch import PackedRows
from adaponder.ops.dispatch import runs_fused
from adaponder.ops.masks import Places


def kernels_for(
    query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, *, window: int | None, dropout: float = 0.0
) -> ModuleType | None:
    """Returns the module of the Triton version where it runs and fits, else ``None``."""
    if not runs_fused(query) or query.dtype.itemsize != 2:
        return None
    from adaponder.ops.compact_attention import triton

    return triton if triton.fits(query, keys, values, rows, window=window, dropout=dropout) else None


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
    """Equals :func:`adaponder.ops.compact_attention.torch.compact_attention` of plain rows."""
    if dropout or window is not None or rows.query.document is not None:
        raise ValueError(f"dropout={dropout}, window={window}, or packed documents: a compiled pass knows none of them")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _mix(query, keys, values, rows.sequence, rows.query.slot, rows.key.slot, rows.key.present, scale)[0]


def _rows(sequence: Tensor, asking: Tensor, answering: Tensor, present: Tensor | None) -> PackedRows:
    # Order is what windows count by.
    return PackedRows(sequence, Places(asking, asking), Places(answering, answering, present=present))


@torch.library.custom_op("adaponder::compact_attention", mutates_args=())
def _mix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sequence: Tensor,
    asking: Tensor,
    answering: Tensor,
    present: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(result, what the kernels normalised by)."""
    rows = _rows(sequence, asking, answering, present)
    if kernels := kernels_for(query, keys, values, rows, window=None):
        return kernels.mix(query, keys, values, rows, scale)
    mixed = reference.compact_attention(query, keys, values, rows, scale=scale)
    return mixed.contiguous(), query.new_zeros(query.shape[:2], dtype=torch.float32)


@_mix.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    count, heads, _ = query.shape
    return query.new_empty(count, heads, values.shape[-1]), query.new_empty(count, heads, dtype=torch.float32)


@torch.library.custom_op("adaponder::compact_attention_slopes", mutates_args=())
def _slopes(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    normaliser: Tensor,
    sequence: Tensor,
    asking: Tensor,
    answering: Tensor,
    present: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(sequence, asking, answering, present)
    if kernels := kernels_for(query, keys, values, rows, window=None):
        return kernels.slopes(grad, query, keys, values, mixed, normaliser, rows, scale)
    return reference.slopes(grad, query, keys, values, rows, scale=scale)


@_slopes.register_fake
def _(grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, values, *where, scale = inputs
    ctx.save_for_backward(query, keys, values, *output, *where)
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_slopes(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None, None, None)


_mix.register_autograd(_backward, setup_context=_remember)
