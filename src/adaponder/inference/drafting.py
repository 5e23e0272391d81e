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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.inference.outputs import Token, TopTokens
from adaponder.inference.sequence import Sequence
from adaponder.ops.lane_books import NOT_A_NUMBER, Begun, Books, book_rows

if TYPE_CHECKING:
    from adaponder.inference.receiving import Event, Receiver
    from adaponder.inference.runner import Extras


class DraftRows(NamedTuple):
    """The rows of a tick, ``[n]`` each: lane (nobody's where a token of a window gives none), place of its state."""

    lane: Tensor
    seat: Tensor
    begun: Begun


class _Grid(NamedTuple):
    """The windows of the lanes of a tick, ``[lanes, window]``; ``rows`` are those that gave one, ``None`` for all."""

    lane: Tensor
    place: Tensor
    live: Tensor
    rows: Tensor | None


@dataclass
class _Heard:
    """What the host knows of a token of a window."""

    drafted: bool
    token: Token | None = None
    gates: list[float] = field(default_factory=list)
    tops: list[TopTokens] = field(default_factory=list)


class Drafting:
    """The windows of all lanes, and one of nobody's, which is empty. Every tensor keeps its place in memory.

    The token at place ``p`` of a sequence lies at ``p % window``.

    Attributes:
        window: tokens of a sequence that are read at the same time, at most.
        drafted: tokens that were begun before it was certain that they follow.
        accepted: those of them that did follow.
    """

    def __init__(self, books: Books, *, window: int, passes: int, vanishes: bool):
        self.books, self.window, self.passes, self.vanishes = books, window, passes, vanishes
        self.nobody = len(books.token) - 1
        self.drafted = self.accepted = 0
        self._heard: dict[int, list[_Heard]] = {}
        like, grid = books.token, (len(books.token), window)
        # First place of the window and the one after its last; the first place that was decoded; the last that will be.
        self.front, self.stop, self.origin = (torch.zeros_like(like) for _ in range(3))
        self.final, self.room = torch.full_like(like, -1), torch.ones_like(like)
        self.token, self.choice, self.iteration = (like.new_zeros(grid) for _ in range(3))
        self.halted = torch.zeros(grid, dtype=torch.bool, device=like.device)
        self._column = torch.arange(window, device=like.device)
        self._grid: _Grid | None = None

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
            entries.append((one.lane, place, one.tokens[-1], place + one.left - 1, 1 if alone else self.window))
            self._heard[one.lane] = [_Heard(False)] * self.window
        columns = torch.tensor(entries).to(self.front.device, non_blocking=True).unbind(1)
        lane, place, token, final, room = columns
        self.front[lane], self.stop[lane], self.origin[lane] = place, place + 1, place
        self.final[lane], self.room[lane] = final, room
        where = place % self.window
        self.token[lane, where] = token
        self.iteration[lane, where] = 0
        self.halted[lane, where] = False

    def rows_ahead(self, sequence: Sequence, ticks: int) -> int:
        """Rows that a sequence may use beyond those of its known tokens in so many ticks: one more in each."""
        return min(ticks + self.window - 1, sequence.left) * self.passes

    def new_log(self, ticks: int, lanes: int) -> Tensor:
        """Of each tick and lane: what each place of its window says, its iteration (-1: no row), tokens accepted."""
        return self.front.new_zeros(ticks, lanes, 2 * self.window + 1)

    # --- on the device ------------------------------------------------------------------------------------------

    def begin(self, lane: Tensor) -> DraftRows:
        """The rows of these lanes' windows, entered into the index. On a CPU only those of tokens that have not halted.

        On a GPU shapes do not depend on what has halted: the other rows are nobody's.
        """
        books, column = self.books, self._column
        books.tick.add_(1)
        front = self.front[lane][:, None]
        place = front + (column - front) % self.window
        live = (place < self.stop[lane][:, None]) & ~self.halted[lane]
        rows = None
        if lane.device.type == "cpu":
            rows = live.flatten().nonzero()[:, 0]
            rows = rows if len(rows) else rows.new_zeros(min(1, live.numel()))
        self._grid = _Grid(lane, place, live, rows)
        values = (
            torch.where(live, lane[:, None], self.nobody),
            torch.where(live, place, 0),
            torch.where(live, self.iteration[lane], 0),
            self.token[lane],
            column.expand_as(place),
            (place - self.origin[lane][:, None]).clamp(min=0),
        )
        owner, place, iteration, token, at, number = (self._picked(one) for one in values)
        where = torch.where(owner == self.nobody, 0, number * self.passes + iteration)
        row = books.pages[owner, where // books.page_size].long() * books.page_size + where % books.page_size
        book_rows(books.index, owner, place, iteration, row, vanishes=self.vanishes)
        return DraftRows(
            owner, owner * self.window + at, Begun(token, place, iteration, books.last[owner], row[:, None])
        )

    def end(self, goes_on: Tensor, chosen: Tensor, bad: Tensor, log: Tensor) -> None:
        """What becomes of the windows after a tick: its followers dropped, tokens accepted, the next one taken in."""
        assert self._grid is not None
        lane, place, live, _ = self._grid
        column, token, stop = self._column, self.token[lane], self.stop[lane][:, None]
        said = self.spread(torch.where(bad, NOT_A_NUMBER, chosen))
        choice = torch.where(live, self.spread(chosen), self.choice[lane])
        halted = torch.where(live, ~self.spread(goes_on), self.halted[lane])
        iteration = self.iteration[lane]

        differs = (choice != token.roll(-1, dims=1)) & (place + 1 < stop)
        stop = torch.where(differs, place + 1, stop).amin(1, keepdim=True)
        front = torch.where(halted | (place >= stop), stop, place).amin(1, keepdim=True)
        heard = torch.where(live, iteration, -1)
        accepted = front - self.front[lane][:, None]
        log.index_copy_(0, self.books.tick, torch.cat([said, heard, accepted], dim=1)[None])

        begins = (stop - front < self.room[lane][:, None]) & (stop <= self.final[lane][:, None])
        begun = begins & (column == stop % self.window)
        latest = choice.gather(1, (stop - 1) % self.window)
        for kept, values in (
            (self.token, torch.where(begun, latest, token)),
            (self.iteration, torch.where(begun, 0, iteration + live)),
            (self.halted, halted & ~begun),
            (self.choice, choice),
            (self.front, front[:, 0]),
            (self.stop, (stop + begins)[:, 0]),
        ):
            kept.index_copy_(0, lane, values)

    def spread(self, values: Any) -> Any:
        """What rows of the tick said, as ``[lanes, window, …]``; without meaning where there was no row."""
        assert self._grid is not None
        shape, rows = (*self._grid.live.shape, *values.shape[1:]), self._grid.rows
        if rows is not None:
            values = values.new_zeros(shape).flatten(0, 1).index_copy_(0, rows, values)
        return values.view(shape)

    def columns(self, values: Tensor | None) -> Tensor | None:
        """What rows of the tick said, ``[lanes * window, …]``."""
        return None if values is None else self.spread(values).flatten(0, 1)

    def _picked(self, values: Tensor) -> Tensor:
        assert self._grid is not None
        values = values.flatten()
        return values if self._grid.rows is None else values[self._grid.rows]

    # --- on the host --------------------------------------------------------------------------------------------

    def receive(
        self,
        receiver: Receiver,
        sequence: Sequence,
        lines: list[list[int]],
        extras: Extras,
        number: int,
        events: list[Event],
    ) -> None:
        """What ticks said of a sequence's window, a line of the log each; the tokens that they accepted are told."""
        window = self.window
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
                sequence.reading = one.token.depth
                if receiver.settle(sequence, one.token, events):
                    return

    def _hear(
        self,
        receiver: Receiver,
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
        receiver.listen(sequence, extras, tick, column)
        one.token = receiver.token(sequence, said, extras, tick, column)


def window_of(drafts: int, *, method: str, width: int, passes: int, batching: str) -> int:
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
    if batching != "depth":
        raise InputError(f"drafts={drafts}: not with batching={batching!r}; use batching='depth'")
    return min(drafts, passes - 1) + 1
