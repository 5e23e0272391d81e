"""The attention kernels of single-query rows and of cohorts, and the kernel that writes new rows into the pools.

Single-query rows (decode): a program computes one row, one key head and one split of the row's keys. If each query
head has its own keys, every position within a block of keys runs its own online softmax, and all are merged after the
loop, so no step waits for other threads; query heads that share keys are computed by a matrix product. The last program
of a row to finish combines the splits. Cohorts: a program computes a block of queries of one head.
"""

import triton
import triton.language as tl

from adaponder.ops.kernels import allow_next, finite, wait_for_previous


@triton.constexpr_function
def padded(size):
    """Rounds up to a power of two, at least 16: the smallest dimension of ``tl.dot``."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def across(SIZE: tl.constexpr):
    """Returns the offsets within a head, padded: ``[1, size]``."""
    return tl.arange(0, padded(SIZE))[None, :]


@triton.jit
def _read(base, offset, part, mask, bias):
    """Loads elements of the QKV product in float32 and adds the bias, if any."""
    x = tl.load(base + offset + part, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + offset + part, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _angles(positions, row, cos, sin, SIZE: tl.constexpr, ROTARY: tl.constexpr):
    """Returns cosines and sines ``[1, size]`` of a row's position; 1 and 0 for elements that are not rotated."""
    part = across(SIZE)
    cosine, sine = tl.full(part.shape, 1.0, tl.float32), tl.zeros(part.shape, tl.float32)
    if ROTARY > 0:
        at = tl.load(positions + row) * ROTARY + part
        cosine = tl.load(cos + at, mask=part < ROTARY, other=1.0).to(tl.float32)
        sine = tl.load(sin + at, mask=part < ROTARY, other=0.0).to(tl.float32)
    return cosine, sine


@triton.jit
def _turned(
    base, offset, mask, bias, norm, cosine, sine, EPSILON: tl.constexpr, SIZE: tl.constexpr, ROTARY: tl.constexpr
):
    """Loads heads of the QKV product at ``offset [heads, 1]``, then normalises and rotates them: ``[heads, size]``."""
    part = across(SIZE)
    x = _read(base, offset, part, mask, bias)
    if norm is not None:
        power = tl.rsqrt(tl.sum(x * x, 1) / SIZE + EPSILON)[:, None]
        x = x * power * tl.load(norm + part, mask=part < SIZE, other=0.0).to(tl.float32)
    if ROTARY > 0:
        turning = part < ROTARY
        first = part < ROTARY // 2
        other = tl.where(first, part + ROTARY // 2, part - ROTARY // 2)
        y = _read(base, offset, other, mask & turning, bias)
        if norm is not None:
            y = y * power * tl.load(norm + other, mask=turning, other=0.0).to(tl.float32)
        x = x * cosine + tl.where(first, -y, y) * sine
    return x


@triton.jit
def rows_of(ids, base, stride, SIZE: tl.constexpr):
    """Loads the pool rows ``ids``: ``[keys, size]``, zeros for an id of -1."""
    part = across(SIZE)
    mask = (ids >= 0)[:, None] & (part < SIZE)
    return tl.load(base + ids.to(tl.int64)[:, None] * stride + part, mask=mask, other=0.0)


@triton.jit
def _put(x, pool, row, stride, split, SIZE: tl.constexpr):
    """Writes one head of a pool row; does nothing if ``row`` is -1 or this program does not compute the first split."""
    width = tl.where(split == 0, tl.where(row >= 0, SIZE, 0), 0)
    tl.store(pool + row * stride + across(SIZE), x, mask=across(SIZE) < width)


@triton.jit
def _share(slot, split, window, own_rows, SPLITS: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr):
    """Returns (first slot, end) of this program's split of a row's slots, and the number of non-empty splits."""
    begin = 0 if window is None else tl.maximum(slot + 1 - window, 0)
    # A row that is being entered has its own key in registers.
    end = slot + 1 if own_rows is None else slot
    length = tl.maximum(end - begin, 0)
    span = tl.cdiv(tl.maximum(tl.cdiv(length, SPLITS), LEAST), KEYS) * KEYS
    first = begin + split * span
    return first, tl.minimum(first + span, end), tl.maximum(tl.cdiv(length, span), 1)


@triton.jit
def _ids_at(ids, start, end, KEYS: tl.constexpr):
    """Loads the pool row ids of a block of slots from ``start`` on; -1 for slots from ``end`` on."""
    slot = start + tl.arange(0, KEYS)
    return tl.load(ids + slot, mask=slot < end, other=-1)


@triton.jit
def _walk_one(
    q,  # [1, size]
    own,  # [1], score of the row's own key; minus infinity unless this program includes it
    own_value,  # [1, size]
    pool_rows,  # pool row ids of the first block
    k, v,  # keys and values of the first block if blocks are prefetched, else None
    ids, begin, end, keys, values, key_row, value_row, scale,
    SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Returns (maximum score, sum of weights, sum of weighted values) of one head over slots ``begin`` to ``end``."""
    AHEAD: tl.constexpr = k is not None
    top = tl.where(tl.arange(0, KEYS) == 0, own, -float("inf"))
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    sums = total[:, None] * own_value
    coming = _ids_at(ids, begin + KEYS, end, KEYS)
    for start in range(begin, end, KEYS):
        # With AHEAD, the next block is loaded while this one is computed.
        which = coming if AHEAD else pool_rows
        loaded_k, loaded_v = rows_of(which, keys, key_row, SIZE), rows_of(which, values, value_row, SIZE)
        this_k, this_v = (k, v) if AHEAD else (loaded_k, loaded_v)
        later = _ids_at(ids, start + 2 * KEYS, end, KEYS)
        scores = tl.where(pool_rows >= 0, tl.sum(this_k.to(tl.float32) * q, 1) * scale, -float("inf"))
        higher = tl.maximum(top, scores)
        weight, fading = tl.exp2(scores - finite(higher)), tl.exp2(top - finite(higher))
        total = total * fading + weight
        sums = sums * fading[:, None] + weight[:, None] * this_v.to(tl.float32)
        top, pool_rows, coming = higher, coming, later
        if AHEAD:
            k, v = loaded_k, loaded_v
    highest = tl.max(top, 0)
    fading = tl.exp2(top - finite(highest))
    zero = tl.zeros([1], tl.float32)
    return zero + highest, zero + tl.sum(total * fading, 0), tl.sum(sums * fading[:, None], 0)[None, :]


@triton.jit
def _walk_shared(
    q,  # [heads, size], heads that share their keys
    own,  # [heads]
    own_value, ids, begin, end, keys, values, key_row, value_row, scale, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Returns the same as :func:`_walk_one`, for all query heads that share one key head."""
    EXACT: tl.constexpr = "ieee" if keys.dtype.element_ty == tl.float32 else "tf32"
    top = own
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    sums = total[:, None] * own_value
    for start in tl.range(begin, end, KEYS):
        pool_rows = _ids_at(ids, start, end, KEYS)
        k, v = rows_of(pool_rows, keys, key_row, SIZE), rows_of(pool_rows, values, value_row, SIZE)
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision=EXACT) * scale
        scores = tl.where((pool_rows >= 0)[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weight, fading = tl.exp2(scores - finite(higher)[:, None]), tl.exp2(top - finite(higher))
        total = total * fading + tl.sum(weight, 1)
        sums = sums * fading[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=EXACT)
        top = higher
    return top, total, sums


@triton.jit
def _combine(mixed, partial, level, place, parts, GROUPS: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """Combines the splits of a row, each weighted by its normaliser."""
    split, part = tl.arange(0, triton.next_power_of_2(SPLITS)), across(SIZE)
    there = split < parts
    for head in range(place * GROUPS, place * GROUPS + GROUPS):
        # Bypasses the L1 cache, which is not coherent with writes of other programs.
        at = head * SPLITS + split
        levels = tl.load(level + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        weight = tl.exp2(levels - finite(tl.max(levels, 0)))
        total = tl.sum(weight, 0)
        mask = there[:, None] & (part < SIZE)
        results = tl.load(partial + at[:, None] * SIZE + part, mask=mask, other=0.0, cache_modifier=".cg")
        result = tl.sum(results * weight[:, None], 0)[None, :] / tl.where(total == 0.0, 1.0, total)
        tl.store(mixed + head * SIZE + part, result, mask=part < SIZE)


@triton.jit
def _leave(
    mixed, partial, level, counter, top, total, sums,
    place,  # index of the (row, key head) pair
    split, parts, GROUPS: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes a split's result (zeros if the row attends to nothing); the last split to finish combines all splits."""
    divisor = tl.where(total == 0.0, 1.0, total)
    result = sums / divisor[:, None]
    width, part = tl.arange(0, sums.shape[0])[:, None], across(SIZE)
    mask = (width < GROUPS) & (part < SIZE)
    if parts == 1:
        tl.store(mixed + (place * GROUPS + width) * SIZE + part, result, mask=mask)
    elif SPLITS > 1:
        at = (place * GROUPS + width) * SPLITS + split
        tl.store(partial + at * SIZE + part, result, mask=mask)
        tl.store(level + at, (top + tl.log2(divisor))[:, None], mask=width < GROUPS)
        # All threads must have stored before the program counts as finished.
        tl.debug_barrier()
        if tl.atomic_add(counter + place, 1, sem="acq_rel") == parts - 1:
            tl.store(counter + place, 0)
            _combine(mixed, partial, level, place, parts, GROUPS, SPLITS, SIZE)


@triton.jit
def alone_kernel(
    query,  # [n, heads, size], or the QKV product if rows are entered
    keys, values, mixed, index, lanes, slots, iterations,
    own_rows, positions, cos, sin, bias, query_norm, key_norm,  # None unless rows are entered
    partial, level, counter,
    query_row, key_row, value_row, index_lane, index_iteration,
    scale,  # of the scores, over ln 2 because of exp2
    window,
    EPSILON: tl.constexpr, KEY_HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr, AHEAD: tl.constexpr,
    STEP: tl.constexpr,  # stride of heads in the QKV product
    FIRST: tl.constexpr,  # offset of its first key
    NEXT: tl.constexpr,  # offset from a key to its value
    ROTARY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes one row and key head over one split of its keys; the last program to finish combines the splits."""
    allow_next(DEPENDENT)
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin, end, parts = _share(tl.load(slots + row).to(tl.int32), split, window, own_rows, SPLITS, LEAST, KEYS)
    if split >= parts:
        return
    ids = index + tl.load(lanes + row) * index_lane + tl.load(iterations + row) * index_iteration
    keys, values, query = keys + group * SIZE, values + group * SIZE, query + row * query_row
    width, part = tl.arange(0, WIDTH)[:, None], across(SIZE)
    mask = (width < GROUPS) & (part < SIZE)
    pool_rows, first_k, first_v = _ids_at(ids, begin, end, KEYS), None, None
    if AHEAD:
        first_k, first_v = rows_of(pool_rows, keys, key_row, SIZE), rows_of(pool_rows, values, value_row, SIZE)
    cosine, sine = _angles(positions, row, cos, sin, SIZE, ROTARY)
    wait_for_previous(DEPENDENT)
    if own_rows is None:
        q = tl.load(query + (group * GROUPS + width) * SIZE + part, mask=mask, other=0.0).to(tl.float32)
        own, v = tl.full([WIDTH], -float("inf"), tl.float32), tl.zeros_like(part).to(tl.float32)
    else:
        at = tl.arange(0, 1)[:, None] + FIRST + group * STEP
        q = _turned(query, (group * GROUPS + width) * STEP, mask, bias, query_norm, cosine, sine, EPSILON, SIZE, ROTARY)
        k = _turned(query, at, part < SIZE, bias, key_norm, cosine, sine, EPSILON, SIZE, ROTARY)
        k = k.to(keys.dtype.element_ty)
        v = _read(query, at + NEXT, part, part < SIZE, bias).to(values.dtype.element_ty)
        own_row = tl.load(own_rows + row)
        _put(k, keys, own_row, key_row, split, SIZE)
        _put(v, values, own_row, value_row, split, SIZE)
        own = tl.where(split == 0, tl.sum(q * k.to(tl.float32), 1) * scale, -float("inf"))
        v = v.to(tl.float32)
    if GROUPS == 1:
        top, total, sums = _walk_one(
            q, own, v, pool_rows, first_k, first_v, ids, begin, end, keys, values, key_row, value_row, scale, SIZE, KEYS
        )
    else:
        top, total, sums = _walk_shared(q, own, v, ids, begin, end, keys, values, key_row, value_row, scale, SIZE, KEYS)
    place = row * KEY_HEADS + group
    _leave(mixed, partial, level, counter, top, total, sums, place, split, parts, GROUPS, SPLITS, SIZE)


@triton.jit
def enter_kernel(
    qkv, query, keys, values, own_rows, positions, cos, sin, bias, query_norm, key_norm, qkv_row, key_row, value_row,
    EPSILON: tl.constexpr, KEY_HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, NEXT: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates a row's queries and keys; writes queries to ``query``, keys and values to the pools."""
    row = tl.program_id(0).to(tl.int64)
    HEADS: tl.constexpr = GROUPS * KEY_HEADS
    cosine, sine = _angles(positions, row, cos, sin, SIZE, ROTARY)
    qkv += row * qkv_row
    part = across(SIZE)
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    mask = (head < HEADS) & (part < SIZE)
    q = _turned(qkv, head * STEP, mask, bias, query_norm, cosine, sine, EPSILON, SIZE, ROTARY)
    tl.store(query + row * HEADS * SIZE + head * SIZE + part, q, mask=mask)
    group = tl.arange(0, triton.next_power_of_2(KEY_HEADS))[:, None]
    own_row = tl.load(own_rows + row)
    mask = (group < KEY_HEADS) & (part < tl.where(own_row >= 0, SIZE, 0))
    k = _turned(qkv, FIRST + group * STEP, mask, bias, key_norm, cosine, sine, EPSILON, SIZE, ROTARY)
    v = _read(qkv, FIRST + NEXT + group * STEP, part, mask, bias)
    tl.store(keys + own_row * key_row + group * SIZE + part, k, mask=mask)
    tl.store(values + own_row * value_row + group * SIZE + part, v, mask=mask)


@triton.jit
def _block_of_keys(
    q, top, total, sums, pool_rows,
    seen,  # [queries, keys], or None if every query sees every key that exists
    keys, values, key_row, value_row, scale, SIZE: tl.constexpr,
):  # fmt: skip
    """Does one step of the online softmax for a block of queries and a block of keys; returns (top, total, sums)."""
    EXACT: tl.constexpr = "ieee" if keys.dtype.element_ty == tl.float32 else "tf32"
    k = rows_of(pool_rows, keys, key_row, SIZE)
    v = rows_of(pool_rows, values, value_row, SIZE)
    # Absent keys get minus infinity by an addition, which fuses with the scaling.
    scores = (
        tl.dot(q, tl.trans(k), input_precision=EXACT) * scale + tl.where(pool_rows >= 0, 0.0, -float("inf"))[None, :]
    )
    if seen is not None:
        scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = finite(higher)
    weight, fading = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    sums = sums * fading[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=EXACT)
    return higher, total * fading + tl.sum(weight, 1), sums


@triton.jit
def cohort_kernel(
    query, keys, values, mixed, index, slots,
    tiles,  # int32 [tiles, 4]: first row, end of the cohort, lane, iteration
    query_row, key_row, value_row, index_lane, index_iteration, scale, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes one head of a tile's rows, which share lane and iteration, over the pool rows listed in the index."""
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
    # Slots ascend, so without a window all rows see what the first sees: most blocks need no mask.
    lowest, end = tl.load(slots + first).to(tl.int32), tl.max(slot, 0) + 1
    begin, plain = 0, (lowest + 1) // KEYS * KEYS
    if window is not None:
        begin = tl.maximum(lowest + 1 - window, 0) // KEYS * KEYS
        plain = begin
    for start in tl.range(begin, plain, KEYS):
        pool_rows = tl.load(ids + start + lane)
        top, total, sums = _block_of_keys(
            q, top, total, sums, pool_rows, None, keys, values, key_row, value_row, scale, SIZE
        )
    for start in tl.range(plain, end, KEYS):
        column = start + lane
        pool_rows = tl.load(ids + column, mask=column < end, other=-1)
        seen = column[None, :] <= slot[:, None]
        if window is not None:
            seen = seen & (column[None, :] > slot[:, None] - window)
        top, total, sums = _block_of_keys(
            q, top, total, sums, pool_rows, seen, keys, values, key_row, value_row, scale, SIZE
        )
    out = mixed + (row.to(tl.int64)[:, None] * HEADS + head) * SIZE + part
    tl.store(out, sums / tl.where(total == 0.0, 1.0, total)[:, None], mask=mask)
