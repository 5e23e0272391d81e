"""Attention of scattered rows as one kernel: online softmax over the keys up to the last slot that a block asks from.

A program owns a block of rows and one head. Rows are packed without padding, so a block may hold the end of one
sequence and the beginning of the next: it walks the keys of each sequence it holds rows of, usually one.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.compact_attention.torch import Rows

BLOCK_ROWS = 128
BLOCK_KEYS = 64
WARPS = 8


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
    """Equals :func:`adaponder.ops.compact_attention.torch.compact_attention`, forward only, for what :func:`fits`."""
    if not fits(query, keys, values, rows, window=window, dropout=dropout):
        raise ValueError("the kernel knows no documents, windows, dropout, gradients, or values of another size")
    count, heads, size = query.shape
    mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
    present = rows.key.present
    grid = (triton.cdiv(count, BLOCK_ROWS), heads)
    if count:
        _attention_kernel[grid](
            query,
            keys,
            values,
            mixed,
            rows.sequence,
            rows.query.slot,
            rows.sequence if present is None else present,
            count,
            (1.0 / math.sqrt(size) if scale is None else scale) / math.log(2.0),
            *query.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            *mixed.stride()[:2],
            0 if present is None else present.stride(0),
            GROUPS=heads // keys.shape[1],
            SIZE=size,
            PADDED=max(16, triton.next_power_of_2(size)),
            HOLES=present is not None,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            ROWS=BLOCK_ROWS,
            KEYS=BLOCK_KEYS,
            num_warps=WARPS,
        )
    return mixed


def fits(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, *, window: int | None, dropout: float) -> bool:
    """Whether the kernel can do it; the torch version does everything."""
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values))
    packed = all(x.stride(-1) == 1 for x in (query, keys, values))
    plain = window is None and rows.query.document is None and not dropout
    return plain and packed and not wants_gradient and keys.shape[-1] == values.shape[-1] and query.shape[-1] <= 256


@triton.jit
def _attention_kernel(
    query,
    keys,
    values,
    mixed,
    sequences,
    slots,
    present,
    count,
    scale,  # of the scores, in base-2 exponents
    query_row,
    query_head,
    key_sequence,
    key_head,
    key_slot,
    value_sequence,
    value_head,
    value_slot,
    mixed_row,
    mixed_head,
    present_sequence,
    GROUPS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    HOLES: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
):
    begin = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    row = begin + tl.arange(0, ROWS)
    part = tl.arange(0, PADDED)
    exists, inside = row < count, part < SIZE
    sequence = tl.load(sequences + row, mask=exists, other=-1)
    slot = tl.load(slots + row, mask=exists, other=-1).to(tl.int32)
    at = query + row.to(tl.int64)[:, None] * query_row + head * query_head + part[None, :]
    q = tl.load(at, mask=exists[:, None] & inside[None, :], other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    first = tl.load(sequences + begin)
    last = tl.load(sequences + tl.minimum(begin + ROWS, count) - 1)
    for which in range(first, last + 1):
        mine = sequence == which
        seen = tl.max(tl.where(mine, slot, -1), 0) + 1  # keys that any row of this sequence sees
        key_base = keys + which * key_sequence + (head // GROUPS) * key_head
        value_base = values + which * value_sequence + (head // GROUPS) * value_head
        for start in range(0, seen, KEYS):
            column = start + tl.arange(0, KEYS)
            there = (column < seen)[:, None] & inside[None, :]
            k = tl.load(key_base + column[:, None] * key_slot + part[None, :], mask=there, other=0.0)
            v = tl.load(value_base + column[:, None] * value_slot + part[None, :], mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            visible = column[None, :] <= slot[:, None]
            if HOLES:
                hole = tl.load(present + which * present_sequence + column, mask=column < seen, other=0) == 0
                # Every row sees its own slot, so that no softmax runs over nothing.
                visible = visible & ((hole[None, :] == 0) | (column[None, :] == slot[:, None]))
            scores = tl.where(visible & mine[:, None], scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            # Rows of another sequence have seen nothing yet: no infinity may be taken from itself.
            floor = tl.where(higher == -float("inf"), 0.0, higher)
            weight = tl.exp2(scores - floor[:, None])
            fading = tl.exp2(top - floor)
            total = total * fading + tl.sum(weight, 1)
            sums = sums * fading[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
            top = higher
    out = mixed + row.to(tl.int64)[:, None] * mixed_row + head * mixed_head + part[None, :]
    tl.store(out, sums / tl.where(exists, total, 1.0)[:, None], mask=exists[:, None] & inside[None, :])
