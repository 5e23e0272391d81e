"""Advances the lanes of a decoding engine: allocates KV rows, updates tokens and windows of drafted tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GOES_ON, NOT_A_NUMBER = -1, -2


class Books(NamedTuple):
    """The decoding state of all lanes: int64 ``[lanes]`` unless stated otherwise.

    Attributes:
        index: int32 ``[lanes, iterations, slots]``: the pool row that an iteration reads for a slot, -1: none.
        token, place: id of the current token, and its index in its sequence.
        iteration, last: iteration of the lane's next row; last allowed iteration.
        used: number of rows used so far in the lane's pages.
        pages: int32 ``[lanes, …]``: the lane's pages; rows are taken from them in order.
        tick: ``[1]``: index of the current tick in the log, incremented as each tick begins.
        page_size: rows per page.
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
    """The rows of a tick: token, place, iteration and last iteration, int64 ``[n]`` each; pool rows ``[n, width]``."""

    token: Tensor
    place: Tensor
    iteration: Tensor
    last: Tensor
    row: Tensor


def begin_rows(books: Books, lane: Tensor, *, width: int, vanishes: bool) -> Begun:
    """Allocates each lane's next ``width`` pool rows (slots per token), enters them into the index and returns them."""
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
    """Enters pool rows ``[n]`` into the index at their iteration and every later one, until a later row exists (law 3).

    With ``vanishes`` (halted tokens cannot be attended to), later iterations get -1 instead.
    """
    number = torch.arange(index.shape[1], device=index.device)
    same, later = number == iteration[:, None], number > iteration[:, None]
    after = -1 if vanishes else row[:, None].int()
    index[lane, :, slot] = torch.where(same, row[:, None].int(), torch.where(later, after, index[lane, :, slot]))


def end_rows(
    books: Books, lane: Tensor, begun: Begun, goes_on: Tensor, chosen: Tensor, bad: Tensor, log: Tensor, *, places: int
) -> None:
    """Advances each lane to its token's next iteration if ``goes_on``, else to the first one of the token ``chosen``.

    ``places`` is the maximum length of a sequence: a lane that runs on after its end stays at the last place.
    Writes into ``log[tick]``, for each row, :data:`GOES_ON`, the chosen token, or :data:`NOT_A_NUMBER` if the choice
    is ``bad``.
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
    """Equals :func:`adaponder.halting.pondered`: returns ``E + (m s) e``."""
    weight = (active * probability).to(embedding.dtype)
    return embedding + weight[..., None] * expected


def force_rows(keep: Tensor, forced: Tensor, lane: Tensor, place: Tensor, iteration: Tensor, last: Tensor) -> Tensor:
    """Returns which rows continue, ``[n, …]``: up to the depth ``forced[lane, place]`` if above 0, else by ``keep``.

    No row continues after iteration ``last[lane]``.
    """
    depth = forced[lane, place]
    return torch.where(depth > 0, iteration + 1 < depth, keep) & (iteration < last[lane])


class DraftWindows(NamedTuple):
    """The window of drafted tokens of each lane, int64 ``[lanes]`` or ``[lanes, window]``; the last lane's stays empty.

    A place is a token's index in its sequence; the entries of place ``p`` are at ``p % window``.

    Attributes:
        front, stop: first place of the window, whose token is final; place after its last one.
        origin, final: first decoded place, whose rows are the first in the lane's pages; last place to compute.
        room: maximum number of tokens in the window.
        token: token ids, ``[lanes, window]`` like all that follow.
        choice: each token's current prediction of the next one.
        iteration: iteration of each token's next row.
        halted: bool: whether the token has no next row.
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
        lane: lane of each row; the unused last lane for entries without a token or with a halted one.
        seat: index of the token's entry in the flattened state: ``lane * window + place % window``.
        begun: tokens, places, iterations and pool rows.
        which: indices of the rows among the flattened entries of the given lanes' windows; ``None``: all entries.
    """

    lane: Tensor
    seat: Tensor
    begun: Begun
    which: Tensor | None


def begin_windows(
    books: Books, windows: DraftWindows, lane: Tensor, *, passes: int, vanishes: bool, every: bool | None = None
) -> WindowRows:
    """Writes the pool rows of these lanes' draft windows into the index and returns them; a token has ``passes`` rows.

    With ``every``, returns a row for each window entry, else only for live ones (a token, not halted), at least one.
    By default false on a CPU and true elsewhere, where selecting live entries would synchronise with the host.
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

    Entries without a row are ignored. Writes into ``log[tick]``, for each lane, its tokens' choices
    (:data:`NOT_A_NUMBER` if ``bad``), their iterations (-1: no row) and the number of accepted tokens.
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
    """Returns the place of each entry of these lanes' windows, and whether it is live, ``[n, window]``."""
    front, column = windows.front[lane][:, None], torch.arange(windows.size, device=lane.device)
    place = front + (column - front) % windows.size
    return place, (place < windows.stop[lane][:, None]) & ~windows.halted[lane]
