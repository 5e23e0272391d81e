"""Drafting by depth: what a token says after its first iteration is read on at once, while the token itself is checked.

A sequence has a *window* of consecutive tokens, each at an iteration of its own, all in one pass. The first token's id
is certain; each later one is what the token before it says at the moment. In every tick each token of the window that
has not halted gives a row; then

- from the first token on whose follower is not what it says any more, the followers are dropped;
- tokens that have halted, with nobody before them that has not, are accepted: what they say is final;
- the window takes in what its last token says.

A token is always an iteration behind the one before it, unless that one has halted. So it finds the rows that it would
find alone, whatever tokens come after, and its choice is the one that it would make alone: noise depends on seed and
position. No sequence takes more ticks than without drafting; where every draft is right, one tick makes one token.

The rows of a token have fixed places on the pages of its sequence, one for each iteration. A token that takes the place
of a dropped one takes its rows, and its entry at iteration 0 covers every iteration of its slot, so that no dropped row
is ever seen.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.inference.launches import Extras
from adaponder.inference.outputs import Event, Token, TopTokens
from adaponder.inference.sequence import Sequence
from adaponder.ops.lane_books import Books
from adaponder.ops.lane_windows import DraftWindows, WindowRows, begin_windows, end_windows


class Listener(Protocol):
    """What windows use of the :class:`~adaponder.inference.receiving.Receiver` that they tell their tokens."""

    rows: int

    def listen(self, sequence: Sequence, extras: Extras, tick: int, number: int) -> None: ...

    def token(self, sequence: Sequence, said: int, extras: Extras, tick: int, number: int) -> Token: ...

    def settle(self, sequence: Sequence, token: Token, events: list[Event]) -> bool: ...


@dataclass
class _Heard:
    """What the host knows of a token of a window."""

    drafted: bool
    token: Token | None = None
    gates: list[float] = field(default_factory=list)
    tops: list[TopTokens] = field(default_factory=list)


class Drafting:
    """The windows of all lanes. Every tensor keeps its place in memory.

    Attributes:
        size: tokens of a sequence that are read at the same time, at most.
        drafted: tokens that were begun before it was certain that they follow.
        accepted: those of them that did follow.
    """

    def __init__(self, books: Books, *, size: int, passes: int, vanishes: bool):
        self.books, self.size, self.passes, self.vanishes = books, size, passes, vanishes
        self.windows = DraftWindows.empty(len(books.token), size, books.token.device)
        self.drafted = self.accepted = 0
        self._heard: dict[int, list[_Heard]] = {}
        self._lane = books.token[:0]
        self._which: Tensor | None = None

    def enter(self, sequences: Many[Sequence], hosted: Many[int]) -> None:
        """These sequences begin to decode.

        A sequence with penalties, whose choices depend on the tokens before, and one whose policy is the user's own
        (``hosted`` lanes), which might look at all rows that it is shown, has a window of one token: nothing is
        drafted.
        """
        entries = []
        for one in sequences:
            assert one.lane is not None
            alone = one.needs[0].penalised or one.lane in hosted
            place = len(one.tokens) - 1
            entries.append((one.lane, place, one.tokens[-1], place + one.left - 1, 1 if alone else self.size))
            self._heard[one.lane] = [_Heard(False)] * self.size
        windows = self.windows
        lane, place, token, final, room = torch.tensor(entries).to(windows.front.device, non_blocking=True).unbind(1)
        windows.front[lane], windows.stop[lane], windows.origin[lane] = place, place + 1, place
        windows.final[lane], windows.room[lane] = final, room
        where = place % self.size
        windows.token[lane, where] = token
        windows.iteration[lane, where] = torch.zeros_like(place)
        windows.halted[lane, where] = torch.zeros_like(place, dtype=torch.bool)

    def rows_ahead(self, sequence: Sequence, ticks: int) -> int:
        """Rows that a sequence may use beyond those of its known tokens in so many ticks: one more token in each."""
        return min(ticks + self.size - 1, sequence.left) * self.passes

    def new_log(self, ticks: int, lanes: int) -> Tensor:
        """Room for what so many ticks say of so many lanes, see :func:`end_windows`."""
        return self.windows.front.new_zeros(ticks, lanes, 2 * self.size + 1)

    # --- on the device ------------------------------------------------------------------------------------------

    def begin(self, lane: Tensor) -> WindowRows:
        """The rows of these lanes' windows."""
        rows = begin_windows(self.books, self.windows, lane, passes=self.passes, vanishes=self.vanishes)
        self._lane, self._which = lane, rows.which
        return rows

    def end(self, goes_on: Tensor, chosen: Tensor, bad: Tensor, log: Tensor) -> None:
        """What becomes of the windows after a tick, by what its rows said."""
        said = (self.columns(one).view(-1, self.size) for one in (goes_on, chosen, bad))
        end_windows(self.books, self.windows, self._lane, *said, log)

    def columns(self, values: Tensor) -> Tensor:
        """What rows of the tick said, for every place of their windows; without meaning where there was no row."""
        if self._which is None:
            return values
        spread = values.new_zeros(len(self._lane) * self.size, *values.shape[1:])
        return spread.index_copy_(0, self._which, values)

    # --- on the host --------------------------------------------------------------------------------------------

    def receive(
        self,
        receiver: Listener,
        sequence: Sequence,
        lines: list[list[int]],
        extras: Extras,
        number: int,
        events: list[Event],
    ) -> None:
        """What ticks said of a sequence's window, a line of the log each; the tokens that they accepted are told."""
        window = self.size
        assert sequence.lane is not None
        heard = self._heard[sequence.lane]
        sequence.ahead -= len(lines)
        for tick, line in enumerate(lines):
            front = len(sequence.tokens) - 1
            for at, (said, iteration) in enumerate(zip(line[:window], line[window:-1], strict=True)):
                if iteration < 0:
                    continue
                if iteration == 0:
                    heard[at] = _Heard(drafted=(at - front) % window > 0)
                    self.drafted += heard[at].drafted
                self._hear(receiver, sequence, heard[at], said, iteration, extras, tick, number * window + at)
            for place in range(front, front + line[-1]):
                one = heard[place % window]
                assert one.token is not None
                self.accepted += one.drafted
                sequence.rows.used += self.passes
                sequence.dropped_rows -= one.token.depth
                sequence.reading = one.token.depth
                if receiver.settle(sequence, one.token, events):
                    return

    def _hear(
        self,
        receiver: Listener,
        sequence: Sequence,
        one: _Heard,
        said: int,
        iteration: int,
        extras: Extras,
        tick: int,
        column: int,
    ) -> None:
        sequence.reading, sequence.gates, sequence.iteration_top = iteration, one.gates, one.tops
        receiver.rows += 1
        sequence.dropped_rows += 1
        receiver.listen(sequence, extras, tick, column)
        one.token = receiver.token(sequence, said, extras, tick, column)


# Drafting was 2.3 times as fast for one lane, 2.0 times for four, and slower for 16 (benchmarks/README.md, "Decoding").
FEW_LANES = 4


def usual_drafts(lanes: int, *, width: int, passes: int) -> int:
    """What an engine drafts where nothing is said: all that is of use for few lanes, else nothing."""
    return passes - 1 if lanes <= FEW_LANES and width == 1 else 0


def window_of(drafts: int, *, method: str, width: int, passes: int) -> int:
    """The tokens of a window that drafts so many; 1 where nothing is drafted.

    More than one draft for each iteration after the first is of no use: the first token of a full window halts then.
    """
    if isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 0:
        raise InputError(f"drafts={drafts!r}: a number of tokens, 0 for none")
    if not drafts:
        return 1
    if width > 1:
        raise InputError(f"drafts={drafts}: {method} reads all {width} slots of a token in one pass; use drafts=0")
    if passes == 1:
        raise InputError(f"drafts={drafts}: {method} reads a token once, so nothing is left to check; use drafts=0")
    return min(drafts, passes - 1) + 1
