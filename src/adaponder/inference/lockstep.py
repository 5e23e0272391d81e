"""Lock-step batching, to compare with: whoever has halted waits until everybody has."""

from __future__ import annotations

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.inference.sequence import Sequence

WAITS = -3
BATCHINGS = ("depth", "padded", "dropping")


class Lockstep:
    """The device's side of ``batching="padded"``: a lane that waits computes nobody's row, and its log says so."""

    def __init__(self, lanes: int, nobody: int, device: torch.device):
        self.nobody = nobody
        self.waits = torch.zeros(lanes, dtype=torch.bool, device=device)

    def present(self, lane: Tensor) -> Tensor:
        """The lanes, and nobody instead of those that wait."""
        return torch.where(self.waits[lane], self.nobody, lane)

    def step(self, lane: Tensor, goes_on: Tensor, tick: Tensor, log: Tensor) -> None:
        """Who has halted waits, until all of these lanes have."""
        waited, real = self.waits[lane], lane != self.nobody
        log.index_copy_(0, tick, torch.where(waited, WAITS, log.index_select(0, tick)))
        done = waited | ~goes_on
        together = (done | ~real).all()
        self.waits.index_copy_(0, lane, done & real & ~together)

    def leave(self, lane: int) -> None:
        self.waits[lane] = False


class Rounds:
    """The host's side of ``batching="dropping"``: each tick is of the sequences whose token has not halted yet.

    The host must know beforehand when tokens halt, so every depth must be forced.
    """

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.begun: dict[int, int] = {}

    def plan(self, decoding: list[Sequence], ticks: int) -> list[list[Sequence]]:
        """Who takes part in each of the next ticks: those whose token is still read, or all when a round begins."""
        return [self._choose(decoding) for _ in range(ticks)]

    def _choose(self, decoding: list[Sequence]) -> list[Sequence]:
        mine = [one for one in decoding if self.left.get(one.number, 0)]
        if not mine:
            mine = decoding
            for one in decoding:
                place = self.begun.setdefault(one.number, one.prompt_length - 1)
                self.begun[one.number] = place + 1
                self.left[one.number] = one.forced.get(place, one.iterations)
        for one in mine:
            self.left[one.number] -= 1
        return mine


def check_batching(batching: str) -> None:
    if batching not in BATCHINGS:
        raise InputError(f"batching={batching!r}: {', '.join(BATCHINGS)}")
