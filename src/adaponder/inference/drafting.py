"""Drafts by depth: the token sampled after a first iteration is started at once, while deeper iterations verify it.

A sequence has a *window* of consecutive tokens, each at its own iteration, all in one pass. The first token's id is
certain; each later one is the token sampled by the latest iteration of the token before it. In every tick each token of
the window that has not halted computes a row; then

- after the first token whose sampled next token has changed, the rest of the window is dropped;
- tokens that have halted, with all tokens before them halted too, are accepted: their samples are final;
- the token sampled by the last token of the window is appended to it.

A token is always an iteration behind the one before it, unless that one has halted. So it attends to the same rows as
without drafting, and samples the same token: the noise depends on seed and position. No sequence takes more ticks than
without drafting; where every draft is right, each tick completes a token.

The rows of a token have fixed places on the pages of its sequence, one per iteration. A token that replaces a dropped
one takes its rows, and its index entry at iteration 0 covers every iteration of its slot, so dropped rows are never
read.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from adaponder.inference.sequence import Sequence
from adaponder.ops.lanes import Books, DraftWindows, WindowRows, begin_windows, end_windows


class Drafting:
    """The windows of all lanes; every tensor keeps its address.

    Attributes:
        size: the maximum number of tokens in a window.
    """

    def __init__(self, books: Books, *, size: int, passes: int, vanishes: bool):
        self.books, self.size, self.passes, self.vanishes = books, size, passes, vanishes
        self.windows = DraftWindows.empty(len(books.token), size, books.token.device)
        self._lane = books.token[:0]
        self._which: Tensor | None = None

    def start(self, sequences: Many[Sequence], host_lanes: Many[int]) -> None:
        """Starts decoding these sequences.

        The window has one token, so nothing is drafted, where samples depend on earlier tokens (penalties), and for
        ``host_lanes``, whose policy is the user's own and might read all rows of a call.
        """
        entries = []
        for sequence in sequences:
            lane, position = sequence.lane_number, len(sequence.tokens) - 1
            single = sequence.submission.features.penalised or lane in host_lanes
            final = position + sequence.num_remaining - 1
            entries.append((lane, position, sequence.tokens[-1], final, 1 if single else self.size))
        windows = self.windows
        lane, position, token, final, room = torch.tensor(entries).to(windows.front.device, non_blocking=True).unbind(1)
        windows.front[lane], windows.stop[lane], windows.origin[lane] = position, position + 1, position
        windows.final[lane], windows.room[lane] = final, room
        column, zeros = position % self.size, torch.zeros_like(position)
        windows.token[lane, column], windows.iteration[lane, column] = token, zeros
        windows.halted[lane, column] = zeros.bool()

    def new_log(self, ticks: int, lanes: int) -> Tensor:
        """Allocates the log of ``ticks`` ticks of ``lanes`` lanes; see :func:`end_windows`."""
        return self.windows.front.new_zeros(ticks, lanes, 2 * self.size + 1)

    def begin(self, lane: Tensor) -> WindowRows:
        """Returns the rows of these lanes' windows."""
        rows = begin_windows(self.books, self.windows, lane, passes=self.passes, vanishes=self.vanishes)
        self._lane, self._which = lane, rows.which
        return rows

    def end(self, active: Tensor, token: Tensor, bad: Tensor, log: Tensor) -> None:
        """Updates the windows after a tick, by the results of its rows."""
        results = (self.spread(values).view(-1, self.size) for values in (active, token, bad))
        end_windows(self.books, self.windows, self._lane, *results, log)

    def spread(self, values: Tensor) -> Tensor:
        """Returns the values of the tick's rows for every window position; undefined where there was no row."""
        if self._which is None:
            return values
        spread = values.new_zeros(len(self._lane) * self.size, *values.shape[1:])
        return spread.index_copy_(0, self._which, values)
