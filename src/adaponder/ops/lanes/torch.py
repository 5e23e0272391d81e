"""Advances the lanes of a decoding engine: their next KV rows, their tokens, and windows of drafted tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GOES_ON, NOT_A_NUMBER = -1, -2


class Books(NamedTuple):
    """Holds the decoding state of all lanes: one entry per lane, int64 unless stated otherwise.

    Attributes:
        index: int32 ``[lanes, iterations, slots]``: the pool row that an iteration reads for a slot; -1: none.
        token: the id of the token that is being read.
        place: which token of the sequence that is.
        iteration: at which iteration its next row stands.
        last: the last iteration that is allowed.
        used: how many rows of its pages the lane has used.
        pages: int32 ``[lanes, …]``: the pages from which its rows come, one after the other.
        tick: ``[1]``: which tick of a row of them it is; :func:`begin_rows` counts.
        page_size: rows of a page.
    """

    index: Tensor
    token: Tensor
    place: Tensor
    iteration: Tensor
    last: Tensor
    used: Tensor
    pages: Tensor
    tick: Tensor
    page_size: int


class Begun(NamedTuple):
    """Describes the rows of a tick: int64 ``[n]`` each, pool rows ``[n, width]``."""

    token: Tensor
    place: Tensor
    iteration: Tensor
    last: Tensor
    row: Tensor


def begin_rows(books: Books, lane: Tensor, *, width: int, vanishes: bool) -> Begun:
    """Returns the next row of each lane, entered into the block table; ``width`` rows per token."""
    books.tick.add_(1)
    count = torch.arange(width, device=lane.device)
    where = (books.used[lane][:, None] + count).clamp(max=books.pages.shape[1] * books.page_size - 1)
    page = books.pages[lane[:, None], where // books.page_size].long()
    row = page * books.page_size + where % books.page_size
    books.used.index_copy_(0, lane, books.used[lane] + width)
    place, iteration = books.place[lane], books.iteration[lane]
    slot = (place[:, None] * width + count).flatten()
    lanes, iterations = (x.repeat_interleave(width) for x in (lane, iteration))
    book_rows(books.index, lanes, slot, iterations, row.flatten(), vanishes=vanishes)
    return Begun(books.token[lane], place, iteration, books.last[lane], row)


def book_rows(index: Tensor, lane: Tensor, slot: Tensor, iteration: Tensor, row: Tensor, *, vanishes: bool) -> None:
    """Enters rows into the block table for their own iteration and every later one, until a later row is there (law 3).

    Where a halted token ``vanishes``, it shows at its own iteration alone. All arguments are ``[n]``.
    """
    number = torch.arange(index.shape[1], device=index.device)
    own, later = number == iteration[:, None], number > iteration[:, None]
    after = -1 if vanishes else row[:, None].int()
    index[lane, :, slot] = torch.where(own, row[:, None].int(), torch.where(later, after, index[lane, :, slot]))


def end_rows(
    books: Books,
    lane: Tensor,
    begun: Begun,
    goes_on: Tensor,
    chosen: Tensor,
    bad: Tensor,
    log: Tensor,
    *,
    places: int,
) -> None:
    """Advances each lane to its token's next iteration, or to the first one of the token ``chosen``.

    ``places`` is how many tokens a sequence may have: a lane that is done, and not told so yet, stays at the last.
    ``log[tick]`` gets the token of each lane that has one, and :data:`GOES_ON` or, for a choice that is ``bad``,
    :data:`NOT_A_NUMBER`.
    """
    books.token.index_copy_(0, lane, torch.where(goes_on, begun.token, chosen))
    books.place.index_copy_(0, lane, torch.where(goes_on, begun.place, (begun.place + 1).clamp(max=places - 1)))
    books.iteration.index_copy_(0, lane, torch.where(goes_on, begun.iteration + 1, 0))
    outcome = torch.where(goes_on, GOES_ON, torch.where(bad, NOT_A_NUMBER, chosen))
    log.index_copy_(0, books.tick, outcome[None])


def resume_rows(first: Tensor, kept: Tensor, lane: Tensor, iteration: Tensor) -> Tensor:
    """Returns each row's input: ``first [n, …]`` at iteration 0, else its lane's entry of ``kept [lanes, …]``."""
    begins = (iteration == 0).view(-1, *[1] * (first.ndim - 1))
    return torch.where(begins, first.to(kept.dtype), kept[lane])


def ponder_rows(embedding: Tensor, expected: Tensor, active: Tensor, probability: Tensor) -> Tensor:
    """Equals :func:`adaponder.halting.pondered`: ``E + (m s) e``."""
    weight = (active * probability).to(embedding.dtype)
    return embedding + weight[..., None] * expected


def force_rows(keep: Tensor, forced: Tensor, lane: Tensor, place: Tensor, iteration: Tensor, last: Tensor) -> Tensor:
    """Returns which rows continue, ``[n, …]``: by ``forced[lane, place]`` where it names a depth, else by ``keep``.

    No lane continues after ``last[lane]``.
    """
    depth = forced[lane, place]
    return torch.where(depth > 0, iteration + 1 < depth, keep) & (iteration < last[lane])


# --- windows of drafted tokens ------------------------------------------------------------------------------------


class DraftWindows(NamedTuple):
    """Holds the window of drafted tokens of each lane; the last lane is unused, and its window stays empty.

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
    """Describes the rows of a tick, ``[n]`` each.

    Attributes:
        lane: the lane of each; the unused lane where a token has halted or there is none.
        seat: where its state is kept: ``lane * window + place % window``.
        begun: what the row reads.
        which: the rows' places in the windows of all lanes, flat; ``None`` where every place has one.
    """

    lane: Tensor
    seat: Tensor
    begun: Begun
    which: Tensor | None


def begin_windows(
    books: Books, windows: DraftWindows, lane: Tensor, *, passes: int, vanishes: bool, every: bool | None = None
) -> WindowRows:
    """Returns the rows of these lanes' windows, entered into the index: of ``every`` place, or of live places alone.

    The default is live places on a CPU, and every place elsewhere, where the host would have to wait to know which are
    live. Any lanes give at least one row.
    """
    every = lane.device.type != "cpu" if every is None else every
    books.tick.add_(1)
    unused_lane, size = len(books.token) - 1, windows.size
    column = torch.arange(size, device=lane.device)
    place, live = _standing(windows, lane)
    which = None
    if not every:
        which = live.flatten().nonzero()[:, 0]
        which = which if len(which) else which.new_zeros(min(1, live.numel()))
    values = (
        torch.where(live, lane[:, None], unused_lane),
        column.expand_as(place),
        windows.token[lane],
        torch.where(live, place, 0),
        torch.where(live, windows.iteration[lane], 0),
        torch.where(live, place - windows.origin[lane][:, None], 0),
    )
    flat = [grid.flatten() for grid in values]
    owner, at, token, place, iteration, number = flat if which is None else (entry[which] for entry in flat)
    where = number * passes + iteration
    row = books.pages[owner, where // books.page_size].long() * books.page_size + where % books.page_size
    book_rows(books.index, owner, place, iteration, row, vanishes=vanishes)
    begun = Begun(token, place, iteration, books.last[owner], row[:, None])
    return WindowRows(owner, owner * size + at, begun, which)


def end_windows(
    books: Books, windows: DraftWindows, lane: Tensor, goes_on: Tensor, chosen: Tensor, bad: Tensor, log: Tensor
) -> None:
    """Advances the windows by the results of their rows; ``goes_on``, ``chosen`` and ``bad`` are ``[n, window]``.

    Where there was no row they have no meaning. ``log[tick]`` gets of each lane the choices of its window's tokens
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
    answers, iterations = torch.where(bad, NOT_A_NUMBER, chosen), torch.where(live, iteration, -1)
    accepted = front - windows.front[lane][:, None]
    log.index_copy_(0, books.tick, torch.cat([answers, iterations, accepted], dim=1)[None])

    begins = (stop - front < windows.room[lane][:, None]) & (stop <= windows.final[lane][:, None])
    begun = begins & (column == stop % windows.size)
    latest = choice.gather(1, (stop - 1) % windows.size)
    for stored, values in (
        (windows.token, torch.where(begun, latest, token)),
        (windows.iteration, torch.where(begun, 0, iteration + live)),
        (windows.halted, halted & ~begun),
        (windows.choice, choice),
        (windows.front, front[:, 0]),
        (windows.stop, (stop + begins)[:, 0]),
    ):
        stored.index_copy_(0, lane, values)


def _standing(windows: DraftWindows, lane: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the place of each token of these lanes' windows, and whether it gives a row, ``[n, window]``."""
    front, column = windows.front[lane][:, None], torch.arange(windows.size, device=lane.device)
    place = front + (column - front) % windows.size
    return place, (place < windows.stop[lane][:, None]) & ~windows.halted[lane]
