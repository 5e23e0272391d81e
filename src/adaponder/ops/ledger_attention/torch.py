"""Computes attention through an index: keys and values lie in a pool, and the index names the rows of each query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adaponder.ops.masks import masked_attention
from adaponder.ops.precision import widened

# Most elements of gathered keys at a time.
GATHERED = 1 << 27
# Most parts that the keys of a row are split into, and most programs that keys are ever split for.
MOST_SPLITS, MOST_PROGRAMS = 32, 256


class Cohort(NamedTuple):
    """Describes consecutive rows of a pass that share a lane and an iteration, slots ascending; host integers."""

    start: int
    stop: int
    lane: int
    iteration: int
    last_slot: int


class Tiles(NamedTuple):
    """Splits cohorts into blocks of rows: int32 ``[tiles, 4]``, first row, end of its cohort, lane, iteration.

    A tile that ends where it begins is none.
    """

    block: int
    table: Tensor


class LedgerRows(NamedTuple):
    """Describes the query rows of a pass and the pool rows that each attends to.

    Attributes:
        index: int32 ``[lanes, iterations, slots]``, the pool row that an iteration reads for a slot; -1 for none.
        lane: int64 ``[n]``, like ``slot`` and ``iteration``: where each row stands.
        slot: see ``lane``.
        iteration: see ``lane``.
        row: int64 ``[n]``, the pool row of each row's own keys and values.
        alone: how many rows, from the first, are single queries; the rest lies in cohorts.
        cohorts: the rest, in order.
        longest: a bound on ``slot + 1`` over the rows alone, known on the host; ``None`` for all slots of the index.
        tiles: instead of ``cohorts`` where a CUDA graph reads them from memory; the kernels alone know them. Each row
            is in a tile, also one that sees nothing: its slot is -1.
    """

    index: Tensor
    lane: Tensor
    slot: Tensor
    iteration: Tensor
    row: Tensor
    alone: int
    cohorts: tuple[Cohort, ...] = ()
    longest: int | None = None
    tiles: Tiles | None = None

    @property
    def reach(self) -> int:
        """Returns the number of slots of the index that the rows alone may see."""
        return self.index.shape[2] if self.longest is None else min(self.longest, self.index.shape[2])


class Projection(NamedTuple):
    """Describes the layout of the QKV product ``[n, (heads + 2 key heads) size]`` and its processing before attention.

    Attributes:
        heads: of the queries; a multiple of ``key_heads``.
        key_heads: of keys and values.
        size: of a head.
        packed: ``[heads, 3, size]`` (GPT-NeoX) instead of all queries, then all keys, then all values.
        rotary: how many numbers of a head are turned, from the first; an even number, 0 for none.
        bias: of the product, in its layout; added here if the product came without.
        query_norm: weights ``[size]`` of an RMS norm over each query head before it is turned.
        key_norm: the same for keys.
        epsilon: of the norms.
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


class Turn(NamedTuple):
    """Holds the position of each row and the rotary tables.

    Attributes:
        position: int64 ``[n]``.
        cos: float32 ``[positions, rotary]``, like ``sin``; both halves written out, as Hugging Face does.
        sin: see ``cos``.
    """

    position: Tensor
    cos: Tensor
    sin: Tensor


class Scratch(NamedTuple):
    """Holds memory for programs that share a row's keys: a place for each row, head and part.

    Consecutive calls may share it.

    Attributes:
        partial: float32 ``[places, size]``, results of the parts.
        level: float32 ``[places]``, the base-2 logarithm of what each part was normalised by.
        counter: int32 ``[places]``, for each row and key head how many parts are done; 0 between calls.
    """

    partial: Tensor
    level: Tensor
    counter: Tensor


def scratch_for(rows: int, heads: int, size: int, device: torch.device | str) -> Scratch:
    """Returns enough memory for any pass: keys are split only where few rows leave room for it."""
    places = max(rows, MOST_PROGRAMS) * heads
    partial = torch.empty(places, size, dtype=torch.float32, device=device)
    level = torch.empty(places, dtype=torch.float32, device=device)
    return Scratch(partial, level, torch.zeros(places, dtype=torch.int32, device=device))


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
    """Equals ``softmax(q K^T * scale) V`` over the rows that the index names for each query.

    A query at (lane, slot, iteration) sees the slots up to its own, at most ``window`` of them, where
    ``index[lane, iteration, slot] >= 0``. Its own row is in the index and in the pools already. A query that sees
    nothing gets zeros. Rows that the index names up to a query's slot hold numbers; no others are read.

    Args:
        query: ``[n, heads, size]``.
        keys: ``[rows, key heads, size]``; heads are a multiple of key heads.
        values: ``[rows, key heads, value size]``.
        rows: where the queries stand.
        window: how many slots a query sees at most, its own included; ``None`` for all.
        scale: of the scores; by default one over the root of the size.
        scratch: memory of the kernels, made once by :func:`scratch_for`; unused here.

    Returns:
        ``[n, heads, value size]``.
    """
    # torch's memory-efficient kernel reads rows at addresses it does not check.
    query = query.contiguous()
    mixed = query.new_empty(*query.shape[:2], values.shape[-1])
    reach = rows.reach
    step = max(1, GATHERED // max(1, reach * keys.shape[1] * keys.shape[2]))
    with masked_attention():
        for start in range(0, rows.alone, step):
            part = slice(start, min(start + step, rows.alone))
            mixed[part] = _alone(query[part], keys, values, rows, part, reach, window=window, scale=scale)
        for cohort in rows.cohorts:
            part = slice(cohort.start, cohort.stop)
            mixed[part] = _together(query[part], keys, values, rows, cohort, window=window, scale=scale)
    return mixed


def _seen(ids: Tensor, slot: Tensor, window: int | None) -> Tensor:
    """Returns which slots each query sees, ``[queries, slots]``, of those whose rows are ``ids``."""
    slots = torch.arange(ids.shape[-1], device=ids.device)
    seen = (slots <= slot[:, None]) & (ids >= 0)
    return seen if window is None else seen & (slots > slot[:, None] - window)


def _alone(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    part: slice,
    reach: int,
    *,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Computes queries that have keys of their own; heads that share a key head form one batch entry."""
    ids = rows.index[rows.lane[part], rows.iteration[part], :reach]
    seen = _seen(ids, rows.slot[part], window)
    # What is not seen reads the query's own row, which holds numbers: no NaN of an unwritten row times zero.
    ids = torch.where(seen, ids, rows.row[part, None])
    row_keys, row_values = keys[ids].transpose(1, 2), values[ids].transpose(1, 2)
    grouped_query = query.unflatten(1, (keys.shape[1], -1))
    mask = seen[:, None, None].expand(-1, -1, grouped_query.shape[2], -1)
    mixed = scaled_dot_product_attention(grouped_query, row_keys, row_values, attn_mask=mask, scale=scale)
    return mixed.flatten(1, 2).masked_fill(~seen.any(1)[:, None, None], 0.0)


def _together(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    cohort: Cohort,
    *,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Queries that share their keys: key heads are the batch, heads that share one its heads."""
    ids = rows.index[cohort.lane, cohort.iteration, : cohort.last_slot + 1]
    seen = _seen(ids, rows.slot[cohort.start : cohort.stop], window)
    ids = torch.where(ids >= 0, ids, rows.row[cohort.start])
    grouped_query = query.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
    heads = grouped_query.shape[1]
    row_keys, row_values = (x[ids].transpose(0, 1)[:, None].expand(-1, heads, -1, -1) for x in (keys, values))
    mask = seen[None, None].expand(grouped_query.shape[0], -1, -1, -1)
    mixed = scaled_dot_product_attention(grouped_query, row_keys, row_values, attn_mask=mask, scale=scale)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


# --- rows that enter the ledger ------------------------------------------------------------------------------------


def enter(qkv: Tensor, keys: Tensor, values: Tensor, row: Tensor, projection: Projection, turn: Turn) -> Tensor:
    """Writes the rows' keys and values into the pools at ``row`` and returns their queries ``[n, heads, size]``.

    Computed in float32 at least, whatever the product's precision; stored in the pool's.
    """
    query, key, value = _apart(qkv, projection)
    query = _turned(_normed(widened(query), projection.query_norm, projection), projection, turn)
    key = _turned(_normed(widened(key), projection.key_norm, projection), projection, turn)
    keys[row], values[row] = key.to(keys.dtype), value.to(values.dtype)
    return query.to(keys.dtype)


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
    """Equals :func:`enter` and then ledger attention of the rows alone, ``[alone, heads, size]``.

    Rows alone of one pass must not see one another: the keys of earlier passes are read, and a row's own. ``out`` is
    contiguous and gets the result. ``dependent`` lets the kernel start while the one before it ends: whatever it reads
    but ``qkv`` must have been written before the last launch that was not dependent.
    """
    alone = rows.alone
    first = rows._replace(**{name: getattr(rows, name)[:alone] for name in ("lane", "slot", "iteration", "row")})
    turn = turn._replace(position=turn.position[:alone])
    query = enter(qkv[:alone], keys, values, first.row, projection, turn)
    mixed = ledger_attention(query, keys, values, first._replace(cohorts=()), window=window, scale=scale)
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


def _turned(x: Tensor, projection: Projection, turn: Turn) -> Tensor:
    """Applies rotary positions to the first ``rotary`` numbers of each head, in halves."""
    if not projection.rotary:
        return x
    cos, sin = turn.cos[turn.position][:, None], turn.sin[turn.position][:, None]
    turning, rest = x.split((projection.rotary, projection.size - projection.rotary), -1)
    first, second = turning.chunk(2, -1)
    return torch.cat((turning * cos + torch.cat((-second, first), -1) * sin, rest), -1)
