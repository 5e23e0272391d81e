"""Drafts by depth: starts the token sampled after the first iteration at once, while deeper iterations verify it.

A sequence has a *window* of consecutive tokens, each at its own iteration, all computed in one pass. The first token is
certain; every later token was sampled by the latest iteration of the token before it. A tick computes one row for each
active token of the window. Then

- if a token now samples a different next token, all tokens after it are dropped from the window;
- the halted tokens at the front of the window are accepted: the tokens that they sampled are final;
- the token sampled by the last token of the window is appended to the window if there is room.

A token is always at least one iteration behind the token before it, unless that one has halted. So it attends to the
same rows as without drafting and samples the same token, because the noise depends on seed and position alone. No
sequence takes more ticks than without drafting.

Each position of a sequence has fixed rows on its pages, one per iteration. A token that replaces a dropped token
overwrites its rows, so the dropped rows are never read.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from adaponder.inference.sequence import Sequence
from adaponder.ops.lanes import Books, DraftWindows, WindowRows, begin_windows, end_windows


class Drafting:
    """Holds the draft windows of all lanes, of at most ``size`` tokens each, in tensors that CUDA graphs can reuse."""

    def __init__(self, books: Books, *, size: int, passes: int, vanishes: bool):
        self.books, self.size, self.passes, self.vanishes = books, size, passes, vanishes
        self.windows = DraftWindows.empty(len(books.token), size, books.token.device)
        self._lane = books.token[:0]
        self._entries: Tensor | None = None

    def start(self, sequences: Many[Sequence], host_lanes: Many[int]) -> None:
        """Sets up the windows of sequences that start decoding.

        A window has only one token (no drafts) if the request has penalties, because penalties depend on the earlier
        tokens, or if the lane is one of ``host_lanes``: a user's own policy runs there and could read the drafts' rows.
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

    def begin(self, lane: Tensor) -> WindowRows:
        """Starts a tick: assigns pool rows to the active tokens of the lanes' windows and returns the tick's rows."""
        rows = begin_windows(self.books, self.windows, lane, passes=self.passes, vanishes=self.vanishes)
        self._lane, self._entries = lane, rows.entries
        return rows

    def end(self, active: Tensor, token: Tensor, invalid: Tensor, log: Tensor) -> None:
        """Ends a tick: updates the windows and writes the log from the results of the tick's rows, ``[n]`` each."""
        results = (self.spread(values).view(-1, self.size) for values in (active, token, invalid))
        end_windows(self.books, self.windows, self._lane, *results, log)

    def spread(self, values: Tensor) -> Tensor:
        """Scatters one value per row of the tick to window entries ``[lanes * size]``; all other entries get zeros."""
        if self._entries is None:
            return values
        zeros = values.new_zeros(len(self._lane) * self.size, *values.shape[1:])
        return zeros.index_copy_(0, self._entries, values)
