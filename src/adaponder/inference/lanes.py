"""Holds the state of all lanes on the device: token, iteration, KV index, block table and the method's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaponder.inference.config import EngineShape
from adaponder.methods import State
from adaponder.ops.lanes import Books, resume_rows


class Lanes:
    """Holds one entry per lane; the last entry, number ``padding``, is for padding rows.

    Every tensor keeps its address, so that CUDA graphs can read and write it. ``like`` is an example of the method's
    state, for shapes and dtypes.

    Attributes:
        books: the token and iteration of each lane, its block table, and the index of the rows it attends to.
        state: the method's state of each lane's current token, or of every token in its draft window.
    """

    def __init__(self, shape: EngineShape, like: State):
        count, slots = shape.lanes + 1, shape.tokens * shape.width
        self.padding, self.tokens = shape.lanes, shape.tokens
        # After its last token, a lane may use rows_in_flight more rows until the host has the results.
        pages = -(-(slots * shape.passes + shape.rows_in_flight) // shape.page_size) + 1
        long, int32 = ({"dtype": dtype, "device": like.input.device} for dtype in (torch.long, torch.int32))
        self.books = Books(
            torch.full((count, shape.passes, slots), -1, **int32),
            *(torch.zeros(count, **long) for _ in ("token", "place", "iteration", "last", "used")),
            pages=torch.zeros(count, pages, **int32),
            tick=torch.zeros(1, **long),
            page_size=shape.page_size,
        )

        def empty(values: Tensor) -> Tensor:
            return values.new_zeros(count * shape.window, *values.shape[1:])

        self.state = State(empty(like.input), empty(like.input[:, :1]), tuple(map(empty, like.carried)))

    @property
    def index(self) -> Tensor:
        """The pool row that each iteration reads for each slot, int32 ``[lanes, iterations, slots]``; -1 for none."""
        return self.books.index

    def start(self, entries: Sequence[tuple[int, int, int, int]]) -> None:
        """Starts decoding in lanes; entries are (lane, token id, position, last iteration that a token may use)."""
        books, (lane, token, position, last) = self.books, self._columns(entries)
        books.token[lane], books.place[lane], books.last[lane] = token, position, last
        books.iteration.index_fill_(0, lane, 0)
        books.used.index_fill_(0, lane, 0)

    def update_block_tables(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Writes pages into block tables; entries are (lane, index in its block table, page)."""
        lane, index, page = self._columns(entries)
        self.books.pages[lane, index] = page.int()

    def _columns(self, entries: Sequence[tuple[int, ...]]) -> Any:
        columns = torch.from_numpy(np.array(entries, dtype=np.int64))  # faster than torch.tensor
        return columns.to(self.books.token.device, non_blocking=True).unbind(1)


def write_lane(buffer: Tensor, lane: int, values: Sequence[Any]) -> None:
    """Copies ``values`` to ``buffer[lane]`` without waiting for the device."""
    buffer[lane].copy_(torch.tensor(values, dtype=buffer.dtype), non_blocking=True)


def select_state(state: State, index: Any) -> State:
    """Selects rows of a method's state by an index tensor or a slice."""
    hidden: Any = None if state.hidden is None else state.hidden[index]
    return State(state.input[index], hidden, tuple(values[index] for values in state.carried))


def resume_state(initial: State, stored: State, lane: Tensor, iteration: Tensor) -> State:
    """Returns each row's state: from ``initial`` at iteration 0, else from entry ``lane`` of ``stored``."""
    pairs = zip(initial.carried, stored.carried, strict=True)
    return State(
        resume_rows(initial.input, stored.input, lane, iteration),
        carried=tuple(resume_rows(start, old, lane, iteration) for start, old in pairs),
    )


def join_states(states: Sequence[State]) -> State:
    """Concatenates method states along rows, without their ``hidden`` tensors; returns a single state as it is."""
    if len(states) == 1:
        return states[0]
    carried = zip(*(state.carried for state in states), strict=True)
    return State(torch.cat([state.input for state in states]), carried=tuple(map(torch.cat, carried)))


def store_state(stored: State, lane: Tensor, new: State) -> None:
    """Writes the rows of ``new`` to entries ``lane`` of ``stored``; ``hidden`` only if ``new`` has it."""
    targets = (stored.input, stored.hidden, *stored.carried)
    for target, values in zip(targets, (new.input, new.hidden, *new.carried), strict=True):
        if values is not None:
            target.index_copy_(0, lane, values.to(target.dtype))
