"""Computes logits of a few rows by the matrix-vector kernels, and their expectation over slices of the vocabulary.

A program sums one slice's embeddings, in a block of columns, weighted by an online softmax; a second kernel combines
the slices by their normalisers. If no row is active, the table is not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from adaponder.ops.dispatch import on_device_of
from adaponder.ops.kernels import allow_next, finite, launch_options, wait_for_previous
from adaponder.ops.row_linear.torch import Linear, Piece
from adaponder.ops.row_linear.triton import normed_linears
from adaponder.ops.vocab_expectation.triton import softmax_

# Most rows whose logits are computed by the matrix-vector kernel.
FEW = 2
# Most rows for which the expectation is split over the vocabulary; also the smallest tile of tl.dot.
ROWS = 16


class Slices(NamedTuple):
    """The launch config of the expectation: slices of the vocabulary, tokens and columns per tile, warps, stages."""

    count: int
    tokens: int
    columns: int
    warps: int
    stages: int


def slices_for(width: int) -> Slices:
    """Returns the config measured fastest on an H200 for embeddings of size ``width``."""
    return Slices(66, 128, 128, 4, 4) if width <= 512 else Slices(66, 64, 256, 8, 4)


def row_logits(hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Computes ``hidden @ weight.T + bias``, like ``row_logits`` in torch.py."""
    if hidden.shape[0] > FEW:
        return functional.linear(hidden, weight, bias)
    return normed_linears(hidden, (Piece((Linear(weight, bias),)),))[0]


def row_expectation(
    logits: Tensor, table: Tensor, active: Tensor | None = None, *, scale: float = 1.0, top_k: None = None
) -> Tensor:
    """Computes ``softmax(logits) @ table * scale`` of active rows, like ``row_expectation`` in torch.py."""
    if logits.shape[0] > ROWS or table.stride(-1) != 1:
        mixed = (softmax_(logits.contiguous(), keep=True).to(table.dtype) @ table).mul_(scale)
        return mixed if active is None else mixed.masked_fill_(~active[:, None], 0.0)
    slices = slices_for(table.shape[1])
    rows, vocabulary = logits.shape
    width = table.shape[1]
    result = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    if not rows:
        return result
    columns = min(slices.columns, max(16, triton.next_power_of_2(width)))
    # Each slice has a whole number of tiles.
    length = triton.cdiv(triton.cdiv(vocabulary, slices.tokens), slices.count) * slices.tokens
    count = triton.cdiv(vocabulary, length)
    sums = torch.empty(count, rows, width, dtype=torch.float32, device=table.device)
    tops, totals = (torch.empty(rows, count, dtype=torch.float32, device=table.device) for _ in range(2))
    mask = logits if active is None else active.view(torch.uint8)
    options = {"MASKED": active is not None, **launch_options(table)}
    with on_device_of(table):
        _slice_kernel[(count, triton.cdiv(width, columns))](
            logits, table, mask, sums, tops, totals,
            rows, vocabulary, width, length, count, logits.stride(0), table.stride(0),
            ROWS=ROWS, TOKENS=slices.tokens, COLUMNS=columns,
            num_warps=slices.warps, num_stages=slices.stages, **options,
        )  # fmt: skip
        narrow, padded = min(128, columns), triton.next_power_of_2(count)
        _combine_kernel[(rows, triton.cdiv(width, narrow))](
            sums, tops, totals, mask, result, rows, width, count, scale,
            COUNT=padded, COLUMNS=narrow, STEP=min(64, padded), num_warps=4, **options,
        )  # fmt: skip
    return result


@triton.jit
def _slice_kernel(
    logits, table, active, sums, tops, totals,
    rows, vocabulary, width, length, count, stride, table_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    allow_next(DEPENDENT)
    number, block = tl.program_id(0), tl.program_id(1)
    row, token = tl.arange(0, ROWS), tl.arange(0, TOKENS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous(DEPENDENT)
    going = row < rows
    if MASKED:
        going = going & (tl.load(active + row, mask=going, other=0) != 0)
    if tl.max(going.to(tl.int32), 0) > 0:
        first = number * length
        last = tl.minimum(first + length, vocabulary)
        at = logits + row[:, None].to(tl.int64) * stride
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(first, last, TOKENS):
            here = start + token
            z = tl.load(at + here[None, :], mask=going[:, None] & (here < last)[None, :], other=-float("inf"))
            z = z.to(tl.float32)
            higher = tl.maximum(top, tl.max(z, 1))
            level = finite(higher)
            fading, p = tl.exp(top - level), tl.exp(z - level[:, None])
            total = total * fading + tl.sum(p, 1)
            top = higher
            rows_at = table + here[:, None].to(tl.int64) * table_stride + column[None, :]
            e = tl.load(rows_at, mask=(here < last)[:, None] & (column < width)[None, :], other=0.0)
            mixed = tl.dot(p.to(e.dtype), e, mixed * fading[:, None], input_precision="ieee")
        out = sums + (number * rows + row[:, None]) * width + column[None, :]
        tl.store(out, mixed, mask=going[:, None] & (column < width)[None, :])
        if block == 0:
            tl.store(tops + row * count + number, top, mask=going)
            tl.store(totals + row * count + number, total, mask=going)


@triton.jit
def _combine_kernel(
    sums, tops, totals, active, result, rows, width, count, scale,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    allow_next(DEPENDENT)
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous(DEPENDENT)
    going = True
    if MASKED:
        going = tl.load(active + row) != 0
    mixed = tl.zeros([COLUMNS], tl.float32)
    if going:
        number = tl.arange(0, COUNT)
        top = tl.load(tops + row * count + number, mask=number < count, other=-float("inf"))
        level = finite(tl.max(top, 0))
        whole = tl.load(totals + row * count + number, mask=number < count, other=0.0)
        total = tl.sum(whole * tl.exp(top - level), 0)
        for start in range(0, COUNT, STEP):
            part = start + tl.arange(0, STEP)
            weight = tl.exp(tl.load(tops + row * count + part, mask=part < count, other=-float("inf")) - level)
            at = sums + (part[:, None] * rows + row) * width + column[None, :]
            some = tl.load(at, mask=(part < count)[:, None] & (column < width)[None, :], other=0.0)
            mixed += tl.sum(some * weight[:, None], 0)
        mixed = mixed * (scale / total)
    tl.store(result + row * width + column, mixed, mask=column < width)
