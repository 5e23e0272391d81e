"""Helpers for cross-entropy and vocabulary expectation; both compute the logits of one chunk of tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from adaponder.ops.dispatch import compute_dtype

# Elements of tokens x vocabulary that the torch versions hold at once: 2^25 float32 values are 128 MiB.
CHUNK_ELEMENTS = 1 << 25


def as_rows(hidden: Tensor, weight: Tensor, chunk: int | None, elements: int | None) -> tuple[Tensor, int]:
    """Returns (hidden states as rows ``[n, d]`` in the compute precision, rows per chunk).

    A given ``chunk`` is the rows per chunk; with ``None``, a chunk has at most ``elements`` logits. Raises if ``chunk``
    is below 1.
    """
    rows = hidden.reshape(-1, hidden.shape[-1]).to(compute_dtype(hidden))
    if chunk is None:
        return rows, rows_per_chunk(rows.shape[0], weight.shape[0], elements or CHUNK_ELEMENTS)
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    return rows, chunk


def rows_per_chunk(rows: int, vocabulary: int, elements: int) -> int:
    """Returns the number of rows per chunk for about equal chunks of at most ``elements`` logits.

    It is a multiple of 128 if possible.
    """
    limit = max(1, elements // vocabulary)
    if rows <= limit or limit < 128:
        return limit
    even = -(-rows // -(-rows // limit))
    return min(limit, -(-even // 128) * 128)


def narrowed(dtype: torch.dtype, *parameters: Tensor | None) -> list[Tensor]:
    """Converts each parameter to ``dtype``, in which matrix products are computed; ``None`` stays ``None``."""
    return [None if parameter is None else parameter.to(dtype) for parameter in parameters]  # type: ignore[misc]


def sums_of(needs_grad: tuple[bool, ...], dtype: torch.dtype, *inputs: Tensor | None) -> list[Tensor | None]:
    """Returns for each input a zero tensor, to which chunks add the input's gradient, or ``None`` if it needs none.

    ``dtype`` must be at least float32, because bf16 would lose small summands.
    """
    pairs = zip(inputs, needs_grad, strict=True)
    return [torch.zeros_like(x, dtype=dtype) if x is not None and needed else None for x, needed in pairs]


def add_gradients(weight: Tensor | None, bias: Tensor | None, grad_logits: Tensor, rows: Tensor) -> None:
    """Adds a chunk's gradients to the sums ``weight`` and ``bias`` in place, given ``grad_logits = dL / d logits``."""
    if weight is not None:
        add_product_(weight, grad_logits.t(), rows)
    if bias is not None:
        bias += grad_logits.sum(0, dtype=bias.dtype)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left @ right`` to ``total`` in place; on CUDA the product is never rounded to the inputs' precision."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
