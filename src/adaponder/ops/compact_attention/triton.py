"""Computes attention of packed queries by an online softmax over blocks of keys.

A program computes a block of queries of one head. Queries are packed without padding, so a block may hold the end of
one sequence and the beginning of the next: the program loops over the keys of each sequence in its block, usually one.
In backward, the same loop computes the gradient of the queries; for keys and values, a program takes a block of keys
and loops over the queries that see it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from adaponder.ops.compact_attention.torch import PackedRows
from adaponder.ops.dispatch import on_device_of
from adaponder.ops.kernels import finite

# (rows per block, keys per block, pipeline stages) by largest head size; forward and backward fit into 160 KiB of
# shared memory.
BLOCKS = {64: (128, 64, 3), 128: (64, 64, 2)}
SHARED_BYTES = 160 * 1024
FORWARD_WARPS, BACKWARD_WARPS = 4, 8


def compact_attention(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float) -> Tensor:
    """Computes attention of packed queries, like ``compact_attention`` in torch.py, if :func:`fits` is true."""
    return _CompactAttention.apply(query, keys, values, rows, scale)


def fits(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, *, window: int | None, dropout: float) -> bool:
    """Returns whether the kernels support these arguments; the torch version supports all."""
    packed = all(x.stride(-1) == 1 for x in (query, keys, values))
    plain = window is None and (rows.query.document is None or rows.key.spans is not None) and not dropout
    sized = keys.shape[-1] == values.shape[-1] and query.shape[-1] <= max(BLOCKS)
    if not query.is_cuda:
        return plain and packed and sized
    shared_bytes = torch.cuda.get_device_properties(query.device).shared_memory_per_block_optin
    return plain and packed and sized and shared_bytes >= SHARED_BYTES


def mix(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the attention output, and the base-2 logarithm of the softmax's normaliser, ``[n, heads]``."""
    count, heads, _ = query.shape
    mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
    normaliser = torch.empty(count, heads, dtype=torch.float32, device=query.device)
    if count:
        constants = _constants(query, keys, rows, FORWARD_WARPS)
        with on_device_of(query):
            _forward_kernel[(triton.cdiv(count, constants["ROWS"]), heads)](
                query, keys, values, mixed, normaliser, *_places(rows), count, scale / math.log(2.0),
                *_strides(query, keys, values, mixed), **constants,
            )  # fmt: skip
    return mixed, normaliser


def gradients(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    normaliser: Tensor,
    rows: PackedRows,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, keys and values, given the results of :func:`mix`."""
    count, heads, _ = query.shape
    grad_query = torch.empty_like(mixed)
    grad_keys, grad_values = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (keys, values))
    if not count:
        return grad_query, grad_keys, grad_values
    # In each row, the sum of weights * d weights equals the sum of result * d result.
    along = (mixed.float() * grad.float()).sum(-1)
    inputs = (query, keys, values, grad, normaliser, along)
    strides = _strides(query, keys, values, mixed)
    constants = _constants(query, keys, rows, BACKWARD_WARPS)
    sequences, slots = rows.key.slot.shape
    blocks = triton.cdiv(slots, constants["KEYS"])
    # For each block of keys: the first query that sees a part of it, the first that sees all of it, and the end of the
    # queries that see it. Queries are ordered by sequence and slot.
    place = rows.sequence * slots + rows.query.slot[0]
    base = torch.arange(sequences, device=place.device)[:, None] * slots
    low = base + torch.arange(blocks, device=place.device) * constants["KEYS"]
    high = base + slots
    if rows.key.spans is not None:
        last = pad(rows.key.spans[2], (0, blocks * constants["KEYS"] - slots)).unflatten(1, (blocks, -1)).amax(2)
        high = base + last + 1
    whole = (low + constants["KEYS"] - 1).minimum(base + slots - 1)
    row_ranges = torch.searchsorted(place, torch.stack((low, whole, high.expand_as(low))).flatten())
    with on_device_of(query):
        _query_kernel[(triton.cdiv(count, constants["ROWS"]), heads)](
            *inputs, grad_query, *_places(rows), count, scale, *strides, **constants
        )
        _key_kernel[(sequences * blocks, keys.shape[1])](
            *inputs, grad_keys, grad_values, row_ranges, sequences * blocks, *_places(rows), scale,
            *strides, *grad_keys.stride()[:3], **constants,
        )  # fmt: skip
    return grad_query, grad_keys, grad_values


class _CompactAttention(torch.autograd.Function):
    """Saves inputs, output and a normaliser per query and head; backward recomputes the attention weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float) -> Tensor:
        mixed, normaliser = mix(query, keys, values, rows, scale)
        ctx.save_for_backward(query, keys, values, mixed, normaliser)
        ctx.rows, ctx.scale = rows, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(grad.contiguous(), *ctx.saved_tensors, ctx.rows, ctx.scale), None, None


def _places(rows: PackedRows) -> tuple[Any, ...]:
    """Returns kernel arguments: each query's sequence and slot, the mask of present keys and its stride, spans, sizes.

    If there is no mask or no document, another tensor takes its place, which the kernels do not read.
    """
    sequences, slots = rows.key.slot.shape
    mask = (rows.sequence, 0) if rows.key.present is None else (rows.key.present, rows.key.present.stride(0))
    spans = rows.sequence if rows.key.spans is None else rows.key.spans
    return rows.sequence, rows.query.slot, *mask, spans, sequences * slots, slots


def _strides(query: Tensor, keys: Tensor, values: Tensor, mixed: Tensor) -> tuple[int, ...]:
    return *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *mixed.stride()[:2]


def _constants(query: Tensor, keys: Tensor, rows: PackedRows, warps: int) -> dict[str, Any]:
    blocks = (blocks for largest, blocks in BLOCKS.items() if query.shape[2] <= largest)
    block_rows, block_keys, stages = next(blocks)
    return {
        "HEADS": query.shape[1],
        "GROUPS": query.shape[1] // keys.shape[1],
        "SIZE": query.shape[2],
        "PADDED": max(16, triton.next_power_of_2(query.shape[2])),
        "HOLES": rows.key.present is not None,
        "DOCUMENTS": rows.key.spans is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "ROWS": block_rows,
        "KEYS": block_keys,
        "num_warps": warps,
        "num_stages": stages,
    }


@triton.jit
def _visible(
    column, slot, member, document, present, spans, which, length, HOLES: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Returns the mask ``[queries, keys]`` of a block: each query sees its own slot and present earlier slots.

    ``present`` points at the mask of the sequence ``which``, to which queries with ``member`` belong; all others see
    nothing. ``document [queries]`` is the document of each query.
    """
    mask = column[None, :] <= slot[:, None]
    if HOLES:
        here = tl.load(present + column, mask=column < length, other=0)
        mask = mask & ((here[None, :] != 0) | (column[None, :] == slot[:, None]))
    if DOCUMENTS:
        of_key = tl.load(spans + which * length + column, mask=column < length, other=0)
        mask = mask & (of_key[None, :] == document[:, None])
    return mask & member[:, None]


@triton.jit
def _of_rows(spans, offset, sequence, slot, length, mask, DOCUMENTS: tl.constexpr):
    """Loads for each query its document (``offset`` 0) or the document's first slot; zeros without documents."""
    # A function has one return type, but spans are int64 and slots int32.
    if DOCUMENTS:
        entries = tl.load(spans + offset + sequence * length + slot, mask=mask, other=0)
    else:
        entries = slot * 0
    return entries


@triton.jit
def _queries(
    query, grads, normaliser, alongs, row, exists, head, part, inside, query_row, query_head, grad_row, grad_head,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Loads the inputs of backward that belong to queries; zeros for rows that do not exist."""
    wide, whole = row.to(tl.int64), exists[:, None] & inside[None, :]
    q = tl.load(query + wide[:, None] * query_row + head * query_head + part[None, :], mask=whole, other=0.0)
    g = tl.load(grads + wide[:, None] * grad_row + head * grad_head + part[None, :], mask=whole, other=0.0)
    level = tl.load(normaliser + wide * HEADS + head, mask=exists, other=0.0)
    along = tl.load(alongs + wide * HEADS + head, mask=exists, other=0.0)
    return q, g, level, along


@triton.jit
def _weights(q, k, v, grad, level, along, scale, PRECISION: tl.constexpr):
    """Returns a block's attention weights before masking, and the gradients of its scores divided by these weights."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
    weight = tl.exp2(scores - level[:, None])
    return weight, tl.dot(grad, tl.trans(v), input_precision=PRECISION) - along[:, None]


@triton.jit
def _load(at, mask, WHOLE: tl.constexpr):
    """Loads a block, without a mask if the head size needs no padding."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _absorb(scores, v, top, total, sums, PRECISION: tl.constexpr):
    """Does one step of the online softmax; returns each query's maximum, sum of weights and sum of weighted values."""
    higher = tl.maximum(top, tl.max(scores, 1))
    floor = finite(higher)  # rows of another sequence have seen nothing yet
    weight = tl.exp2(scores - floor[:, None])
    fading = tl.exp2(top - floor)
    sums = sums * fading[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * fading + tl.sum(weight, 1), sums


@triton.jit
def _ranges(slot, member, exists, opening, seen, HOLES: tl.constexpr, DOCUMENTS: tl.constexpr, KEYS: tl.constexpr):
    """Returns (low, plain): keys before ``plain`` are read without a mask, keys from ``low`` on with a mask.

    With documents, all keys need a mask (``plain`` is 0), and keys before ``low`` are skipped, because no query of the
    block may see them. With absent keys (HOLES), both are 0. Otherwise both are equal.
    """
    if DOCUMENTS:
        return tl.min(tl.where(member, opening, seen), 0).to(tl.int32) // KEYS * KEYS, 0
    if HOLES:
        return 0, 0
    # Most keys are visible to every row of the block and need no mask.
    plain = (tl.min(tl.where(exists, tl.where(member, slot, -1), seen), 0) + 1) // KEYS * KEYS
    return plain, plain


@triton.jit
def _forward_kernel(
    query, keys, values, mixed, normaliser, sequences, slots, present, present_sequence, spans, tokens, length, count,
    scale,  # of the scores, over ln 2 because of exp2
    query_row, query_head, key_sequence, key_head, key_slot, value_sequence, value_head, value_slot,
    mixed_row, mixed_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, HOLES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    row = begin + tl.arange(0, ROWS)
    part = tl.arange(0, PADDED)
    exists, inside = row < count, part < SIZE
    sequence = tl.load(sequences + row, mask=exists, other=-1)
    slot = tl.load(slots + row, mask=exists, other=-1).to(tl.int32)
    at = query + row.to(tl.int64)[:, None] * query_row + head * query_head + part[None, :]
    q = tl.load(at, mask=exists[:, None] & inside[None, :], other=0.0)
    document = _of_rows(spans, 0, sequence, slot, length, exists, DOCUMENTS)
    opening = _of_rows(spans, tokens, sequence, slot, length, exists, DOCUMENTS)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    first = tl.load(sequences + begin)
    last = tl.load(sequences + tl.minimum(begin + ROWS, count) - 1)
    for which in range(first, last + 1):
        member = sequence == which
        seen = tl.max(tl.where(member, slot, -1), 0) + 1  # number of keys that some row of this sequence sees
        key_base = keys + which * key_sequence + (head // GROUPS) * key_head
        value_base = values + which * value_sequence + (head // GROUPS) * value_head
        low, plain = _ranges(slot, member, exists, opening, seen, HOLES, DOCUMENTS, KEYS)
        for start in range(0, plain, KEYS):
            column = start + tl.arange(0, KEYS)
            k = _load(key_base + column[:, None] * key_slot + part[None, :], inside[None, :], SIZE == PADDED)
            v = _load(value_base + column[:, None] * value_slot + part[None, :], inside[None, :], SIZE == PADDED)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            top, total, sums = _absorb(scores, v, top, total, sums, PRECISION)
        for start in range(low, seen, KEYS):
            column = start + tl.arange(0, KEYS)
            there = (column < seen)[:, None] & inside[None, :]
            k = tl.load(key_base + column[:, None] * key_slot + part[None, :], mask=there, other=0.0)
            v = tl.load(value_base + column[:, None] * value_slot + part[None, :], mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            here = present + which * present_sequence
            mask = _visible(column, slot, member, document, here, spans, which, length, HOLES, DOCUMENTS)
            scores = tl.where(mask, scores, -float("inf"))
            top, total, sums = _absorb(scores, v, top, total, sums, PRECISION)
    total = tl.where(exists, total, 1.0)
    out = mixed + row.to(tl.int64)[:, None] * mixed_row + head * mixed_head + part[None, :]
    tl.store(out, sums / total[:, None], mask=exists[:, None] & inside[None, :])
    tl.store(normaliser + row.to(tl.int64) * HEADS + head, top + tl.log2(total), mask=exists)


@triton.jit
def _query_kernel(
    query, keys, values, grads, normaliser, alongs, grad_query,
    sequences, slots, present, present_sequence, spans, tokens, length, count, scale,
    query_row, query_head, key_sequence, key_head, key_slot, value_sequence, value_head, value_slot,
    grad_row, grad_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, HOLES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    row = begin + tl.arange(0, ROWS)
    part = tl.arange(0, PADDED)
    exists, inside = row < count, part < SIZE
    sequence = tl.load(sequences + row, mask=exists, other=-1)
    slot = tl.load(slots + row, mask=exists, other=-1).to(tl.int32)
    q, g, level, along = _queries(query, grads, normaliser, alongs, row, exists, head, part, inside,
                                  query_row, query_head, grad_row, grad_head, HEADS)  # fmt: skip
    document = _of_rows(spans, 0, sequence, slot, length, exists, DOCUMENTS)
    opening = _of_rows(spans, tokens, sequence, slot, length, exists, DOCUMENTS)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    first = tl.load(sequences + begin)
    last = tl.load(sequences + tl.minimum(begin + ROWS, count) - 1)
    for which in range(first, last + 1):
        member = sequence == which
        seen = tl.max(tl.where(member, slot, -1), 0) + 1
        key_base = keys + which * key_sequence + (head // GROUPS) * key_head
        value_base = values + which * value_sequence + (head // GROUPS) * value_head
        low, plain = _ranges(slot, member, exists, opening, seen, HOLES, DOCUMENTS, KEYS)
        for start in range(0, plain, KEYS):
            column = start + tl.arange(0, KEYS)
            k = _load(key_base + column[:, None] * key_slot + part[None, :], inside[None, :], SIZE == PADDED)
            v = _load(value_base + column[:, None] * value_slot + part[None, :], inside[None, :], SIZE == PADDED)
            weight, slope = _weights(q, k, v, g, level, along, scale, PRECISION)
            sums += tl.dot((weight * slope).to(k.dtype), k, input_precision=PRECISION)
        for start in range(low, seen, KEYS):
            column = start + tl.arange(0, KEYS)
            there = (column < seen)[:, None] & inside[None, :]
            k = tl.load(key_base + column[:, None] * key_slot + part[None, :], mask=there, other=0.0)
            v = tl.load(value_base + column[:, None] * value_slot + part[None, :], mask=there, other=0.0)
            weight, slope = _weights(q, k, v, g, level, along, scale, PRECISION)
            here = present + which * present_sequence
            mask = _visible(column, slot, member, document, here, spans, which, length, HOLES, DOCUMENTS)
            sums += tl.dot((tl.where(mask, weight, 0.0) * slope).to(k.dtype), k, input_precision=PRECISION)
    out = grad_query + row.to(tl.int64)[:, None] * grad_row + head * grad_head + part[None, :]
    tl.store(out, sums * scale, mask=exists[:, None] & inside[None, :])


@triton.jit
def _key_kernel(
    query, keys, values, grads, normaliser, alongs, grad_keys, grad_values,
    row_ranges,  # per block of keys: first query that sees part of it, first that sees all of it, end of these queries
    all_blocks,
    sequences, slots, present, present_sequence, spans, tokens,
    length,  # slots per sequence
    scale,
    query_row, query_head, key_sequence, key_head, key_slot, value_sequence, value_head, value_slot,
    grad_row, grad_head, into_sequence, into_head, into_slot,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, HOLES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    key_group = tl.program_id(1)
    blocks = tl.cdiv(length, KEYS)
    which = (block // blocks).to(tl.int64)
    column = (block % blocks) * KEYS + tl.arange(0, KEYS)
    part = tl.arange(0, PADDED)
    inside = part < SIZE
    there = (column < length)[:, None] & inside[None, :]
    key_at = keys + which * key_sequence + key_group * key_head
    value_at = values + which * value_sequence + key_group * value_head
    k = tl.load(key_at + column[:, None] * key_slot + part[None, :], mask=there, other=0.0)
    v = tl.load(value_at + column[:, None] * value_slot + part[None, :], mask=there, other=0.0)
    here = present + which * present_sequence
    key_sums = tl.zeros([KEYS, PADDED], tl.float32)
    value_sums = tl.zeros([KEYS, PADDED], tl.float32)
    first, end = tl.load(row_ranges + block), tl.load(row_ranges + 2 * all_blocks + block)
    plain = end
    if not (HOLES or DOCUMENTS):
        plain = first + tl.cdiv(tl.load(row_ranges + all_blocks + block) - first, ROWS) * ROWS
    for group in range(GROUPS):
        head = key_group * GROUPS + group
        for phase in tl.static_range(2):
            # Rows that see the whole block need no mask; rows beyond the end are zeros, which add nothing.
            for begin in range(first if phase == 0 else plain, plain if phase == 0 else end, ROWS):
                row = begin + tl.arange(0, ROWS)
                exists = row < end
                q, g, level, along = _queries(query, grads, normaliser, alongs, row, exists, head, part, inside,
                                              query_row, query_head, grad_row, grad_head, HEADS)  # fmt: skip
                weight, slope = _weights(q, k, v, g, level, along, scale, PRECISION)
                if phase == 0:
                    slot = tl.load(slots + row, mask=exists, other=-1).to(tl.int32)
                    document = _of_rows(spans, 0, which, slot, length, exists, DOCUMENTS)
                    mask = _visible(column, slot, exists, document, here, spans, which, length, HOLES, DOCUMENTS)
                    weight = tl.where(mask, weight, 0.0)
                value_sums += tl.dot(tl.trans(weight.to(g.dtype)), g, input_precision=PRECISION)
                key_sums += tl.dot(tl.trans((weight * slope).to(q.dtype)), q, input_precision=PRECISION)
    into = which * into_sequence + key_group * into_head + column[:, None] * into_slot + part[None, :]
    tl.store(grad_keys + into, key_sums * scale, mask=there)
    tl.store(grad_values + into, value_sums, mask=there)
