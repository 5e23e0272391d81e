"""Launches the attention kernels and chooses their block sizes, key splits and tiles."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from adaponder.ops.dispatch import on_device_of
from adaponder.ops.ledger_attention import kernels
from adaponder.ops.ledger_attention.torch import (
    MOST_PROGRAMS,
    MOST_SPLITS,
    Angles,
    Cohort,
    LedgerRows,
    Projection,
    Scratch,
    Tiles,
    scratch_for,
)

# Measured on an H200 with torch 2.11 (bf16, 16 heads; 1 to 128 rows of 128 to 2,048 keys; cohorts of 1,024).
# Single-query rows: (keys per block, warps, whether to prefetch the next block) by largest head size, then by largest
# number of rows x key heads per multiprocessor: if these are few, blocks are large and keys are split.
ALONE = {
    64: {1: (128, 8, True), 2: (64, 8, True), 4: (32, 4, True), math.inf: (16, 4, True)},
    128: {1: (64, 8, True), 2: (32, 8, True), math.inf: (32, 2, True)},
}
# (keys per block, warps, whether to prefetch) for query heads that share keys.
SHARED = (64, 4, False)
# The fewest keys per split.
LEAST = 128
# Cohorts: (keys per block, warps, stages) by rows per tile.
COHORT = {16: (64, 4, 2), 64: (64, 4, 2)}
INTERPRETED_PROCESSORS = 2


def ledger_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    *,
    window: int | None = None,
    scale: float | None = None,
    scratch: Scratch | None = None,
    splits: int | None = None,
) -> Tensor:
    """Computes attention of each query over the pool rows in ``rows.index``; see ``ledger_attention`` in torch.py."""
    mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend_single(query, keys, values, rows, mixed, (None,) * 7, {}, window, scale, scratch, splits)
    if rows.cohorts or rows.tiles is not None:
        _cohorts(query, keys, values, rows, mixed, window, scale)
    return mixed


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
    splits: int | None = None,
) -> Tensor:
    """Computes :func:`enter` and attention in one kernel, like torch.py; ``splits`` overrides :func:`splits_for`."""
    heads, size = projection.heads, projection.size
    if out is None:
        out = torch.empty(rows.num_single, heads, size, dtype=keys.dtype, device=keys.device)
    options = _entry_options(projection) | {"DEPENDENT": dependent} | ({"launch_pdl": True} if dependent else {})
    entry = (rows.row, *_entry(projection, angles))
    _attend_single(qkv, keys, values, rows, out.view(-1, heads, size), entry, options, window, scale, scratch, splits)
    return out


def enter(qkv: Tensor, keys: Tensor, values: Tensor, row: Tensor, projection: Projection, angles: Angles) -> Tensor:
    """Writes new keys and values into the pools and returns the queries, like ``enter`` in torch.py."""
    query = torch.empty(qkv.shape[0], projection.heads, projection.size, dtype=keys.dtype, device=keys.device)
    if qkv.shape[0]:
        with on_device_of(qkv):
            kernels.enter_kernel[(qkv.shape[0],)](
                qkv, query, keys, values, row, *_entry(projection, angles),
                qkv.stride(0), keys.stride(0), values.stride(0),
                KEY_HEADS=keys.shape[1], GROUPS=projection.heads // keys.shape[1], SIZE=keys.shape[2],
                **_entry_options(projection),
            )  # fmt: skip
    return query


def _entry(projection: Projection, angles: Angles) -> tuple[Tensor | None, ...]:
    angle_pointers = tuple(angles) if projection.rotary else (None, None, None)
    return *angle_pointers, projection.bias, projection.query_norm, projection.key_norm


def _entry_options(projection: Projection) -> dict[str, Any]:
    """Returns constants of the kernels: norm epsilon, rotary size, and the layout of the QKV product.

    In that product, ``STEP`` is the distance between heads, ``FIRST`` the offset of the first key, and ``NEXT`` the
    offset from a key to its value.
    """
    heads, key_heads, size = projection[:3]
    step, first, following = (3, 1, 1) if projection.packed else (1, heads, key_heads)
    layout = {"STEP": step * size, "FIRST": first * size, "NEXT": following * size}
    return {"EPSILON": projection.epsilon, "ROTARY": projection.rotary, **layout}


def _base_2(scale: float | None, size: int) -> float:
    return (1.0 / math.sqrt(size) if scale is None else scale) / math.log(2.0)


def _bounded(window: int | None, rows: LedgerRows) -> int | None:
    """Returns the window, or ``None`` if it covers every slot of the index."""
    return None if window is None or window >= rows.index.shape[2] else window


def _attend_single(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    mixed: Tensor,
    entry: tuple[Tensor | None, ...],
    options: dict[str, Any],
    window: int | None,
    scale: float | None,
    scratch: Scratch | None,
    splits: int | None,
) -> None:
    if not rows.num_single:
        return
    _, key_heads, size = keys.shape
    heads, window = mixed.shape[1], _bounded(window, rows)
    reach = rows.reach if window is None else min(rows.reach, window)
    programs, processors = rows.num_single * key_heads, _processors(keys.device)
    splits = splits_for(programs, processors, reach) if splits is None else splits
    if splits > 1:
        entries = rows.num_single * heads * splits
        scratch = scratch_for(rows.num_single, heads, size, keys.device) if scratch is None else scratch
        if scratch.partial.numel() < entries * size:
            raise ValueError(
                f"scratch.partial={tuple(scratch.partial.shape)} is too small: {entries} entries of {size} needed"
            )
    groups = heads // key_heads
    block, warps, ahead = block_for(size, programs, processors) if groups == 1 else SHARED
    plain = {"EPSILON": 0.0, "ROTARY": 0, "STEP": 0, "FIRST": 0, "NEXT": 0, "DEPENDENT": False}
    shape = {
        "KEY_HEADS": key_heads,
        "GROUPS": groups,
        # tl.dot needs at least 16 rows.
        "WIDTH": 1 if groups == 1 else max(16, triton.next_power_of_2(groups)),
        "SIZE": size,
        "SPLITS": splits,
        "LEAST": LEAST,
        "KEYS": block,
        "AHEAD": ahead,
        "num_warps": warps,
    }
    with on_device_of(query):
        kernels.alone_kernel[(key_heads, splits, rows.num_single)](
            query, keys, values, mixed, rows.index, rows.lane, rows.slot, rows.iteration,
            *entry, *((None, None, None) if scratch is None else scratch),
            query.stride(0), keys.stride(0), values.stride(0), *rows.index.stride()[:2], _base_2(scale, size), window,
            **(plain | options | shape),
        )  # fmt: skip


def splits_for(programs: int, processors: int, reach: int) -> int:
    """Returns into how many splits to divide a row's keys: enough to fill the GPU, at most one per ``LEAST`` keys."""
    return max(1, min(min(processors, MOST_PROGRAMS) // programs, -(-reach // LEAST), MOST_SPLITS))


def block_for(size: int, programs: int, processors: int) -> tuple[int, int, bool]:
    """Returns (keys per block, warps, whether to prefetch the next block) if query heads do not share keys."""
    choices = next(blocks for limit, blocks in ALONE.items() if size <= limit)
    return next(blocks for limit, blocks in choices.items() if programs <= limit * processors)


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _cohorts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    mixed: Tensor,
    window: int | None,
    scale: float | None,
) -> None:
    _, heads, size = query.shape
    block, tiles = rows.tiles or _tiles_on(rows.cohorts, query.device)
    block_keys, warps, stages = COHORT[block]
    with on_device_of(query):
        kernels.cohort_kernel[(heads, tiles.shape[0])](
            query, keys, values, mixed, rows.index, rows.slot, tiles,
            query.stride(0), keys.stride(0), values.stride(0), *rows.index.stride()[:2],
            _base_2(scale, size), _bounded(window, rows),
            HEADS=heads, GROUPS=heads // keys.shape[1], SIZE=size, ROWS=block, KEYS=block_keys,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def block_of(cohorts: tuple[Cohort, ...]) -> int:
    """Returns the rows per tile: the smallest tile of ``COHORT`` that holds the longest cohort, else the largest."""
    longest = max(cohort.stop - cohort.start for cohort in cohorts)
    return next((rows for rows in COHORT if longest <= rows), max(COHORT))


def tiles_of(cohorts: tuple[Cohort, ...], block: int) -> list[tuple[int, int, int, int]]:
    """Lists (first row, end of the cohort, lane, iteration) of each tile.

    The last tiles of cohorts come first, because they attend to the most slots and so take longest.
    """
    tiles = [
        (first, cohort.stop, cohort.lane, cohort.iteration)
        for cohort in cohorts
        for first in range(cohort.start, cohort.stop, block)
    ]
    return sorted(tiles, key=lambda tile: tile[0] - tile[1], reverse=True)


@lru_cache(maxsize=32)
def _tiles_on(cohorts: tuple[Cohort, ...], device: torch.device) -> Tiles:
    """Returns the tiles of the cohorts on the device; cached, because every layer needs them."""
    block = block_of(cohorts)
    table = torch.tensor(tiles_of(cohorts, block), dtype=torch.int32)
    return Tiles(block, table.to(device, non_blocking=True))
