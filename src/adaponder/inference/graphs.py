"""Ticks as CUDA graphs: one for each number of rows and each set of things they need, captured when first wanted."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from adaponder.inference.lane_policies import LanePolicies
from adaponder.inference.lanes import Lanes
from adaponder.inference.launches import Extras, Needs

_WARM_UP = 1
_SHORT, _SEVERAL = 4, 8


def bucket_of(rows: int) -> int:
    """The least number of rows, of those that graphs are made for, that is not smaller."""
    for size in (1, 2, 4, 8):
        if rows <= size:
            return size
    step = 8 if rows <= 64 else 16 if rows <= 128 else 32
    return -(-rows // step) * step


def context_of(slots: int, most: int) -> int:
    """A bound on slots, of few: the programs that attention has beyond a sequence's own slots end at once."""
    size = 512
    while size < slots:
        size *= 4
    return min(size, most)


class Ticks(Protocol):
    """What graphs use of the :class:`~adaponder.inference.runner.Runner` whose ticks they replay."""

    device: torch.device
    lanes: Lanes
    policies: LanePolicies

    def as_tensor(self, numbers: Any) -> Tensor: ...

    def new_log(self, ticks: int, lanes: int) -> Tensor: ...

    def tick(
        self, lane: Tensor, chunks: tuple[()], needs: Needs, longest: int, log: Tensor
    ) -> tuple[Extras, list[Any]]: ...


class Graphs:
    """Replays ticks of a runner. What a graph reads, the lanes and the number of the tick, lies in buffers of its own.

    ``ticks`` is the most ticks in a row: so many logs are kept until the host fetches them.
    """

    def __init__(self, runner: Ticks, ticks: int):
        self.runner, self.ticks = runner, ticks
        self.graphs: dict[Hashable, _Graph] = {}
        self.pool: Any = None

    def run(self, lanes: list[int], needs: Needs, longest: int, ticks: int) -> tuple[Tensor, Extras]:
        """So many ticks over these lanes: tokens and extras, on the host once the stream has come so far."""
        return self._graph(len(lanes), needs, longest).run(lanes, ticks)

    def warm(self, needs: Needs, longest: int, most: int) -> None:
        """Captures the graphs of every number of lanes up to ``most``, for the policies that are there now."""
        for rows in range(1, most + 1):
            self._graph(rows, needs, longest)

    def _graph(self, rows: int, needs: Needs, longest: int) -> _Graph:
        bucket = bucket_of(rows)
        context = context_of(longest, self.runner.lanes.index.shape[2])
        key = (bucket, needs, context, self.runner.policies.key())
        if key not in self.graphs:
            self.graphs[key] = _Graph(self, bucket, needs, context)
        return self.graphs[key]


class _Graph:
    def __init__(self, owner: Graphs, bucket: int, needs: Needs, context: int):
        runner = owner.runner
        self.runner, self.bucket = runner, bucket
        self.lane_numbers: list[int] = []
        self.lane = torch.full((bucket,), runner.lanes.nobody, device=runner.device)
        self.tokens = runner.new_log(owner.ticks, bucket)
        # The first runs, over nobody's rows, compile kernels and show what a tick says.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                runner.lanes.books.tick.fill_(-1)
                runner.tick(self.lane, (), needs, context, self.tokens)
            runner.lanes.books.tick.fill_(-1)
            extras, _ = runner.tick(self.lane, (), needs, context, self.tokens)
        torch.cuda.current_stream().wait_stream(side)
        self.extras = [None if part is None else part.new_zeros(owner.ticks, *part.shape) for part in extras]
        self.kind = type(extras)
        # Between two graphs the device stands still for some microseconds: short ticks are captured several at a time.
        self.several = min(_SEVERAL, owner.ticks) if bucket <= _SHORT else 1
        self.single = self._capture(owner, needs, context, 1)
        self.many = self.single if self.several == 1 else self._capture(owner, needs, context, self.several)

    def _capture(self, owner: Graphs, needs: Needs, context: int, ticks: int) -> torch.cuda.CUDAGraph:
        graph, runner = torch.cuda.CUDAGraph(), self.runner
        with torch.cuda.graph(graph, pool=owner.pool):
            for _ in range(ticks):
                extras, _ = runner.tick(self.lane, (), needs, context, self.tokens)
                for kept, part in zip(self.extras, extras, strict=True):
                    if kept is not None and part is not None:
                        kept.index_copy_(0, runner.lanes.books.tick, part[None])
        owner.pool = graph.pool()
        return graph

    def run(self, lanes: list[int], ticks: int) -> tuple[Tensor, Extras]:
        if lanes != self.lane_numbers:
            filled = lanes + [self.runner.lanes.nobody] * (self.bucket - len(lanes))
            self.lane.copy_(self.runner.as_tensor(filled))
            self.lane_numbers = list(lanes)
        books = self.runner.lanes.books
        books.tick.fill_(-1)
        books.place[self.runner.lanes.nobody :].zero_()  # rows that fill up see one slot, and not more with every tick
        for _ in range(ticks // self.several):
            self.many.replay()
        for _ in range(ticks % self.several):
            self.single.replay()
        kept = (None if part is None else part[:ticks].to("cpu", non_blocking=True) for part in self.extras)
        return self.tokens[:ticks].to("cpu", non_blocking=True), self.kind(*kept)
