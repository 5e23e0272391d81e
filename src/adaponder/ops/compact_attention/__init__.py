"""Computes attention in a pass over active rows: only some tokens of each sequence are queries.

Computes ``softmax(q K^T * scale) V``, where ``q [n, heads, size]`` packs the queries of all sequences and ``K, V`` are
``[sequences, key heads, slots, size]``. A query attends to its own slot and to all present earlier slots of its
sequence; padding and halted tokens of ``mor`` are not present.

``torch.py`` calls torch's attention for each sequence with an explicit mask and supports every case. ``triton.py`` has
three kernels (CUDA with 160 KiB of shared memory, bf16 and fp16, head size up to 128, causal, grouped heads, packed
documents), which store no mask and read no key after the last visible slot. A compiled pass calls a custom op, which
takes no windows or dropout; passes that need those are not compiled.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, float32
from torch.compiler import is_compiling
from torch.library import custom_op

from adaponder.ops.compact_attention import torch as reference
from adaponder.ops.compact_attention.torch import PackedRows
from adaponder.ops.dispatch import runs_fused
from adaponder.ops.masks import Places

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
    """Computes attention of packed queries by Triton kernels if they support the arguments, else by torch.

    See ``compact_attention`` in torch.py for the arguments. While compiling, it calls a custom op, and raises for
    dropout, windows, and documents without spans.
    """
    true_scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_compiling():
        if dropout or window is not None or (rows.query.document is not None and rows.key.spans is None):
            raise ValueError(
                f"dropout={dropout}, window={window} or documents without spans cannot be part of a compiled pass"
            )
        places = rows.sequence, rows.query.slot, rows.key.slot, rows.key.present, rows.key.spans
        return _mix(query, keys, values, *places, true_scale)[0]
    if kernels := _kernels_for(query, keys, values, rows, window=window, dropout=dropout):
        return kernels.compact_attention(query, keys, values, rows, true_scale)
    return reference.compact_attention(query, keys, values, rows, window=window, scale=scale, dropout=dropout)


def _kernels_for(
    query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, *, window: int | None = None, dropout: float = 0.0
) -> ModuleType | None:
    """Returns the module of Triton kernels if they support these arguments, else ``None``."""
    if not runs_fused(query) or query.dtype.itemsize != 2:
        return None
    from adaponder.ops.compact_attention import triton

    return triton if triton.fits(query, keys, values, rows, window=window, dropout=dropout) else None


def _rows(sequence: Tensor, query_slot: Tensor, key_slot: Tensor, *masks: Tensor | None) -> PackedRows:
    present, spans = masks
    document, query_document = (None, None) if spans is None else (spans[0], spans[0][sequence, query_slot])
    # Only windows read the order, and there are none here, so slots are passed as the order.
    key = Places(key_slot, key_slot, document, present, spans)
    return PackedRows(sequence, Places(query_slot, query_slot, query_document), key)


@custom_op("adaponder::compact_attention", mutates_args=())
def _mix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sequence: Tensor,
    query_slot: Tensor,
    key_slot: Tensor,
    present: Tensor | None,
    spans: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the attention output and the softmax's base-2 log-normaliser (zeros if torch computed the output)."""
    rows = _rows(sequence, query_slot, key_slot, present, spans)
    if kernels := _kernels_for(query, keys, values, rows):
        return kernels.mix(query, keys, values, rows, scale)
    mixed = reference.compact_attention(query, keys, values, rows, scale=scale)
    return mixed.contiguous(), query.new_zeros(query.shape[:2], dtype=float32)


@_mix.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    count, heads, _ = query.shape
    return query.new_empty(count, heads, values.shape[-1]), query.new_empty(count, heads, dtype=float32)


@custom_op("adaponder::compact_attention_gradients", mutates_args=())
def _gradients(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    normaliser: Tensor,
    sequence: Tensor,
    query_slot: Tensor,
    key_slot: Tensor,
    present: Tensor | None,
    spans: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(sequence, query_slot, key_slot, present, spans)
    if kernels := _kernels_for(query, keys, values, rows):
        return kernels.gradients(grad, query, keys, values, mixed, normaliser, rows, scale)
    return reference.gradients(grad, query, keys, values, rows, scale=scale)


@_gradients.register_fake
def _(grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, values, *slots, scale = inputs
    ctx.save_for_backward(query, keys, values, *output, *slots)
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_gradients(grad.contiguous(), *ctx.saved_tensors, ctx.scale), *[None] * 6)


_mix.register_autograd(_backward, setup_context=_remember)
