"""Computes attention of rows at any iteration, through an index into pools of keys and values.

``softmax(q K^T * scale) V`` where the index ``[lanes, iterations, slots] -> row`` names the pool rows that a query
reads; nothing is copied. ``enter`` takes the QKV product of new rows, turns it by position and writes keys and values
into the pools; ``decode_attention`` is ``enter`` and attention of single rows in one kernel. A pass with both kinds
of rows calls ``decode_attention`` for the rows alone, ``enter`` for the rest, then ``ledger_attention`` with
``alone=0`` for the cohorts.

``torch.py`` computes every case. The kernels (``kernels.py``, launched by ``triton.py``) need CUDA, pools in bf16 or
fp16, and one size of keys and values up to 128. Rows alone: a program owns a row, a key head and a part of the row's
keys; the number of parts is bounded on the host and chosen on the device, so a captured graph does no work beyond a
row's length, and the program that ends last writes the result. Cohorts: a program owns a block of queries and a head
and walks the keys up to its last slot.

H200, 16 heads of 128, 1,088 keys: 32 rows 68 us (67 at the copy rate), 128 rows 267 (270)
(``benchmarks/records/tuning-h200.json``).
"""

from torch import Tensor

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.ledger_attention import torch as plain
from adaponder.ops.ledger_attention.torch import Cohort, LedgerRows, Projection, Scratch, Tiles, Turn, scratch_for

__all__ = ["Cohort", "LedgerRows", "Projection", "Scratch", "Tiles", "Turn"]
__all__ += ["by_kernels", "decode_attention", "enter", "ledger_attention", "scratch_for"]

_KERNELS = "adaponder.ops.ledger_attention.triton"
_LARGEST = 128  # of head sizes


def by_kernels(keys: Tensor, values: Tensor) -> bool:
    """Returns whether kernels read pools such as these: on CUDA, in bf16 or fp16, laid out row by row."""
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


ledger_attention = dispatch(plain.ledger_attention, _KERNELS, when=_fits)
enter = dispatch(plain.enter, _KERNELS, when=_enters)
decode_attention = dispatch(plain.decode_attention, _KERNELS, when=_decodes)
