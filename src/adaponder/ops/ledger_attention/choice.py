"""Which version computes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.ops.ledger_attention import entry as plain_entry
from adaponder.ops.ledger_attention import torch as reference
from adaponder.ops.ledger_attention.entry import Projection, Turn
from adaponder.ops.ledger_attention.torch import LedgerRows

# Most parts that the keys of a row are split into.
MOST_SPLITS = 32


class Scratch(NamedTuple):
    """Memory in which programs that split a row's keys meet; calls that follow one another may share it.

    Attributes:
        partial: float32 ``[rows * heads, splits, size]``, results of the parts.
        level: float32 ``[rows * heads, splits]``, the base-2 logarithm of what each part was normalised by.
        counter: int32 ``[rows * key heads]``, how many parts are done; 0 between calls.
    """

    partial: Tensor
    level: Tensor
    counter: Tensor


def scratch_for(rows: int, heads: int, size: int, device: torch.device | str) -> Scratch:
    """Enough for any pass of at most ``rows`` rows alone."""
    partial = torch.empty(rows * heads, MOST_SPLITS, size, dtype=torch.float32, device=device)
    level = torch.empty(rows * heads, MOST_SPLITS, dtype=torch.float32, device=device)
    return Scratch(partial, level, torch.zeros(rows * heads, dtype=torch.int32, device=device))


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
    return reference.ledger_attention(query, keys, values, rows, window=window, scale=scale)


def enter(qkv: Tensor, keys: Tensor, values: Tensor, row: Tensor, projection: Projection, turn: Turn) -> Tensor:
    """The torch version, or its Triton kernel where it runs."""
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
    mixed = plain_entry.decode_attention(qkv, keys, values, rows, projection, turn, window=window, scale=scale)
    return mixed if out is None else out.copy_(mixed)
