"""Which version computes it."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from adaponder.ops.fused import runs_fused
from adaponder.ops.ledger_attention import entry as plain_entry
from adaponder.ops.ledger_attention import torch as reference
from adaponder.ops.ledger_attention.entry import Projection, Turn
from adaponder.ops.ledger_attention.scratch import Scratch
from adaponder.ops.ledger_attention.torch import LedgerRows


def _kernels(pool: Tensor) -> ModuleType | None:
    """The Triton version where it runs: CUDA, pools in bf16 or fp16."""
    if not runs_fused(pool) or pool.dtype.itemsize != 2:
        return None
    from adaponder.ops.ledger_attention import launch

    return launch


def by_kernels(keys: Tensor, values: Tensor) -> bool:
    """Whether kernels read pools such as these."""
    kernels = _kernels(keys)
    return kernels is not None and kernels.pools_fit(keys, values)


def ledger_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    *,
    window: int | None = None,
    scale: float | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """The torch version, or its Triton kernels where they run and fit."""
    if (kernels := _kernels(keys)) and kernels.fits(query, keys, values, rows):
        return kernels.ledger_attention(query, keys, values, rows, window=window, scale=scale, scratch=scratch)
    return reference.ledger_attention(query, keys, values, rows, window=window, scale=scale)


def enter(qkv: Tensor, keys: Tensor, values: Tensor, row: Tensor, projection: Projection, turn: Turn) -> Tensor:
    """The torch version, or its Triton kernel where it runs and fits."""
    if (kernels := _kernels(keys)) and kernels.entry_fits(qkv, keys, values):
        return kernels.enter(qkv, keys, values, row, projection, turn)
    return plain_entry.enter(qkv, keys, values, row, projection, turn)


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    projection: Projection,
    turn: Turn,
    *,
    window: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    dependent: bool = False,
) -> Tensor:
    """The torch version, or its Triton kernel where it runs and fits.

    ``dependent`` lets the kernel start while the one before it ends: whatever it reads but ``qkv`` must have been
    written before the last launch that was not dependent.
    """
    options = {"window": window, "scale": scale}
    if (kernels := _kernels(keys)) and kernels.entry_fits(qkv, keys, values, rows):
        extras = {"out": out, "scratch": scratch, "dependent": dependent}
        return kernels.decode_attention(qkv, keys, values, rows, projection, turn, **options, **extras)
    mixed = plain_entry.decode_attention(qkv, keys, values, rows, projection, turn, **options)
    return mixed if out is None else out.copy_(mixed.view(out.shape))
