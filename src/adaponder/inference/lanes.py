"""The device's own books: where each lane stands, which rows it sees, and where its next row goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaponder.methods import State
from adaponder.ops.lane_books import Books, resume_rows


class Lanes:
    """One entry per lane, and one more that is nobody's, for rows that only fill up a batch.

    Every tensor keeps its place in memory, so that a CUDA graph can read and write it.

    Attributes:
        books: where each lane stands, and which rows it sees.
        state: what the method keeps of the lane's token, from one iteration to the next; with a window of several
            tokens, of each of them.
        places: how many tokens a sequence may have.
    """

    def __init__(
        self,
        lanes: int,
        *,
        passes: int,
        tokens: int,
        width: int,
        page_size: int,
        ahead: int,
        like: State,
        window: int = 1,
    ):
        device, count, slots = like.input.device, lanes + 1, tokens * width
        self.nobody, self.places, self.width = lanes, tokens, width

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(count, *shape, dtype=torch.int32 if shape else torch.long, device=device)

        # A lane that is done may run so many rows more before the host has heard of it, and is given pages for them.
        pages = -(-(slots * passes + ahead) // page_size) + 1
        self.books = Books(
            index=numbers(passes, slots).fill_(-1),
            token=numbers(),
            place=numbers(),
            iteration=numbers(),
            last=numbers(),
            used=numbers(),
            pages=numbers(pages),
            tick=torch.zeros(1, dtype=torch.long, device=device),
            page_size=page_size,
        )

        def entries(one: Tensor) -> Tensor:
            return one.new_zeros(count * window, *one.shape[1:])

        hidden = like.input.new_zeros(count * window, 1, like.input.shape[-1])
        self.state = State(entries(like.input), hidden, tuple(entries(one) for one in like.carried))

    @property
    def index(self) -> Tensor:
        return self.books.index

    def enter(self, entries: Sequence[tuple[int, int, int, int]]) -> None:
        """(lane, token id, its place in the sequence, last iteration): these lanes begin to read a token."""
        books, (lane, token, place, last) = self.books, self._columns(entries)
        books.token[lane], books.place[lane], books.last[lane] = token, place, last
        books.iteration.index_fill_(0, lane, 0)
        books.used.index_fill_(0, lane, 0)

    def add_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """(lane, index in its page table, page)."""
        lane, index, page = self._columns(entries)
        self.books.pages[lane, index] = page.int()

    def _columns(self, entries: Sequence[tuple[int, ...]]) -> Any:
        return torch.tensor(entries).to(self.books.token.device, non_blocking=True).unbind(1)


def rows_of(state: State, which: Any) -> State:
    """Some rows of a state, without their hidden states."""
    return State(state.input[which], carried=tuple(one[which] for one in state.carried))


def resumed(first: State, kept: State, lane: Tensor, iteration: Tensor) -> State:
    """What rows begin a pass with: ``first`` at iteration 0, else what their lanes have ``kept``."""
    pairs = zip(first.carried, kept.carried, strict=True)
    return State(
        resume_rows(first.input, kept.input, lane, iteration),
        carried=tuple(resume_rows(one, other, lane, iteration) for one, other in pairs),
    )


def joined(states: Sequence[State]) -> State:
    """The rows of several states, one after the other, without their hidden states."""
    if len(states) == 1:
        return states[0]
    carried = zip(*(state.carried for state in states), strict=True)
    return State(
        torch.cat([state.input for state in states]),
        carried=tuple(torch.cat(parts) for parts in carried),
    )


def store(state: State, lane: Tensor, new: State, hidden: Tensor | None) -> None:
    """Writes rows into the lanes' own state; ``hidden`` too where it is given."""
    state.input.index_copy_(0, lane, new.input.to(state.input.dtype))
    if hidden is not None:
        state.hidden.index_copy_(0, lane, hidden.to(state.hidden.dtype))
    for mine, one in zip(state.carried, new.carried, strict=True):
        mine.index_copy_(0, lane, one.to(mine.dtype))
