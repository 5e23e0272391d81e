"""The operation as a compiler sees it: one call with results of known shape, forward and backward, not looked into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adaponder.masks import Places
from adaponder.ops.compact_attention import torch as reference
from adaponder.ops.compact_attention.choice import kernels_for
from adaponder.ops.compact_attention.torch import Rows


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
    """Equals :func:`adaponder.ops.compact_attention.torch.compact_attention`; without dropout."""
    if dropout:
        raise ValueError(f"dropout={dropout}: backward could not draw the same weights again")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    asks, answers = rows.query, rows.key
    where = [rows.sequence, asks.slot, asks.order, answers.slot, answers.order]
    return _mix(query, keys, values, where, asks.document, answers.document, answers.present, window, scale)[0]


@torch.library.custom_op("adaponder::compact_attention", mutates_args=())
def _mix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    where: list[Tensor],
    asking: Tensor | None,
    answering: Tensor | None,
    present: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(result, what the kernels normalised by)."""
    rows = _rows(where, asking, answering, present)
    if kernels := kernels_for(query, keys, values, rows, window=window):
        return kernels.mix(query, keys, values, rows, scale)
    mixed = reference.compact_attention(query, keys, values, rows, window=window, scale=scale)
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
    where: list[Tensor],
    asking: Tensor | None,
    answering: Tensor | None,
    present: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(where, asking, answering, present)
    if kernels := kernels_for(query, keys, values, rows, window=window):
        return kernels.slopes(grad, query, keys, values, mixed, normaliser, rows, scale)
    return reference.slopes(grad, query, keys, values, rows, window=window, scale=scale)


@_slopes.register_fake
def _(grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, values, where, asking, answering, present, window, scale = inputs
    ctx.save_for_backward(query, keys, values, *output, *where, asking, answering, present)
    ctx.window, ctx.scale = window, scale


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, keys, values, mixed, normaliser, *where, asking, answering, present = ctx.saved_tensors
    given = (query, keys, values, mixed, normaliser, where, asking, answering, present, ctx.window, ctx.scale)
    return (*_slopes(grad.contiguous(), *given), [None] * len(where), None, None, None, None, None)


_mix.register_autograd(_backward, setup_context=_remember)


def _rows(where: list[Tensor], asking: Tensor | None, answering: Tensor | None, present: Tensor | None) -> Rows:
    sequence, query_slot, query_order, key_slot, key_order = where
    return Rows(sequence, Places(query_slot, query_order, asking), Places(key_slot, key_order, answering, present))
