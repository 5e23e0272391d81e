"""Helpers of the loss and the expectation, which compute tokens x vocabulary a chunk of tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from adaponder.ops.dispatch import compute_dtype

# Elements of tokens x vocabulary that the torch versions hold at once: 2^25 float32 values are 128 MiB.
CHUNK_ELEMENTS = 1 << 25


def as_rows(hidden: Tensor, weight: Tensor, chunk: int | None, elements: int | None) -> tuple[Tensor, int]:
    """Returns the hidden states as rows ``[n, d]`` in the compute precision, and the number of rows in a chunk."""
    rows = hidden.reshape(-1, hidden.shape[-1]).to(compute_dtype(hidden))
    if chunk is None:
        return rows, rows_per_chunk(rows.shape[0], weight.shape[0], elements or CHUNK_ELEMENTS)
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    return rows, chunk


def rows_per_chunk(rows: int, vocabulary: int, elements: int) -> int:
    """Returns the rows per chunk: even chunks of at most ``elements`` logits, multiples of 128 rows if possible."""
    most = max(1, elements // vocabulary)
    if rows <= most or most < 128:
        return most
    even = -(-rows // -(-rows // most))
    return min(most, -(-even // 128) * 128)


def narrowed(dtype: torch.dtype, *parameters: Tensor | None) -> list[Tensor]:
    """Converts parameters to the precision of the products; ``None`` stays ``None``."""
    return [None if parameter is None else parameter.to(dtype) for parameter in parameters]  # type: ignore[misc]


def sums_of(needed: tuple[bool, ...], dtype: torch.dtype, *inputs: Tensor | None) -> list[Tensor | None]:
    """Returns zeros for the gradient of each input that needs one, else ``None``.

    Gradients are summed over chunks in the wide ``dtype``: bf16 would lose small summands.
    """
    pairs = zip(inputs, needed, strict=True)
    return [torch.zeros_like(x, dtype=dtype) if x is not None and wanted else None for x, wanted in pairs]


def add_slopes(weight: Tensor | None, bias: Tensor | None, slope: Tensor, rows: Tensor) -> None:
    """Adds a chunk's share to the gradients of weight and bias, given ``slope = d logits``; skips ``None``."""
    if weight is not None:
        add_product_(weight, slope.t(), rows)
    if bias is not None:
        bias += slope.sum(0, dtype=bias.dtype)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left @ right`` to ``total``; on CUDA the product is accumulated in ``total``'s wider precision."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
