"""The device's own books: where each lane stands, which rows it sees, and where its next row goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaponder.methods import State


class Lanes:
    """One entry per lane, and one more that is nobody's, for rows that only fill up a batch.

    Every tensor keeps its place in memory, so that a CUDA graph can read and write it.

    Attributes:
        index: int32 ``[lanes + 1, iterations, slots]``: the pool row that an iteration reads for a slot; -1: none.
        token: int64 ``[lanes + 1]``: the id of the token that is being read.
        place: which token of the sequence that is.
        iteration: at which iteration its next row stands.
        last: the last iteration that is allowed.
        used: how many rows of its pages the lane has used.
        pages: int32 ``[lanes + 1, …]``: the pages from which its rows come.
        state: what the method keeps of the token, from one iteration to the next.
    """

    def __init__(self, lanes: int, *, passes: int, tokens: int, width: int, page_size: int, like: State):
        device = like.input.device
        self.lanes, self.nobody, self.width, self.page_size = lanes, lanes, width, page_size
        count, slots = lanes + 1, tokens * width
        self.index = torch.full((count, passes, slots), -1, dtype=torch.int32, device=device)

        def numbers() -> Tensor:
            return torch.zeros(count, dtype=torch.long, device=device)

        self.token, self.place, self.iteration, self.last, self.used = (numbers() for _ in range(5))
        # A lane that is done may run a few ticks more before the host has heard of it.
        self.pages = torch.zeros(count, -(-slots * passes // page_size) + _SPARE, dtype=torch.int32, device=device)

        def entries(one: Tensor) -> Tensor:
            return one.new_zeros(count, *one.shape[1:])

        hidden = like.input.new_zeros(count, 1, like.input.shape[-1])
        self.state = State(entries(like.input), hidden, tuple(entries(one) for one in like.carried))
        self._numbers = torch.arange(passes, device=device)

    # --- the host writes ----------------------------------------------------------------------------------------

    def enter(self, entries: Sequence[tuple[int, int, int, int]]) -> None:
        """(lane, token id, its place in the sequence, last iteration): these lanes begin to read a token."""
        lane, token, place, last = self._columns(entries)
        self.token[lane], self.place[lane], self.last[lane] = token, place, last
        self.iteration[lane] = 0
        self.used[lane] = 0

    def add_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """(lane, place in its page table, page)."""
        lane, place, page = self._columns(entries)
        self.pages[lane, place] = page.int()

    def _columns(self, entries: Sequence[tuple[int, ...]]) -> Any:
        return torch.tensor(entries).to(self.token.device, non_blocking=True).unbind(1)

    # --- the device writes --------------------------------------------------------------------------------------

    def next_rows(self, lane: Tensor) -> Tensor:
        """The pool rows ``[n, width]`` that these lanes write next; they count as used."""
        place = self.used[lane][:, None] + torch.arange(self.width, device=lane.device)
        place = place.clamp(max=self.pages.shape[1] * self.page_size - 1)
        page = self.pages[lane[:, None], place // self.page_size].long()
        self.used.index_add_(0, lane, torch.full_like(lane, self.width))
        return page * self.page_size + place % self.page_size

    def book(self, lane: Tensor, slot: Tensor, iteration: Tensor, row: Tensor, *, vanishes: bool) -> None:
        """Law 3: a row is what its slot shows at its own iteration and at every later one, until a later row is there.

        Where a halted token ``vanishes``, it shows at its own iteration alone. All arguments are ``[n]``.
        """
        old = self.index[lane, :, slot]
        own, later = self._numbers == iteration[:, None], self._numbers > iteration[:, None]
        after = -1 if vanishes else row[:, None].int()
        self.index[lane, :, slot] = torch.where(own, row[:, None].int(), torch.where(later, after, old))


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
