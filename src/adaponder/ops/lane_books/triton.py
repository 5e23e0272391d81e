"""The books of decoding lanes as two kernels, one program per row; one slot per token."""

# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.fused import on_device_of
from adaponder.ops.lane_books.torch import Begun, Books


def begin_rows(books: Books, lane: Tensor, *, width: int, vanishes: bool) -> Begun:
    """Equals :func:`adaponder.ops.lane_books.torch.begin_rows`, for ``width`` 1."""
    if width != 1:
        raise ValueError(f"width={width}: the kernel is for one slot per token")
    n, (_, iterations, slots) = len(lane), books.index.shape
    begun = Begun(*(torch.empty_like(lane) for _ in range(4)), lane.new_empty(n, 1))
    with on_device_of(lane):
        _begin_kernel[(n,)](
            lane,
            books.index,
            books.token,
            books.place,
            books.iteration,
            books.last,
            books.used,
            books.pages,
            *begun,
            slots,
            books.pages.shape[1],
            PAGE=books.page_size,
            VANISHES=vanishes,
            ITERATIONS=iterations,
            BLOCK=triton.next_power_of_2(iterations),
            num_warps=1,
        )
    return begun


def end_rows(books: Books, lane: Tensor, begun: Begun, goes_on: Tensor, chosen: Tensor, *, places: int) -> None:
    """Equals :func:`adaponder.ops.lane_books.torch.end_rows`."""
    with on_device_of(lane):
        _end_kernel[(len(lane),)](
            lane,
            books.token,
            books.place,
            books.iteration,
            begun.token,
            begun.place,
            begun.iteration,
            goes_on,
            chosen,
            places,
            num_warps=1,
        )


@triton.jit
def _begin_kernel(
    lanes,
    index,
    tokens,
    places,
    iterations,
    lasts,
    used,
    pages,
    token_out,
    place_out,
    iteration_out,
    last_out,
    row_out,
    slots,
    most_pages,
    PAGE: tl.constexpr,
    VANISHES: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    lane = tl.load(lanes + i)
    place, iteration, count = tl.load(places + lane), tl.load(iterations + lane), tl.load(used + lane)
    where = tl.minimum(count, most_pages * PAGE - 1)
    row = tl.load(pages + lane * most_pages + where // PAGE).to(tl.int64) * PAGE + where % PAGE
    tl.store(used + lane, count + 1)
    number = tl.arange(0, BLOCK)
    shown = tl.where(number == iteration, row, -1) if VANISHES else tl.full((BLOCK,), 0, tl.int64) + row
    tl.store(
        index + (lane * ITERATIONS + number) * slots + place,
        shown.to(tl.int32),
        mask=(number >= iteration) & (number < ITERATIONS),
    )
    tl.store(token_out + i, tl.load(tokens + lane))
    tl.store(place_out + i, place)
    tl.store(iteration_out + i, iteration)
    tl.store(last_out + i, tl.load(lasts + lane))
    tl.store(row_out + i, row)


@triton.jit
def _end_kernel(lanes, tokens, places, iterations, token_in, place_in, iteration_in, goes_on, chosen, most):
    i = tl.program_id(0)
    lane, on = tl.load(lanes + i), tl.load(goes_on + i)
    place = tl.load(place_in + i)
    tl.store(tokens + lane, tl.where(on, tl.load(token_in + i), tl.load(chosen + i)))
    tl.store(places + lane, tl.where(on, place, tl.minimum(place + 1, most - 1)))
    tl.store(iterations + lane, tl.where(on, tl.load(iteration_in + i) + 1, 0))
