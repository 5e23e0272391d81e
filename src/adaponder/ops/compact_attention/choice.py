"""Which version computes it."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from adaponder.ops.compact_attention.torch import PackedRows
from adaponder.ops.fused import runs_fused


def kernels_for(
    query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, *, window: int | None, dropout: float = 0.0
) -> ModuleType | None:
    """The Triton version where it runs and fits; ``None`` leaves it to torch."""
    if not runs_fused(query) or query.dtype.itemsize != 2:
        return None
    from adaponder.ops.compact_attention import triton

    return triton if triton.fits(query, keys, values, rows, window=window, dropout=dropout) else None
