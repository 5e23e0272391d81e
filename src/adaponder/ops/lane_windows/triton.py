"""The windows of decoding lanes as one kernel each: a program per token of a window, and one per window."""

# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.fused import on_device_of
from adaponder.ops.lane_books.torch import Begun, Books
from adaponder.ops.lane_windows.torch import DraftWindows, WindowRows


def begin_windows(books: Books, windows: DraftWindows, lane: Tensor, *, passes: int, vanishes: bool) -> WindowRows:
    """Equals :func:`adaponder.ops.lane_windows.torch.begin_windows` with a row of every place."""
    n, size, (_, iterations, slots) = len(lane), windows.size, books.index.shape
    owner, seat, token, place, iteration, last, row = (lane.new_empty(n * size) for _ in range(7))
    with on_device_of(lane):
        _begin_kernel[(n, size)](
            lane,
            windows.front,
            windows.stop,
            windows.origin,
            windows.token,
            windows.iteration,
            windows.halted.view(torch.uint8),
            books.index,
            books.last,
            books.pages,
            books.tick,
            owner,
            seat,
            token,
            place,
            iteration,
            last,
            row,
            len(books.token) - 1,
            slots,
            books.pages.shape[1],
            passes,
            PAGE=books.page_size,
            VANISHES=vanishes,
            ITERATIONS=iterations,
            BLOCK=triton.next_power_of_2(iterations),
            SIZE=size,
            num_warps=1,
        )
    return WindowRows(owner, seat, Begun(token, place, iteration, last, row[:, None]), None)


def end_windows(
    books: Books, windows: DraftWindows, lane: Tensor, goes_on: Tensor, chosen: Tensor, bad: Tensor, log: Tensor
) -> None:
    """Equals :func:`adaponder.ops.lane_windows.torch.end_windows`."""
    with on_device_of(lane):
        _end_kernel[(len(lane),)](
            lane,
            windows.front,
            windows.stop,
            windows.final,
            windows.room,
            windows.token,
            windows.choice,
            windows.iteration,
            windows.halted.view(torch.uint8),
            books.tick,
            goes_on.contiguous().view(torch.uint8),
            chosen.contiguous(),
            bad.contiguous().view(torch.uint8),
            log,
            log.stride(0),
            SIZE=windows.size,
            BLOCK=triton.next_power_of_2(windows.size),
            num_warps=1,
        )


@triton.jit
def _begin_kernel(
    lanes,
    fronts,
    stops,
    origins,
    tokens,
    iterations,
    halteds,
    index,
    lasts,
    pages,
    tick,
    owner_out,
    seat_out,
    token_out,
    place_out,
    iteration_out,
    last_out,
    row_out,
    nobody,
    slots,
    most_pages,
    passes,
    PAGE: tl.constexpr,
    VANISHES: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    i, column = tl.program_id(0), tl.program_id(1)
    if (i == 0) & (column == 0):
        tl.store(tick, tl.load(tick) + 1)
    lane = tl.load(lanes + i)
    front, stop, origin = tl.load(fronts + lane), tl.load(stops + lane), tl.load(origins + lane)
    at, out = lane * SIZE + column, i * SIZE + column
    place = front + (column + SIZE - front % SIZE) % SIZE
    live = (place < stop) & (tl.load(halteds + at) == 0)
    owner = tl.where(live, lane, nobody).to(tl.int64)
    iteration = tl.where(live, tl.load(iterations + at), 0)
    where = tl.where(live, (place - origin) * passes, 0) + iteration
    place = tl.where(live, place, 0)
    row = tl.load(pages + owner * most_pages + where // PAGE).to(tl.int64) * PAGE + where % PAGE
    number = tl.arange(0, BLOCK)
    shown = tl.where(number == iteration, row, -1) if VANISHES else tl.full((BLOCK,), 0, tl.int64) + row
    tl.store(
        index + (owner * ITERATIONS + number) * slots + place,
        shown.to(tl.int32),
        mask=(number >= iteration) & (number < ITERATIONS),
    )
    tl.store(owner_out + out, owner)
    tl.store(seat_out + out, owner * SIZE + column)
    tl.store(token_out + out, tl.load(tokens + at))
    tl.store(place_out + out, place)
    tl.store(iteration_out + out, iteration)
    tl.store(last_out + out, tl.load(lasts + owner))
    tl.store(row_out + out, row)


@triton.jit
def _end_kernel(
    lanes,
    fronts,
    stops,
    finals,
    rooms,
    tokens,
    choices,
    iterations,
    halteds,
    tick,
    goes_on,
    chosen,
    bad,
    log,
    log_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    choice = tl.load(chosen + row, mask=inside, other=0)
    said = tl.where(tl.load(bad + row, mask=inside, other=0) != 0, -2, choice)
    choice = tl.where(live, choice, tl.load(choices + at, mask=inside, other=0))
    halted = tl.where(live, tl.load(goes_on + row, mask=inside, other=0) == 0, was_halted)

    differs = (choice != follower) & (place + 1 < stop) & inside
    stop = tl.min(tl.where(differs, place + 1, stop), axis=0)
    front = tl.min(tl.where(halted | (place >= stop) | (inside == 0), stop, place), axis=0)
    line = log + tl.load(tick) * log_stride + i * (2 * SIZE + 1)
    tl.store(line + column, said, mask=inside)
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
