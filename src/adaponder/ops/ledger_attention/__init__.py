"""Computes attention for rows at any iteration, through an index into pools of keys and values.

Computes ``softmax(q K^T * scale) V``, where the index ``[lanes, iterations, slots]`` holds the pool row that a query
reads for each slot; nothing is copied. A pass has single-query rows (decode: one query per lane), then cohorts, which
are consecutive rows that share lane and iteration (prefill). ``enter`` splits the QKV product of new rows, applies norm
and rotary embedding, and writes keys and values into the pools. ``decode_attention`` is ``enter`` and the attention of
single-query rows in one kernel. For cohorts, a pass calls ``enter``, then ``ledger_attention`` with ``num_single=0``.

``torch.py`` supports every case. The kernels (``kernels.py``, launched by ``triton.py``) need CUDA, pools in bf16 or
fp16, and keys and values of equal size, at most 128.
"""

from torch import Tensor

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.ledger_attention import torch as plain
from adaponder.ops.ledger_attention.torch import Angles, Cohort, LedgerRows, Projection, Scratch, Tiles, scratch_for

__all__ = ["Angles", "Cohort", "LedgerRows", "Projection", "Scratch", "Tiles"]
__all__ += ["by_kernels", "decode_attention", "enter", "ledger_attention", "scratch_for"]

_LARGEST = 128  # head size


def by_kernels(keys: Tensor, values: Tensor) -> bool:
    """Returns whether kernels run on these pools: CUDA, bf16 or fp16, equal shapes, contiguous heads of at most 128."""
    fits = keys.shape[-1] <= _LARGEST and keys.shape == values.shape and _packed(keys) and _packed(values)
    return fits and runs_fused(keys) and keys.dtype.itemsize == 2


def _packed(x: Tensor) -> bool:
    return x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]


def _enters(qkv: Tensor, keys: Tensor, values: Tensor, *rest: object, **options: object) -> bool:
    return by_kernels(keys, values) and qkv.stride(-1) == 1


def _decodes(qkv: Tensor, keys: Tensor, values: Tensor, rows: LedgerRows, *rest: object, **options: object) -> bool:
    return _enters(qkv, keys, values) and rows.index.stride(-1) == 1


def _fits(query: Tensor, keys: Tensor, values: Tensor, rows: LedgerRows, **options: object) -> bool:
    return _decodes(query, keys, values, rows) and _packed(query) and query.dtype == keys.dtype


ledger_attention = dispatch(plain.ledger_attention, when=_fits)
enter = dispatch(plain.enter, when=_enters)
decode_attention = dispatch(plain.decode_attention, when=_decodes)
