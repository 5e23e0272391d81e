"""Launches one kernel per lane operation; a program computes one row, window entry, window or block of features."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.dispatch import on_device_of
from adaponder.ops.lanes.torch import Begun, Books, DraftWindows, WindowRows

_BLOCK = 1024


def begin_rows(books: Books, lane: Tensor, *, width: int, vanishes: bool) -> Begun:
    """Allocates each lane's next pool row, like ``begin_rows`` in torch.py, for ``width`` 1."""
    if width != 1:
        raise ValueError(f"width={width}: the kernel is for one slot per token")
    n, (_, iterations, slots) = len(lane), books.index.shape
    begun = Begun(*(torch.empty_like(lane) for _ in range(4)), lane.new_empty(n, 1))
    with on_device_of(lane):
        _begin_kernel[(n,)](
            lane, books.index, books.token, books.place, books.iteration, books.last, books.used, books.pages,
            books.tick, *begun, slots, books.pages.shape[1],
            PAGE=books.page_size, VANISHES=vanishes, ITERATIONS=iterations, BLOCK=triton.next_power_of_2(iterations),
            num_warps=1,
        )  # fmt: skip
    return begun


def end_rows(
    books: Books, lane: Tensor, begun: Begun, active: Tensor, sampled: Tensor, invalid: Tensor, log: Tensor, *,
    max_tokens: int,
) -> None:  # fmt: skip
    """Advances each lane to its next iteration or token, like ``end_rows`` in torch.py."""
    with on_device_of(lane):
        _end_kernel[(len(lane),)](
            lane, books.token, books.place, books.iteration, books.tick, begun.token, begun.place, begun.iteration,
            active, sampled, invalid, log, max_tokens, active.stride(0), log.stride(0), num_warps=1,
        )  # fmt: skip


def resume_rows(initial: Tensor, stored: Tensor, lane: Tensor, iteration: Tensor) -> Tensor:
    """Returns each row's initial or stored state, like ``resume_rows`` in torch.py."""
    initial, out = initial.contiguous(), stored.new_empty(len(lane), *stored.shape[1:])
    size = stored[0].numel()
    with on_device_of(lane):
        grid = (len(lane), triton.cdiv(size, _BLOCK))
        _resume_kernel[grid](initial, stored, lane, iteration, out, size, BLOCK=_BLOCK, num_warps=4)
    return out


def ponder_rows(embedding: Tensor, expected: Tensor, active: Tensor, probability: Tensor) -> Tensor:
    """Returns ``embedding + active * probability * expected``, like ``ponder_rows`` in torch.py; rows ``[n, 1, d]``."""
    out, size = torch.empty_like(embedding), embedding.shape[-1]
    with on_device_of(embedding):
        rows = (x.contiguous() for x in (embedding, expected, active, probability))
        grid = (len(embedding), triton.cdiv(size, _BLOCK))
        _ponder_kernel[grid](*rows, out, size, BLOCK=_BLOCK, num_warps=4)
    return out


def force_rows(active: Tensor, forced: Tensor, lane: Tensor, place: Tensor, iteration: Tensor, last: Tensor) -> Tensor:
    """Applies forced depths to the policy's decision, like ``force_rows`` in torch.py."""
    out = torch.empty_like(lane, dtype=torch.bool)
    rows = [x.contiguous() for x in (active, lane, place, iteration)]
    with on_device_of(lane):
        _force_kernel[(lane.numel(),)](*rows, forced, last, out, forced.stride(0), last.stride(0), num_warps=1)
    return out


@triton.jit
def _force_kernel(active, lanes, places, iterations, forced, last, out, forced_stride, last_stride):
    i = tl.program_id(0)
    lane, iteration = tl.load(lanes + i), tl.load(iterations + i)
    depth = tl.load(forced + lane * forced_stride + tl.load(places + i))
    continues = tl.where(depth > 0, (iteration + 1 < depth).to(tl.int1), tl.load(active + i).to(tl.int1))
    tl.store(out + i, continues & (iteration < tl.load(last + lane * last_stride)))


@triton.jit
def _resume_kernel(initial, stored, lanes, iterations, out, size, BLOCK: tl.constexpr):
    i, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    begins = at * 0 + tl.load(iterations + i) == 0
    new = tl.load(initial + i * size + at, mask=inside & begins, other=0).to(stored.dtype.element_ty)
    old = tl.load(stored + tl.load(lanes + i) * size + at, mask=inside & ~begins, other=0)
    tl.store(out + i * size + at, tl.where(begins, new, old), mask=inside)


@triton.jit
def _ponder_kernel(embedding, expected, active, probability, out, size, BLOCK: tl.constexpr):
    i, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = embedding.dtype.element_ty
    # Rounds like the torch version: the weight, then the product, then the sum.
    weight = tl.where(tl.load(active + i), tl.load(probability + i), 0.0).to(kind).to(tl.float32)
    e = tl.load(expected + i * size + at, mask=at < size, other=0).to(tl.float32)
    x = tl.load(embedding + i * size + at, mask=at < size, other=0).to(tl.float32)
    tl.store(out + i * size + at, (x + (weight * e).to(kind).to(tl.float32)).to(kind), mask=at < size)


@triton.jit
def _book(
    index, lane, iteration, place, row, slots, VANISHES: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
):
    """Enters a pool row into the index at its iteration and all later ones (law 3); with ``VANISHES``, these get -1."""
    number = tl.arange(0, BLOCK)
    shown = tl.where(number == iteration, row, -1) if VANISHES else tl.full((BLOCK,), 0, tl.int64) + row
    at = index + (lane * ITERATIONS + number) * slots + place
    tl.store(at, shown.to(tl.int32), mask=(number >= iteration) & (number < ITERATIONS))


@triton.jit
def _begin_kernel(
    lanes, index, tokens, places, iterations, lasts, used, pages, tick,
    token_out, place_out, iteration_out, last_out, row_out, slots, most_pages,
    PAGE: tl.constexpr, VANISHES: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    if i == 0:
        tl.store(tick, tl.load(tick) + 1)
    lane = tl.load(lanes + i)
    place, iteration, count = tl.load(places + lane), tl.load(iterations + lane), tl.load(used + lane)
    offset = tl.minimum(count, most_pages * PAGE - 1)
    row = tl.load(pages + lane * most_pages + offset // PAGE).to(tl.int64) * PAGE + offset % PAGE
    tl.store(used + lane, count + 1)
    _book(index, lane, iteration, place, row, slots, VANISHES, ITERATIONS, BLOCK)
    tl.store(token_out + i, tl.load(tokens + lane))
    tl.store(place_out + i, place)
    tl.store(iteration_out + i, iteration)
    tl.store(last_out + i, tl.load(lasts + lane))
    tl.store(row_out + i, row)


@triton.jit
def _end_kernel(
    lanes, tokens, places, iterations, tick, token_in, place_in, iteration_in,
    active, sampled, invalid, log, max_tokens, on_stride, log_stride,
):  # fmt: skip
    i = tl.program_id(0)
    lane, on, choice = tl.load(lanes + i), tl.load(active + i * on_stride), tl.load(sampled + i)
    place = tl.load(place_in + i)
    tl.store(tokens + lane, tl.where(on, tl.load(token_in + i), choice))
    tl.store(places + lane, tl.where(on, place, tl.minimum(place + 1, max_tokens - 1)))
    tl.store(iterations + lane, tl.where(on, tl.load(iteration_in + i) + 1, 0))
    outcome = tl.where(on, -1, tl.where(tl.load(invalid + i), -2, choice))
    tl.store(log + tl.load(tick) * log_stride + i, outcome)


def begin_windows(
    books: Books, windows: DraftWindows, lane: Tensor, *, passes: int, vanishes: bool, every: bool | None = None
) -> WindowRows:
    """Assigns pool rows to the tokens of draft windows, like ``begin_windows`` in torch.py with ``every=True``."""
    n, size, (_, iterations, slots) = len(lane), windows.size, books.index.shape
    owner, seat, token, place, iteration, last, row = (lane.new_empty(n * size) for _ in range(7))
    with on_device_of(lane):
        _begin_windows_kernel[(n, size)](
            lane, windows.front, windows.stop, windows.origin, windows.token, windows.iteration,
            windows.halted.view(torch.uint8), books.index, books.last, books.pages, books.tick,
            owner, seat, token, place, iteration, last, row,
            len(books.token) - 1, slots, books.pages.shape[1], passes,
            PAGE=books.page_size, VANISHES=vanishes, ITERATIONS=iterations, BLOCK=triton.next_power_of_2(iterations),
            SIZE=size, num_warps=1,
        )  # fmt: skip
    return WindowRows(owner, seat, Begun(token, place, iteration, last, row[:, None]), None)


def end_windows(
    books: Books, windows: DraftWindows, lane: Tensor, active: Tensor, sampled: Tensor, invalid: Tensor, log: Tensor
) -> None:
    """Advances the draft windows by a tick's results, like ``end_windows`` in torch.py."""
    with on_device_of(lane):
        _end_windows_kernel[(len(lane),)](
            lane, windows.front, windows.stop, windows.final, windows.room, windows.token, windows.choice,
            windows.iteration, windows.halted.view(torch.uint8), books.tick,
            active.contiguous().view(torch.uint8), sampled.contiguous(), invalid.contiguous().view(torch.uint8),
            log, log.stride(0), SIZE=windows.size, BLOCK=triton.next_power_of_2(windows.size), num_warps=1,
        )  # fmt: skip


@triton.jit
def _begin_windows_kernel(
    lanes, fronts, stops, origins, tokens, iterations, halteds, index, lasts, pages, tick,
    owner_out, seat_out, token_out, place_out, iteration_out, last_out, row_out, unused_lane, slots, most_pages, passes,
    PAGE: tl.constexpr, VANISHES: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    i, column = tl.program_id(0), tl.program_id(1)
    if (i == 0) & (column == 0):
        tl.store(tick, tl.load(tick) + 1)
    lane = tl.load(lanes + i)
    front, stop, origin = tl.load(fronts + lane), tl.load(stops + lane), tl.load(origins + lane)
    at, out = lane * SIZE + column, i * SIZE + column
    place = front + (column + SIZE - front % SIZE) % SIZE
    live = (place < stop) & (tl.load(halteds + at) == 0)
    owner = tl.where(live, lane, unused_lane).to(tl.int64)
    iteration = tl.where(live, tl.load(iterations + at), 0)
    offset = tl.where(live, (place - origin) * passes, 0) + iteration
    place = tl.where(live, place, 0)
    row = tl.load(pages + owner * most_pages + offset // PAGE).to(tl.int64) * PAGE + offset % PAGE
    _book(index, owner, iteration, place, row, slots, VANISHES, ITERATIONS, BLOCK)
    tl.store(owner_out + out, owner)
    tl.store(seat_out + out, owner * SIZE + column)
    tl.store(token_out + out, tl.load(tokens + at))
    tl.store(place_out + out, place)
    tl.store(iteration_out + out, iteration)
    tl.store(last_out + out, tl.load(lasts + owner))
    tl.store(row_out + out, row)


@triton.jit
def _end_windows_kernel(
    lanes, fronts, stops, finals, rooms, tokens, choices, iterations, halteds, tick,
    active, sampled, invalid, log, log_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < SIZE
    lane = tl.load(lanes + i)
    at, row = lane * SIZE + column, i * SIZE + column
    before, stop = tl.load(fronts + lane), tl.load(stops + lane)
    place = before + (column + SIZE - before % SIZE) % SIZE
    was_halted = tl.load(halteds + at, mask=inside, other=1) != 0
    live = (place < stop) & (was_halted == 0) & inside
    token, iteration = tl.load(tokens + at, mask=inside, other=0), tl.load(iterations + at, mask=inside, other=0)
    follower = tl.load(tokens + lane * SIZE + (column + 1) % SIZE, mask=inside, other=0)
    choice = tl.load(sampled + row, mask=inside, other=0)
    outcome = tl.where(tl.load(invalid + row, mask=inside, other=0) != 0, -2, choice)
    choice = tl.where(live, choice, tl.load(choices + at, mask=inside, other=0))
    halted = tl.where(live, tl.load(active + row, mask=inside, other=0) == 0, was_halted)

    differs = (choice != follower) & (place + 1 < stop) & inside
    stop = tl.min(tl.where(differs, place + 1, stop), axis=0)
    front = tl.min(tl.where(halted | (place >= stop) | (inside == 0), stop, place), axis=0)
    line = log + tl.load(tick) * log_stride + i * (2 * SIZE + 1)
    tl.store(line + column, outcome, mask=inside)
    tl.store(line + SIZE + column, tl.where(live, iteration, -1), mask=inside)
    tl.store(line + 2 * SIZE, front - before)

    begins = (stop - front < tl.load(rooms + lane)) & (stop <= tl.load(finals + lane))
    begun = begins & (column == stop % SIZE)
    latest = tl.sum(tl.where(column == (stop + SIZE - 1) % SIZE, choice, 0), axis=0)
    tl.store(tokens + at, tl.where(begun, latest, token), mask=inside)
    tl.store(iterations + at, tl.where(begun, 0, iteration + live.to(tl.int64)), mask=inside)
    tl.store(halteds + at, (halted & (begun == 0)).to(tl.uint8), mask=inside)
    tl.store(choices + at, choice, mask=inside)
    tl.store(fronts + lane, front)
    tl.store(stops + lane, stop + begins.to(tl.int64))
