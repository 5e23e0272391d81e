"""Computes attention in which only some tokens of each sequence are queries: a pass over active rows.

``softmax(q K^T * scale) V`` with ``q [n, heads, size]`` packed over all sequences, each row with its sequence and
slot, and ``K, V [sequences, key heads, slots, size]``. A row sees the slots up to its own, without absent ones
(padding; a halted token of mor), and always itself.

``torch.py`` calls torch's attention for each sequence with an explicit mask, for every case. ``triton.py`` has three
kernels (CUDA with 160 KiB of shared memory, bf16 and fp16, head size up to 128, causal, grouped heads): forward, a
program owns 128 rows and a head and walks the keys with an online softmax; backward, the same walk gives ``dq``, and
a program that owns 64 keys gives ``dK`` and ``dV``. No mask is in memory, no work goes beyond the last slot.
``opaque.py`` is what a compiled pass calls.
"""

from torch import Tensor
from torch.compiler import is_compiling

from adaponder.ops.compact_attention import opaque
from adaponder.ops.compact_attention import torch as reference
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
    """Computes the torch version, or its Triton kernels where they run and fit; while compiling, one opaque call."""
    if is_compiling():
        return opaque.compact_attention(query, keys, values, rows, window=window, scale=scale, dropout=dropout)
    if kernels := opaque.kernels_for(query, keys, values, rows, window=window, dropout=dropout):
        return kernels.compact_attention(query, keys, values, rows, scale=scale)
    return reference.compact_attention(query, keys, values, rows, window=window, scale=scale, dropout=dropout)
