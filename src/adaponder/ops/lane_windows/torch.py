"""The windows of decoding lanes: which tokens are read at the same time, and what becomes of them after a tick."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.ops.lane_books import NOT_A_NUMBER, Begun, Books, book_rows


class DraftWindows(NamedTuple):
    """Of each lane; the last lane is nobody's, and its window stays empty.

    Attributes:
        front: the first place of the window; the token there is certain.
        stop: the place after its last one.
        origin: the first place that was decoded, whose rows are the first of the lane's pages.
        final: the last place that is to be read.
        room: tokens of the window, at most.
        token: ``[lanes, window]``, like the following: ids; the one of place ``p`` is at ``p % window``.
        choice: the token that follows, as each says at the moment.
        iteration: the iteration that is next.
        halted: bool: whether there is none.
    """

    front: Tensor
    stop: Tensor
    origin: Tensor
    final: Tensor
    room: Tensor
    token: Tensor
    choice: Tensor
    iteration: Tensor
    halted: Tensor

    @classmethod
    def empty(cls, lanes: int, window: int, device: torch.device) -> DraftWindows:
        def filled(value: int, *shape: int) -> Tensor:
            return torch.full((lanes, *shape), value, dtype=torch.long, device=device)

        grids = (filled(0, window) for _ in range(3))
        halted = torch.zeros(lanes, window, dtype=torch.bool, device=device)
        return cls(filled(0), filled(0), filled(0), filled(-1), filled(1), *grids, halted)

    @property
    def size(self) -> int:
        return self.token.shape[1]


class WindowRows(NamedTuple):
    """The rows of a tick, ``[n]`` each.

    Attributes:
        lane: the lane of each, nobody's where a token has halted or there is none.
        seat: where its state is kept: ``lane * window + place % window``.
        begun: what the row reads.
        which: the rows' places in the windows of all lanes, flat; ``None`` where every place has one.
    """

    lane: Tensor
    seat: Tensor
    begun: Begun
    which: Tensor | None


def begin_windows(
    books: Books, windows: DraftWindows, lane: Tensor, *, passes: int, vanishes: bool, every: bool
) -> WindowRows:
    """The rows of these lanes' windows, entered into the index: one of ``every`` place, or of live ones alone.

    At least one row comes of any lanes. To know which are live, the host waits.
    """
    books.tick.add_(1)
    nobody, size = len(books.token) - 1, windows.size
    column = torch.arange(size, device=lane.device)
    place, live = _standing(windows, lane)
    which = None
    if not every:
        which = live.flatten().nonzero()[:, 0]
        which = which if len(which) else which.new_zeros(min(1, live.numel()))
    values = (
        torch.where(live, lane[:, None], nobody),
        column.expand_as(place),
        windows.token[lane],
        torch.where(live, place, 0),
        torch.where(live, windows.iteration[lane], 0),
        torch.where(live, place - windows.origin[lane][:, None], 0),
    )
    flat = (one.flatten() for one in values)
    owner, at, token, place, iteration, number = flat if which is None else (one[which] for one in flat)
    where = number * passes + iteration
    row = books.pages[owner, where // books.page_size].long() * books.page_size + where % books.page_size
    book_rows(books.index, owner, place, iteration, row, vanishes=vanishes)
    begun = Begun(token, place, iteration, books.last[owner], row[:, None])
    return WindowRows(owner, owner * size + at, begun, which)


def end_windows(
    books: Books, windows: DraftWindows, lane: Tensor, goes_on: Tensor, chosen: Tensor, bad: Tensor, log: Tensor
) -> None:
    """Moves the windows on by what their rows said; ``goes_on``, ``chosen`` and ``bad`` are ``[n, window]``.

    Where there was no row they have no meaning. ``log[tick]`` gets of each lane what the tokens of its window say
    (:data:`NOT_A_NUMBER` for a choice that is ``bad``), their iterations (-1: no row), and how many were accepted.
    """
    place, live = _standing(windows, lane)
    column = torch.arange(windows.size, device=lane.device)
    token, iteration, stop = windows.token[lane], windows.iteration[lane], windows.stop[lane][:, None]
    choice = torch.where(live, chosen, windows.choice[lane])
    halted = torch.where(live, ~goes_on, windows.halted[lane])

    differs = (choice != token.roll(-1, dims=1)) & (place + 1 < stop)
    stop = torch.where(differs, place + 1, stop).amin(1, keepdim=True)
    front = torch.where(halted | (place >= stop), stop, place).amin(1, keepdim=True)
    said, heard = torch.where(bad, NOT_A_NUMBER, chosen), torch.where(live, iteration, -1)
    accepted = front - windows.front[lane][:, None]
    log.index_copy_(0, books.tick, torch.cat([said, heard, accepted], dim=1)[None])

    begins = (stop - front < windows.room[lane][:, None]) & (stop <= windows.final[lane][:, None])
    begun = begins & (column == stop % windows.size)
    latest = choice.gather(1, (stop - 1) % windows.size)
    for kept, values in (
        (windows.token, torch.where(begun, latest, token)),
        (windows.iteration, torch.where(begun, 0, iteration + live)),
        (windows.halted, halted & ~begun),
        (windows.choice, choice),
        (windows.front, front[:, 0]),
        (windows.stop, (stop + begins)[:, 0]),
    ):
        kept.index_copy_(0, lane, values)


def _standing(windows: DraftWindows, lane: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each token of these lanes' windows, and whether it gives a row, ``[n, window]``."""
    front, column = windows.front[lane][:, None], torch.arange(windows.size, device=lane.device)
    place = front + (column - front) % windows.size
    return place, (place < windows.stop[lane][:, None]) & ~windows.halted[lane]
