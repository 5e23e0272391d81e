"""The books of decoding lanes: where each stands, which pool row comes next, and what becomes of its token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        page_size: rows of a page.
    """

    index: Tensor
    token: Tensor
    place: Tensor
    iteration: Tensor
    last: Tensor
    used: Tensor
    pages: Tensor
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


def end_rows(books: Books, lane: Tensor, begun: Begun, goes_on: Tensor, chosen: Tensor, *, places: int) -> None:
    """Each lane goes on to its token's next iteration, or to the first one of the token ``chosen``.

    ``places`` is how many tokens a sequence may have: a lane that is done, and not told so yet, stays at the last.
    """
    books.token.index_copy_(0, lane, torch.where(goes_on, begun.token, chosen))
    books.place.index_copy_(0, lane, torch.where(goes_on, begun.place, (begun.place + 1).clamp(max=places - 1)))
    books.iteration.index_copy_(0, lane, torch.where(goes_on, begun.iteration + 1, 0))
