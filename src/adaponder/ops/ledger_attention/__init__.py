"""Computes attention of rows at any iteration, through an index into pools of keys and values.

``softmax(q K^T * scale) V``, where the index ``[lanes, iterations, slots]`` holds the pool row that a query reads for
each slot. A pass has single-query rows (decode, ``alone`` in names) and cohorts: runs of rows that share lane and
iteration (prefill). ``enter`` applies norm and rotary position to new rows of the QKV product and writes keys and
values into the pools; ``decode_attention`` is ``enter`` and attention of single-query rows in one kernel. A pass with
both kinds calls ``decode_attention``, ``enter`` for the cohorts, then ``ledger_attention`` with ``alone=0``.

``torch.py`` supports every case. The kernels (``kernels.py``, launched by ``triton.py``) need CUDA, pools in bf16 or
fp16, and one size of keys and values up to 128.
"""

from torch import Tensor

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.ledger_attention import torch as plain
from adaponder.ops.ledger_attention.torch import Cohort, LedgerRows, Projection, Scratch, Tiles, Turn, scratch_for

__all__ = ["Cohort", "LedgerRows", "Projection", "Scratch", "Tiles", "Turn"]
__all__ += ["by_kernels", "decode_attention", "enter", "ledger_attention", "scratch_for"]

_LARGEST = 128  # head size


def by_kernels(keys: Tensor, values: Tensor) -> bool:
    """Returns whether the kernels support these pools: on CUDA, in bf16 or fp16, heads of a row contiguous."""
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
