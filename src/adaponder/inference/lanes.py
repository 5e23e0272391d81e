"""The device's own books: where each lane stands, which rows it sees, and where its next row goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaponder.methods import State
from adaponder.ops.lane_books import Books


class Lanes:
    """One entry per lane, and one more that is nobody's, for rows that only fill up a batch.

    Every tensor keeps its place in memory, so that a CUDA graph can read and write it.

    Attributes:
        books: where each lane stands, and which rows it sees.
        state: what the method keeps of the lane's token, from one iteration to the next.
        places: how many tokens a sequence may have.
    """

    def __init__(self, lanes: int, *, passes: int, tokens: int, width: int, page_size: int, like: State):
        device, count, slots = like.input.device, lanes + 1, tokens * width
        self.nobody, self.places, self.width = lanes, tokens, width

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(count, *shape, dtype=torch.int32 if shape else torch.long, device=device)

        # A lane that is done may run a few ticks more before the host has heard of it.
        pages = -(-slots * passes // page_size) + _SPARE
        self.books = Books(
            index=numbers(passes, slots).fill_(-1),
            token=numbers(),
            place=numbers(),
            iteration=numbers(),
            last=numbers(),
            used=numbers(),
            pages=numbers(pages),
            page_size=page_size,
        )

        def entries(one: Tensor) -> Tensor:
            return one.new_zeros(count, *one.shape[1:])

        hidden = like.input.new_zeros(count, 1, like.input.shape[-1])
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
        """(lane, place in its page table, page)."""
        lane, place, page = self._columns(entries)
        self.books.pages[lane, place] = page.int()

    def _columns(self, entries: Sequence[tuple[int, ...]]) -> Any:
        return torch.tensor(entries).to(self.books.token.device, non_blocking=True).unbind(1)


_SPARE = 16


def rows_of(state: State, which: Any) -> State:
    """Some rows of a state."""
    return State(state.input[which], state.hidden[which], tuple(one[which] for one in state.carried))


def joined(states: Sequence[State]) -> State:
    """The rows of several states, one after the other."""
    if len(states) == 1:
        return states[0]
    carried = zip(*(state.carried for state in states), strict=True)
    return State(
        torch.cat([state.input for state in states]),
        torch.cat([state.hidden for state in states]),
        tuple(torch.cat(parts) for parts in carried),
    )


def chosen(mask: Tensor, new: State, old: State) -> State:
    """Row by row ``new`` where ``mask [n]`` says so, else ``old``; the hidden state is the old one."""

    def pick(mine: Tensor, other: Tensor) -> Tensor:
        return torch.where(mask.view(-1, *[1] * (mine.ndim - 1)), mine, other)

    carried = tuple(pick(mine, other) for mine, other in zip(new.carried, old.carried, strict=True))
    return State(pick(new.input, old.input), old.hidden, carried)


def store(state: State, lane: Tensor, new: State) -> None:
    """Writes rows into the lanes' own state."""
    state.input.index_copy_(0, lane, new.input.to(state.input.dtype))
    state.hidden.index_copy_(0, lane, new.hidden.to(state.hidden.dtype))
    for mine, one in zip(state.carried, new.carried, strict=True):
        mine.index_copy_(0, lane, one.to(mine.dtype))
