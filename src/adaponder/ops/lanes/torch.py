"""Advances the lanes of a decoding engine: allocates KV rows, updates current tokens and draft windows."""

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
        iteration: the current token's next iteration.
        last: the last iteration that tokens of this lane may use.
        used: number of rows used so far in the lane's pages.
        pages: int32 ``[lanes, …]``: the lane's block table; rows are allocated from its pages in order.
        tick: ``[1]``: index of the current tick in the log; each tick begins by incrementing it.
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
    """The rows that a tick computes, int64.

    ``token``, ``place``, ``iteration`` and ``last``, ``[n]`` each, are as in :class:`Books`; ``row [n, width]`` has the
    pool rows that were allocated.
    """

    token: Tensor
    place: Tensor
    iteration: Tensor
    last: Tensor
    row: Tensor


def begin_rows(books: Books, lane: Tensor, *, width: int, vanishes: bool) -> Begun:
    """Begins a tick: allocates ``width`` pool rows for each lane's next iteration and enters them into the index."""
    books.tick.add_(1)
    count = torch.arange(width, device=lane.device)
    offset = (books.used[lane][:, None] + count).clamp(max=books.pages.shape[1] * books.page_size - 1)
    page = books.pages[lane[:, None], offset // books.page_size].long()
    row = page * books.page_size + offset % books.page_size
    books.used.index_copy_(0, lane, books.used[lane] + width)
    place, iteration = books.place[lane], books.iteration[lane]
    slot = (place[:, None] * width + count).flatten()
    lanes, iterations = (x.repeat_interleave(width) for x in (lane, iteration))
    book_rows(books.index, lanes, slot, iterations, row.flatten(), vanishes=vanishes)
    return Begun(books.token[lane], place, iteration, books.last[lane], row)


def book_rows(index: Tensor, lane: Tensor, slot: Tensor, iteration: Tensor, row: Tensor, *, vanishes: bool) -> None:
    """Writes pool rows ``row [n]`` into ``Books.index`` for iterations ``iteration [n]`` and all later ones.

    So later iterations read a halted token's last row (law 3). With ``vanishes`` (methods whose halted tokens cannot be
    attended to), later iterations get -1 instead.
    """
    number = torch.arange(index.shape[1], device=index.device)
    same, later = number == iteration[:, None], number > iteration[:, None]
    later_row = -1 if vanishes else row[:, None].int()
    index[lane, :, slot] = torch.where(same, row[:, None].int(), torch.where(later, later_row, index[lane, :, slot]))


def end_rows(
    books: Books, lane: Tensor, begun: Begun, active: Tensor, sampled: Tensor, invalid: Tensor, log: Tensor, *,
    max_tokens: int,
) -> None:  # fmt: skip
    """Advances each lane to its token's next iteration if ``active``, else to iteration 0 of the sampled token.

    Writes for each lane into ``log[tick]``: :data:`GOES_ON` if the token continues, else the id ``sampled``, or
    :data:`NOT_A_NUMBER` if sampling was ``invalid``. A token's index stays below ``max_tokens``.
    """
    books.token.index_copy_(0, lane, torch.where(active, begun.token, sampled))
    books.place.index_copy_(0, lane, torch.where(active, begun.place, (begun.place + 1).clamp(max=max_tokens - 1)))
    books.iteration.index_copy_(0, lane, torch.where(active, begun.iteration + 1, 0))
    outcome = torch.where(active, GOES_ON, torch.where(invalid, NOT_A_NUMBER, sampled))
    log.index_copy_(0, books.tick, outcome[None])


def resume_rows(initial: Tensor, stored: Tensor, lane: Tensor, iteration: Tensor) -> Tensor:
    """Returns each row's state: ``initial [n, …]`` at iteration 0, else its lane's entry of ``stored [lanes, …]``."""
    begins = (iteration == 0).view(-1, *[1] * (initial.ndim - 1))
    return torch.where(begins, initial.to(stored.dtype), stored[lane])


def ponder_rows(embedding: Tensor, expected: Tensor, active: Tensor, probability: Tensor) -> Tensor:
    """Returns ``embedding + active * probability * expected`` (eq. 9), as :func:`adaponder.halting.pondered` does."""
    weight = (active * probability).to(embedding.dtype)
    return embedding + weight[..., None] * expected


def force_rows(active: Tensor, forced: Tensor, lane: Tensor, place: Tensor, iteration: Tensor, last: Tensor) -> Tensor:
    """Returns the policy's decision ``active``, except that a token with a forced depth halts at exactly that depth.

    ``forced[lane, place]`` is the forced depth, 0 for none. No row stays active after iteration ``last[lane]``.
    """
    depth = forced[lane, place]
    return torch.where(depth > 0, iteration + 1 < depth, active) & (iteration < last[lane])


class DraftWindows(NamedTuple):
    """The draft window of each lane: consecutive tokens, all but the first of which are drafts.

    The token at index ``p`` of its sequence has entry ``p % window``. The last lane's window stays empty (padding).

    Attributes:
        front, stop: int64 ``[lanes]``: the window holds the tokens ``front`` to ``stop - 1`` of the sequence.
        origin: int64 ``[lanes]``: index of the first decoded token, whose rows are the first in the lane's pages.
        final: int64 ``[lanes]``: index of the last token to compute.
        room: int64 ``[lanes]``: maximum number of tokens in the window.
        token: int64 ``[lanes, window]``: token ids.
        choice: int64 ``[lanes, window]``: the next token that each token's latest iteration sampled.
        iteration: int64 ``[lanes, window]``: the next iteration of each token.
        halted: bool ``[lanes, window]``: whether the token has halted.
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
    """The rows that a tick computes with draft windows; int64 ``[n]`` each.

    Attributes:
        lane: lane of each row; the unused last lane if the window entry has no token or a halted one.
        seat: index of the token's entry in tensors of all lanes: ``lane * window + place % window``.
        begun: the token, place, iteration and pool row of each row.
        entries: indices of the rows in the flattened ``[lanes of the tick, window]``; ``None``: all entries in order.
    """

    lane: Tensor
    seat: Tensor
    begun: Begun
    entries: Tensor | None


def begin_windows(
    books: Books, windows: DraftWindows, lane: Tensor, *, passes: int, vanishes: bool, every: bool | None = None
) -> WindowRows:
    """Begins a tick: assigns a pool row to each active token of the draft windows and enters it into ``Books.index``.

    Each token reserves ``passes`` consecutive rows of the lane's pages, one per iteration. With ``every``, the result
    has all window entries, else only those with an active token (at least one entry). The default is false on a CPU
    and true elsewhere, where selecting entries would synchronise with the host.
    """
    every = lane.device.type != "cpu" if every is None else every
    books.tick.add_(1)
    unused_lane, size = len(books.token) - 1, windows.size
    column = torch.arange(size, device=lane.device)
    place, live = _entries(windows, lane)
    entries = None
    if not every:
        entries = live.flatten().nonzero()[:, 0]
        entries = entries if len(entries) else entries.new_zeros(min(1, live.numel()))
    values = (
        torch.where(live, lane[:, None], unused_lane),
        column.expand_as(place),
        windows.token[lane],
        torch.where(live, place, 0),
        torch.where(live, windows.iteration[lane], 0),
        torch.where(live, place - windows.origin[lane][:, None], 0),
    )
    flat = [grid.flatten() for grid in values]
    owner, at, token, place, iteration, number = flat if entries is None else (values[entries] for values in flat)
    offset = number * passes + iteration
    row = books.pages[owner, offset // books.page_size].long() * books.page_size + offset % books.page_size
    book_rows(books.index, owner, place, iteration, row, vanishes=vanishes)
    begun = Begun(token, place, iteration, books.last[owner], row[:, None])
    return WindowRows(owner, owner * size + at, begun, entries)


def end_windows(
    books: Books, windows: DraftWindows, lane: Tensor, active: Tensor, sampled: Tensor, invalid: Tensor, log: Tensor
) -> None:
    """Advances the windows by the results of a tick; ``active``, ``sampled`` and ``invalid`` are ``[n, window]``.

    Entries without an active token are ignored. Writes for each lane into ``log[tick]``: the id that each entry
    ``sampled`` (:data:`NOT_A_NUMBER` if ``invalid``), its iteration (-1 if ignored), and how many tokens were accepted.
    """
    place, live = _entries(windows, lane)
    column = torch.arange(windows.size, device=lane.device)
    token, iteration, stop = windows.token[lane], windows.iteration[lane], windows.stop[lane][:, None]
    choice = torch.where(live, sampled, windows.choice[lane])
    halted = torch.where(live, ~active, windows.halted[lane])

    differs = (choice != token.roll(-1, dims=1)) & (place + 1 < stop)
    stop = torch.where(differs, place + 1, stop).amin(1, keepdim=True)
    front = torch.where(halted | (place >= stop), stop, place).amin(1, keepdim=True)
    answers, iterations = torch.where(invalid, NOT_A_NUMBER, sampled), torch.where(live, iteration, -1)
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


def _entries(windows: DraftWindows, lane: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (token index in its sequence, whether the token is active) of each window entry, ``[n, window]`` each.

    Entries beyond the end of a lane's window are not active.
    """
    front, column = windows.front[lane][:, None], torch.arange(windows.size, device=lane.device)
    place = front + (column - front) % windows.size
    return place, (place < windows.stop[lane][:, None]) & ~windows.halted[lane]
