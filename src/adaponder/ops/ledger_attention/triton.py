"""The kernels: rows alone, rows that enter the ledger, and cohorts.

Rows alone: a program owns a row, a key head and a part of the row's keys. Where heads have keys of their own, each key
of a block keeps a softmax of its own while the program walks, and they are merged once, at the end: no step waits for
other threads. Where heads share keys they are the rows of a product. The program of a row that ends last combines the
parts.

Cohorts: a program owns a block of queries and a head, and walks the keys up to the last slot that asks.
"""

import triton
import triton.language as tl


@triton.jit
def _floor(top):
    """No infinity may be taken from itself."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.constexpr_function
def _padded(size):
    """A power of two, and at least what a product needs."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def _across(SIZE: tl.constexpr):  # noqa: N803
    """``[1, size]``, the numbers of a head, padded."""
    return tl.arange(0, _padded(SIZE))[None, :]


@triton.jit
def _read(base, offset, part, mask, bias):
    """Numbers of the QKV product in float32."""
    x = tl.load(base + offset + part, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + offset + part, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _turned(
    base,
    offset,  # [heads, 1], where each head begins
    mask,
    bias,
    norm,
    cos,
    sin,
    EPSILON: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    ROTARY: tl.constexpr,  # noqa: N803
):
    """Heads ``[heads, size]`` of the product, normed and turned."""
    part = _across(SIZE)
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
        along = tl.load(cos + part, mask=turning, other=1.0).to(tl.float32)
        across = tl.load(sin + part, mask=turning, other=0.0).to(tl.float32)
        x = x * along + tl.where(first, -y, y) * across
    return x


@triton.jit
def _rows_of(ids, base, stride, SIZE: tl.constexpr):  # noqa: N803
    """Pool rows ``[keys, size]``; zeros where there is none."""
    part = _across(SIZE)
    mask = (ids >= 0)[:, None] & (part < SIZE)
    return tl.load(base + ids.to(tl.int64)[:, None] * stride + part, mask=mask, other=0.0)


@triton.jit
def _share(slot, split, window, own_rows, SPLITS: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr):  # noqa: N803
    """(first slot, end, number of parts): what a program reads of a row's slots, shared out evenly."""
    begin = 0 if window is None else tl.maximum(slot + 1 - window, 0)
    # A row that enters has its own key in registers.
    end = slot + 1 if own_rows is None else slot
    length = tl.maximum(end - begin, 0)
    span = tl.cdiv(tl.maximum(tl.cdiv(length, SPLITS), LEAST), KEYS) * KEYS
    first = begin + split * span
    return first, tl.minimum(first + span, end), tl.maximum(tl.cdiv(length, span), 1)


@triton.jit
def _walk(
    q,  # [heads, size] that share their keys
    own,  # [heads], scores of the row's own key; minus infinity where another program has it
    own_value,  # [1, size]
    ids,
    begin,
    end,
    keys,
    values,
    key_row,
    value_row,
    scale,
    GROUPS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
):
    """(highest score, sum of weights, weighted values) of each head over a row's keys from ``begin`` to ``end``."""
    lane = tl.arange(0, KEYS)
    # One head: a softmax for each key of a block.
    top = tl.where(lane == 0, own, -float("inf")) if GROUPS == 1 else own
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    sums = total[:, None] * own_value
    EXACT: tl.constexpr = "ieee" if keys.dtype.element_ty == tl.float32 else "tf32"  # noqa: N806
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        found = tl.load(ids + start + lane, mask=start + lane < end, other=-1)
        k = _rows_of(found, keys, key_row, SIZE)
        v = _rows_of(found, values, value_row, SIZE)
        if GROUPS == 1:
            scores = tl.where(found >= 0, tl.sum(k.to(tl.float32) * q, 1) * scale, -float("inf"))
            higher = tl.maximum(top, scores)
            weight, fading = tl.exp2(scores - _floor(higher)), tl.exp2(top - _floor(higher))
            total = total * fading + weight
            sums = sums * fading[:, None] + weight[:, None] * v.to(tl.float32)
        else:
            scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision=EXACT) * scale
            scores = tl.where((found >= 0)[None, :], scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weight, fading = tl.exp2(scores - _floor(higher)[:, None]), tl.exp2(top - _floor(higher))
            total = total * fading + tl.sum(weight, 1)
            sums = sums * fading[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=EXACT)
        top = higher
    if GROUPS == 1:
        highest = tl.max(top, 0)
        fading = tl.exp2(top - _floor(highest))
        sums = tl.sum(sums * fading[:, None], 0)[None, :]
        total = tl.sum(total * fading, 0) + tl.zeros([1], tl.float32)
        top = highest + tl.zeros([1], tl.float32)
    return top, total, sums


@triton.jit
def _combine(
    mixed,
    partial,
    level,
    place,
    parts,
    GROUPS: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    """The parts of a row, weighed by what each was normalised by."""
    split, part = tl.arange(0, triton.next_power_of_2(SPLITS)), _across(SIZE)
    there = split < parts
    for head in range(place * GROUPS, place * GROUPS + GROUPS):
        # Read past the cache of the multiprocessor, which knows nothing of other programs.
        at = head * SPLITS + split
        levels = tl.load(level + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        weight = tl.exp2(levels - _floor(tl.max(levels, 0)))
        total = tl.sum(weight, 0)
        mask = there[:, None] & (part < SIZE)
        results = tl.load(partial + at[:, None] * SIZE + part, mask=mask, other=0.0, cache_modifier=".cg")
        result = tl.sum(results * weight[:, None], 0)[None, :] / tl.where(total == 0.0, 1.0, total)
        tl.store(mixed + head * SIZE + part, result, mask=part < SIZE)


@triton.jit
def _leave(
    mixed,
    partial,
    level,
    counter,
    top,
    total,
    sums,
    place,  # number of the row and key head
    split,
    parts,
    GROUPS: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    """The result, or a part of it for the program that ends last; zeros for a row that sees nothing."""
    divisor = tl.where(total == 0.0, 1.0, total)
    result = sums / divisor[:, None]
    width, part = tl.arange(0, sums.shape[0])[:, None], _across(SIZE)
    mask = (width < GROUPS) & (part < SIZE)
    if parts == 1:
        tl.store(mixed + (place * GROUPS + width) * SIZE + part, result, mask=mask)
    elif SPLITS > 1:
        at = (place * GROUPS + width) * SPLITS + split
        tl.store(partial + at * SIZE + part, result, mask=mask)
        tl.store(level + at, (top + tl.log2(divisor))[:, None], mask=width < GROUPS)
        # All threads have stored before the program counts as done.
        tl.debug_barrier()
        if tl.atomic_add(counter + place, 1, sem="acq_rel") == parts - 1:
            tl.store(counter + place, 0)
            _combine(mixed, partial, level, place, parts, GROUPS, SPLITS, SIZE)


@triton.jit
def alone_kernel(
    query,  # [n, heads, size], or the QKV product of rows that enter
    keys,
    values,
    mixed,
    index,
    lanes,
    slots,
    iterations,
    own_rows,  # of rows that enter
    positions,
    cos,
    sin,
    bias,
    query_norm,
    key_norm,
    partial,
    level,
    counter,
    query_row,
    key_row,
    value_row,
    index_lane,
    index_iteration,
    scale,  # of the scores, in base-2 exponents
    window,
    EPSILON: tl.constexpr,  # noqa: N803
    KEY_HEADS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    PACKED: tl.constexpr,  # noqa: N803
    ROTARY: tl.constexpr,  # noqa: N803
    DEPENDENT: tl.constexpr,  # noqa: N803
):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int32)
    begin, end, parts = _share(slot, split, window, own_rows, SPLITS, LEAST, KEYS)
    if split >= parts:
        return
    ids = index + tl.load(lanes + row) * index_lane + tl.load(iterations + row) * index_iteration
    keys, values, query = keys + group * SIZE, values + group * SIZE, query + row * query_row
    width, part = tl.arange(0, WIDTH)[:, None], _across(SIZE)
    mask = (width < GROUPS) & (part < SIZE)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if own_rows is None:
        q = tl.load(query + (group * GROUPS + width) * SIZE + part, mask=mask, other=0.0).to(tl.float32)
        own, v = tl.full([WIDTH], -float("inf"), tl.float32), tl.zeros_like(part).to(tl.float32)
    else:
        if ROTARY > 0:
            turn = tl.load(positions + row) * ROTARY
            cos, sin = cos + turn, sin + turn
        STEP: tl.constexpr = 3 * SIZE if PACKED else SIZE  # noqa: N806
        FIRST: tl.constexpr = SIZE if PACKED else GROUPS * KEY_HEADS * SIZE  # noqa: N806
        NEXT: tl.constexpr = SIZE if PACKED else KEY_HEADS * SIZE  # noqa: N806
        at = tl.arange(0, 1)[:, None] + FIRST + group * STEP
        q = _turned(query, (group * GROUPS + width) * STEP, mask, bias, query_norm, cos, sin, EPSILON, SIZE, ROTARY)
        k = _turned(query, at, part < SIZE, bias, key_norm, cos, sin, EPSILON, SIZE, ROTARY).to(keys.dtype.element_ty)
        v = _read(query, at + NEXT, part, part < SIZE, bias).to(values.dtype.element_ty)
        own_row = tl.load(own_rows + row)
        stored = part < tl.where(split == 0, tl.where(own_row >= 0, SIZE, 0), 0)
        tl.store(keys + own_row * key_row + part, k, mask=stored)
        tl.store(values + own_row * value_row + part, v, mask=stored)
        own = tl.where(split == 0, tl.sum(q * k.to(tl.float32), 1) * scale, -float("inf"))
        v = v.to(tl.float32)
    top, total, sums = _walk(
        q, own, v, ids, begin, end, keys, values, key_row, value_row, scale, GROUPS, SIZE, KEYS, STAGES
    )
    place = row * KEY_HEADS + group
    _leave(mixed, partial, level, counter, top, total, sums, place, split, parts, GROUPS, SPLITS, SIZE)


@triton.jit
def enter_kernel(
    qkv,
    query,
    keys,
    values,
    own_rows,
    positions,
    cos,
    sin,
    bias,
    query_norm,
    key_norm,
    qkv_row,
    key_row,
    value_row,
    EPSILON: tl.constexpr,  # noqa: N803
    KEY_HEADS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    PACKED: tl.constexpr,  # noqa: N803
    ROTARY: tl.constexpr,  # noqa: N803
):
    """A program owns a row: its queries are turned, its keys and values go into the pools."""
    row = tl.program_id(0).to(tl.int64)
    HEADS: tl.constexpr = GROUPS * KEY_HEADS  # noqa: N806
    STEP: tl.constexpr = 3 * SIZE if PACKED else SIZE  # noqa: N806
    FIRST: tl.constexpr = SIZE if PACKED else HEADS * SIZE  # noqa: N806
    NEXT: tl.constexpr = SIZE if PACKED else KEY_HEADS * SIZE  # noqa: N806
    if ROTARY > 0:
        turn = tl.load(positions + row) * ROTARY
        cos, sin = cos + turn, sin + turn
    qkv += row * qkv_row
    part = _across(SIZE)
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    mask = (head < HEADS) & (part < SIZE)
    q = _turned(qkv, head * STEP, mask, bias, query_norm, cos, sin, EPSILON, SIZE, ROTARY)
    tl.store(query + row * HEADS * SIZE + head * SIZE + part, q, mask=mask)
    group = tl.arange(0, triton.next_power_of_2(KEY_HEADS))[:, None]
    own_row = tl.load(own_rows + row)
    mask = (group < KEY_HEADS) & (part < tl.where(own_row >= 0, SIZE, 0))
    k = _turned(qkv, FIRST + group * STEP, mask, bias, key_norm, cos, sin, EPSILON, SIZE, ROTARY)
    v = _read(qkv, FIRST + NEXT + group * STEP, part, mask, bias)
    tl.store(keys + own_row * key_row + group * SIZE + part, k, mask=mask)
    tl.store(values + own_row * value_row + group * SIZE + part, v, mask=mask)


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
    k = _rows_of(found, keys, key_row, SIZE)
    v = _rows_of(found, values, value_row, SIZE)
    # Adding is free where a product is scaled: an absent key has minus infinity.
    scores = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale + tl.where(found >= 0, 0.0, -float("inf"))[None, :]
    if seen is not None:
        scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    floor = _floor(higher)
    weight, fading = tl.exp2(scores - floor[:, None]), tl.exp2(top - floor)
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
    tile, head = tiles + tl.program_id(1) * 4, tl.program_id(0)
    first, stop = tl.load(tile), tl.load(tile + 1)
    ids = index + tl.load(tile + 2) * index_lane + tl.load(tile + 3) * index_iteration
    keys, values = keys + (head // GROUPS) * SIZE, values + (head // GROUPS) * SIZE
    row, part, lane = first + tl.arange(0, ROWS), _across(SIZE), tl.arange(0, KEYS)
    mask = (row < stop)[:, None] & (part < SIZE)
    slot = tl.load(slots + row, mask=row < stop, other=-1).to(tl.int32)
    q = tl.load(query + row.to(tl.int64)[:, None] * query_row + head * SIZE + part, mask=mask, other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, _padded(SIZE)], tl.float32)
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
