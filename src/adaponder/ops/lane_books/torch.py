"""The books of decoding lanes: where each stands, which pool row comes next, and what becomes of its token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GOES_ON, NOT_A_NUMBER = -1, -2


class Books(NamedTuple):
    """One entry per lane, int64 unless said otherwise.

    Attributes:
        index: int32 ``[lanes, iterations, slots]``: the pool row that an iteration reads for a slot; -1: none.
        token: the id of the token that is being read.
        place: which token of the sequence that is.
        iteration: at which iteration its next row stands.
        last: the last iteration that is allowed.
        used: how many rows of its pages the lane has used.
        pages: int32 ``[lanes, …]``: the pages from which its rows come, one after the other.
        tick: ``[1]``: which tick of a row of them it is; :func:`begin_rows` counts.
        page_size: rows of a page.
    """

    index: Tensor
    token: Tensor
    place: Tensor
    iteration: Tensor
    last: Tensor
    used: Tensor
    pages: Tensor
    tick: Tensor
    page_size: int


class Begun(NamedTuple):
    """The rows of a tick, int64 ``[n]`` each but for the pool rows, ``[n, width]``."""

    token: Tensor
    place: Tensor
    iteration: Tensor
    last: Tensor
    row: Tensor


def begin_rows(books: Books, lane: Tensor, *, width: int, vanishes: bool) -> Begun:
    """The next row of each of these lanes, entered into the index; for ``width`` slots per token, so many rows."""
    books.tick.add_(1)
    count = torch.arange(width, device=lane.device)
    where = (books.used[lane][:, None] + count).clamp(max=books.pages.shape[1] * books.page_size - 1)
    page = books.pages[lane[:, None], where // books.page_size].long()
    row = page * books.page_size + where % books.page_size
    books.used.index_copy_(0, lane, books.used[lane] + width)
    place, iteration = books.place[lane], books.iteration[lane]
    slot = (place[:, None] * width + count).flatten()
    lanes, iterations = (one.repeat_interleave(width) for one in (lane, iteration))
    book_rows(books.index, lanes, slot, iterations, row.flatten(), vanishes=vanishes)
    return Begun(books.token[lane], place, iteration, books.last[lane], row)


def book_rows(index: Tensor, lane: Tensor, slot: Tensor, iteration: Tensor, row: Tensor, *, vanishes: bool) -> None:
    """Law 3: a row is what its slot shows at its own iteration and at every later one, until a later row is there.

    Where a halted token ``vanishes``, it shows at its own iteration alone. All arguments are ``[n]``.
    """
    number = torch.arange(index.shape[1], device=index.device)
    own, later = number == iteration[:, None], number > iteration[:, None]
    after = -1 if vanishes else row[:, None].int()
    index[lane, :, slot] = torch.where(own, row[:, None].int(), torch.where(later, after, index[lane, :, slot]))


def end_rows(
    books: Books,
    lane: Tensor,
    begun: Begun,
    goes_on: Tensor,
    chosen: Tensor,
    bad: Tensor,
    log: Tensor,
    *,
    places: int,
) -> None:
    """Each lane goes on to its token's next iteration, or to the first one of the token ``chosen``.

    ``places`` is how many tokens a sequence may have: a lane that is done, and not told so yet, stays at the last.
    ``log[tick]`` gets the token of each lane that has one, and :data:`GOES_ON` or, for a choice that is ``bad``,
    :data:`NOT_A_NUMBER`.
    """
    books.token.index_copy_(0, lane, torch.where(goes_on, begun.token, chosen))
    books.place.index_copy_(0, lane, torch.where(goes_on, begun.place, (begun.place + 1).clamp(max=places - 1)))
    books.iteration.index_copy_(0, lane, torch.where(goes_on, begun.iteration + 1, 0))
    said = torch.where(goes_on, GOES_ON, torch.where(bad, NOT_A_NUMBER, chosen))
    log.index_copy_(0, books.tick, said[None])


def resume_rows(first: Tensor, kept: Tensor, lane: Tensor, iteration: Tensor) -> Tensor:
    """What a row begins its pass with: ``first [n, …]`` at iteration 0, else what its lane has ``kept [lanes, …]``."""
    begins = (iteration == 0).view(-1, *[1] * (first.ndim - 1))
    return torch.where(begins, first.to(kept.dtype), kept[lane])


def ponder_rows(embedding: Tensor, expected: Tensor, active: Tensor, probability: Tensor) -> Tensor:
    """Equals :func:`adaponder.halting.pondered`: ``E + (m s) e``."""
    weight = (active * probability).to(embedding.dtype)
    return embedding + weight[..., None] * expected


def force_rows(keep: Tensor, forced: Tensor, lane: Tensor, place: Tensor, iteration: Tensor, last: Tensor) -> Tensor:
    """Who goes on, ``[n, …]`` like the others: by ``forced[lane, place]`` where it names a depth, else by ``keep``.

    Nobody goes on after ``last[lane]``.
    """
    depth = forced[lane, place]
    return torch.where(depth > 0, iteration + 1 < depth, keep) & (iteration < last[lane])
