"""The kernel of cohorts: a program owns a block of queries and a head, and walks the keys up to its last slot."""

import triton
import triton.language as tl

from adaponder.ops.ledger_attention.triton import across, finite, padded, rows_of


@triton.jit
def _block_of_keys(
    q,
    top,
    total,
    sums,
    found,
    seen,  # [queries, keys], or None where all see all that is there
    keys,
    values,
    key_row,
    value_row,
    scale,
    SIZE: tl.constexpr,  # noqa: N803
):
    """One step of the online softmax of a block of queries."""
    EXACT: tl.constexpr = "ieee" if keys.dtype.element_ty == tl.float32 else "tf32"  # noqa: N806
    k = rows_of(found, keys, key_row, SIZE)
    v = rows_of(found, values, value_row, SIZE)
    # Adding is free where a product is scaled: an absent key has minus infinity.
    scores = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale + tl.where(found >= 0, 0.0, -float("inf"))[None, :]
    if seen is not None:
        scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = finite(higher)
    weight, fading = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    sums = sums * fading[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=EXACT)
    return higher, total * fading + tl.sum(weight, 1), sums


@triton.jit
def cohort_kernel(
    query,
    keys,
    values,
    mixed,
    index,
    slots,
    tiles,  # [tiles, 4]: first row, end of the cohort, lane, iteration
    query_row,
    key_row,
    value_row,
    index_lane,
    index_iteration,
    scale,
    window,
    HEADS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
):
    """Attention of a tile's rows, all of one lane and iteration, and one head over the rows that the index names."""
    tile, head = tiles + tl.program_id(1) * 4, tl.program_id(0)
    first, stop = tl.load(tile), tl.load(tile + 1)
    if first >= stop:
        return
    ids = index + tl.load(tile + 2) * index_lane + tl.load(tile + 3) * index_iteration
    keys, values = keys + (head // GROUPS) * SIZE, values + (head // GROUPS) * SIZE
    row, part, lane = first + tl.arange(0, ROWS), across(SIZE), tl.arange(0, KEYS)
    mask = (row < stop)[:, None] & (part < SIZE)
    slot = tl.load(slots + row, mask=row < stop, other=-1).to(tl.int32)
    q = tl.load(query + row.to(tl.int64)[:, None] * query_row + head * SIZE + part, mask=mask, other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, padded(SIZE)], tl.float32)
    # Slots ascend: what the first row sees, all see, and most blocks are such.
    lowest, end = tl.load(slots + first).to(tl.int32), tl.max(slot, 0) + 1
    begin, plain = 0, (lowest + 1) // KEYS * KEYS
    if window is not None:
        begin = tl.maximum(lowest + 1 - window, 0) // KEYS * KEYS
        plain = begin
    for start in tl.range(begin, plain, KEYS):
        found = tl.load(ids + start + lane)
        top, total, sums = _block_of_keys(
            q, top, total, sums, found, None, keys, values, key_row, value_row, scale, SIZE
        )
    for start in tl.range(plain, end, KEYS):
        column = start + lane
        found = tl.load(ids + column, mask=column < end, other=-1)
        seen = column[None, :] <= slot[:, None]
        if window is not None:
            seen = seen & (column[None, :] > slot[:, None] - window)
        top, total, sums = _block_of_keys(
            q, top, total, sums, found, seen, keys, values, key_row, value_row, scale, SIZE
        )
    out = mixed + (row.to(tl.int64)[:, None] * HEADS + head) * SIZE + part
    tl.store(out, sums / tl.where(total == 0.0, 1.0, total)[:, None], mask=mask)
