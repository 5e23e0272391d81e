"""Computes attention over pools of keys and values; an index holds the pool rows that each query reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adaponder.ops.masks import masked_attention
from adaponder.ops.precision import widened

# Largest number of key elements to gather at a time.
GATHERED = 1 << 27
# Largest number of splits of a row's keys, and of rows x key heads x splits if keys are split at all.
MOST_SPLITS, MOST_PROGRAMS = 32, 256


class Cohort(NamedTuple):
    """Rows ``start`` to ``stop`` of a pass; they share a lane and an iteration, and slots ascend to ``last_slot``."""

    start: int
    stop: int
    lane: int
    iteration: int
    last_slot: int


class Tiles(NamedTuple):
    """Cohorts cut into tiles of ``block`` rows, one kernel program per tile and head.

    ``table``, int32 ``[tiles, 4]``, has each tile's first row, the end of its cohort, lane and iteration. A tile whose
    first row is not below the end is padding.
    """

    block: int
    table: Tensor


class LedgerRows(NamedTuple):
    """Describes the ``n`` query rows of a pass, and the rows of the KV pools that each query row attends to.

    Attributes:
        index: int32 ``[lanes, iterations, slots]``, the pool row that an iteration reads for a slot; -1 for none.
        lane, slot, iteration: int64 ``[n]``, the lane, slot and iteration of each query row.
        row: int64 ``[n]``, the pool row that holds the query row's own keys and values.
        num_single: number of single-query rows, which come first; all later query rows are in cohorts.
        cohorts: the cohorts, in order.
        longest: upper bound of ``slot + 1`` over the single-query rows; ``None``: the number of slots of the index.
        tiles: replaces ``cohorts`` in CUDA graphs, whose kernels read tiles from device memory; must cover all query
            rows of cohorts, even padding rows, which attend to nothing (slot -1).
    """

    index: Tensor
    lane: Tensor
    slot: Tensor
    iteration: Tensor
    row: Tensor
    num_single: int
    cohorts: tuple[Cohort, ...] = ()
    longest: int | None = None
    tiles: Tiles | None = None

    @property
    def reach(self) -> int:
        """The number of slots, from slot 0, that single-query rows may read."""
        return self.index.shape[2] if self.longest is None else min(self.longest, self.index.shape[2])

    def select(self, span: slice, cohorts: tuple[Cohort, ...] = ()) -> LedgerRows:
        """Selects the query rows ``span``; row numbers in ``cohorts`` must count from the start of ``span``."""
        lane, slot, iteration, row = (values[span] for values in (self.lane, self.slot, self.iteration, self.row))
        return self._replace(lane=lane, slot=slot, iteration=iteration, row=row, cohorts=cohorts)


class Projection(NamedTuple):
    """Describes the QKV product ``[n, (heads + 2 key_heads) * size]``: its layout, bias, norms and rotary embedding.

    Attributes:
        heads: number of query heads, a multiple of ``key_heads``.
        key_heads: number of key heads, which is also the number of value heads.
        size: the head dimension.
        packed: whether the layout is ``[heads, 3, size]`` (GPT-NeoX) instead of all queries, all keys, all values.
        rotary: the number of leading elements of a head that rotary embedding rotates; even, 0 for none.
        bias: bias still to be added to the product, in the same layout; ``None`` for none.
        query_norm, key_norm: weights ``[size]`` of an RMS norm over each head before rotation; ``None`` for no norm.
    """

    heads: int
    key_heads: int
    size: int
    packed: bool = False
    rotary: int = 0
    bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    epsilon: float = 1e-6


class Angles(NamedTuple):
    """The position of each row, int64 ``[n]``, and tables of the rotary cosines and sines of all positions.

    Tables are float32 ``[positions, rotary]``; the second half of each row repeats the first, as in Hugging Face.
    """

    position: Tensor
    cos: Tensor
    sin: Tensor


class Scratch(NamedTuple):
    """Memory for partial results when several kernel programs split a row's keys; calls on one stream may share it.

    An entry belongs to one (row, head, split): ``partial``, float32 ``[entries, size]``, holds its normalised result,
    ``level`` the base-2 logarithm of its normaliser. ``counter``, int32, counts the finished splits of each row and
    key head; it is 0 between calls.
    """

    partial: Tensor
    level: Tensor
    counter: Tensor


def scratch_for(rows: int, heads: int, size: int, device: torch.device | str) -> Scratch:
    """Allocates enough scratch memory for passes of up to ``rows`` rows with the default number of splits."""
    entries = max(rows, MOST_PROGRAMS) * heads
    partial = torch.empty(entries, size, dtype=torch.float32, device=device)
    level = torch.empty(entries, dtype=torch.float32, device=device)
    return Scratch(partial, level, torch.zeros(entries, dtype=torch.int32, device=device))


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
    """Computes ``softmax(q K^T * scale) V`` over the pool rows that the index holds for each query.

    A query at (lane, slot, iteration) attends to the last ``window`` slots up to its own (``None``: to all), except
    slots without a row (-1 in ``index[lane, iteration]``); if none is left, its result is zeros. The query's own row
    must already be in index and pools. Pool rows in the index up to a query's slot must be initialised; only these are
    read.

    Shapes: query ``[n, heads, size]``; keys ``[rows, key heads, size]``, where heads are a multiple of key heads;
    values ``[rows, key heads, value size]``; result ``[n, heads, value size]``. ``scale=None`` is ``size ** -0.5``.
    Only the kernels use ``scratch``, from :func:`scratch_for`; ``size`` is the head dimension.
    """
    # torch's memory-efficient kernel needs aligned rows but does not check their addresses.
    query = query.contiguous()
    mixed = query.new_empty(*query.shape[:2], values.shape[-1])
    step = max(1, GATHERED // max(1, rows.reach * keys.shape[1] * keys.shape[2]))
    with masked_attention():
        for start in range(0, rows.num_single, step):
            span = slice(start, min(start + step, rows.num_single))
            mixed[span] = _attend_single(query[span], keys, values, rows, span, window, scale)
        for cohort in rows.cohorts:
            span = slice(cohort.start, cohort.stop)
            mixed[span] = _attend_cohort(query[span], keys, values, rows, cohort, window, scale)
    return mixed


def _seen(ids: Tensor, slot: Tensor, window: int | None) -> Tensor:
    """Returns the attention mask ``[queries, slots]``; ``ids`` are the pool rows of the slots, -1 for none."""
    slots = torch.arange(ids.shape[-1], device=ids.device)
    seen = (slots <= slot[:, None]) & (ids >= 0)
    return seen if window is None else seen & (slots > slot[:, None] - window)


def _attend_single(
    query: Tensor, keys: Tensor, values: Tensor, rows: LedgerRows, span: slice, window: int | None, scale: float | None
) -> Tensor:
    """Computes single-query rows in one SDPA call: batch = rows, heads = key heads, queries = heads per key head."""
    ids = rows.index[rows.lane[span], rows.iteration[span], : rows.reach]
    seen = _seen(ids, rows.slot[span], window)
    # Unseen slots read the query's own row: an unwritten row may hold NaN, and NaN times zero is NaN.
    ids = torch.where(seen, ids, rows.row[span, None])
    row_keys, row_values = keys[ids].transpose(1, 2), values[ids].transpose(1, 2)
    grouped_query = query.unflatten(1, (keys.shape[1], -1))
    mask = seen[:, None, None].expand(-1, -1, grouped_query.shape[2], -1)
    mixed = scaled_dot_product_attention(grouped_query, row_keys, row_values, attn_mask=mask, scale=scale)
    return mixed.flatten(1, 2).masked_fill(~seen.any(1)[:, None, None], 0.0)


def _attend_cohort(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    cohort: Cohort,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Computes a cohort in one SDPA call: batch = key heads, heads = query heads per key head, queries = rows."""
    ids = rows.index[cohort.lane, cohort.iteration, : cohort.last_slot + 1]
    seen = _seen(ids, rows.slot[cohort.start : cohort.stop], window)
    ids = torch.where(ids >= 0, ids, rows.row[cohort.start])
    grouped_query = query.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
    heads = grouped_query.shape[1]
    row_keys, row_values = (x[ids].transpose(0, 1)[:, None].expand(-1, heads, -1, -1) for x in (keys, values))
    mask = seen[None, None].expand(grouped_query.shape[0], -1, -1, -1)
    mixed = scaled_dot_product_attention(grouped_query, row_keys, row_values, attn_mask=mask, scale=scale)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def enter(qkv: Tensor, keys: Tensor, values: Tensor, row: Tensor, projection: Projection, angles: Angles) -> Tensor:
    """Splits a QKV product, writes keys and values to pool rows ``row`` and returns queries ``[n, heads, size]``.

    Adds the bias and applies norms and rotary embedding in at least float32; results have the pools' precision.
    """
    query, key, value = _apart(qkv, projection)
    query = _rotated(_normed(widened(query), projection.query_norm, projection), projection, angles)
    key = _rotated(_normed(widened(key), projection.key_norm, projection), projection, angles)
    keys[row], values[row] = key.to(keys.dtype), value.to(values.dtype)
    return query.to(keys.dtype)


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    projection: Projection,
    angles: Angles,
    *,
    window: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    dependent: bool = False,
) -> Tensor:
    """Computes :func:`enter`, then :func:`ledger_attention`, for single-query rows: ``[num_single, heads, size]``.

    Each of these rows must attend only to its own keys and to keys of earlier passes. The result is written to ``out``
    (contiguous) if given. ``dependent`` enables programmatic dependent launch, in which the kernel may start before its
    predecessor ends. Then only ``qkv`` may be written by such launches; all other inputs must be written before the
    most recent ordinary launch.
    """
    single = rows.num_single
    first = rows.select(slice(single))
    angles = angles._replace(position=angles.position[:single])
    query = enter(qkv[:single], keys, values, first.row, projection, angles)
    mixed = ledger_attention(query, keys, values, first, window=window, scale=scale)
    return mixed if out is None else out.copy_(mixed.view(out.shape))


def _apart(qkv: Tensor, projection: Projection) -> tuple[Tensor, ...]:
    heads, key_heads, size = projection[:3]
    if projection.bias is not None:
        qkv = widened(qkv) + projection.bias
    if projection.packed:
        return qkv.unflatten(-1, (heads, 3, size)).unbind(-2)
    return qkv.unflatten(-1, (heads + 2 * key_heads, size)).split((heads, key_heads, key_heads), -2)


def _normed(x: Tensor, weight: Tensor | None, projection: Projection) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + projection.epsilon) * weight


def _rotated(x: Tensor, projection: Projection, angles: Angles) -> Tensor:
    """Applies rotary position embedding to the first ``rotary`` elements of each head, pairing their two halves."""
    if not projection.rotary:
        return x
    cos, sin = angles.cos[angles.position][:, None], angles.sin[angles.position][:, None]
    x, rest = x.split((projection.rotary, projection.size - projection.rotary), -1)
    first, second = x.chunk(2, -1)
    return torch.cat((x * cos + torch.cat((-second, first), -1) * sin, rest), -1)
