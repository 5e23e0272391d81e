"""Captures and replays CUDA graphs: of whole ticks, or of the body's pass if a tick cannot be one graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adaponder.execution.base import Pass
from adaponder.inference.bodies import Body, FusedBody, Pools, RowShape
from adaponder.inference.sampler import Features
from adaponder.inference.tick import Extras, TickRunner, pad_lanes, to_host
from adaponder.ops.ledger_attention import LedgerRows, Tiles, by_kernels

# The device idles for some microseconds between two graphs, so a graph holds _TICKS ticks if they have few lanes.
_FEW_LANES, _TICKS = 4, 8
_SPARE_TILES = 64  # in addition to the tiles of a single cohort of all rows


def pad_context(slots: int, limit: int) -> int:
    """Rounds an upper bound on slots up to a captured size, at most ``limit``; kernels skip unused slots cheaply."""
    size = 512
    while size < slots:
        size *= 4
    return min(size, limit)


def pad_prefill(rows: int) -> int:
    """Rounds a number of prefill rows up to the nearest captured graph size."""
    step = max(64, 1 << (rows - 1).bit_length() >> (3 if rows <= 1024 else 4))  # adds at most 1/4 (above 1024: 1/8)
    return -(-rows // step) * step


class Graphs:
    """Captures a CUDA graph for each number of lanes, set of features, context bound and set of policies, when needed.

    ``ticks`` is the maximum number of ticks per launch, which sizes the logs.
    """

    def __init__(self, runner: TickRunner, ticks: int):
        self.runner, self.ticks = runner, ticks
        self.graphs: dict[Hashable, TickGraph] = {}
        self.pool: Any = None

    def of(self, lanes: int, features: Features, context: int) -> TickGraph:
        """Returns the graph for this number of lanes, these features, this context and the current policies.

        The first call for a combination captures its graph.
        """
        size = pad_lanes(lanes)
        context = pad_context(context, self.runner.lanes.index.shape[2])
        key = (size, features, context, self.runner.policies.key())
        if key not in self.graphs:
            self.graphs[key] = TickGraph(self, size, features, context)
        return self.graphs[key]


class TickGraph:
    """CUDA graphs of one tick and of several ticks, which read lane numbers and tick number from device buffers."""

    def __init__(self, owner: Graphs, size: int, features: Features, context: int):
        runner = owner.runner
        self.runner, self.size = runner, size
        self.lane_numbers: list[int] = []
        self.lane = torch.full((size,), runner.lanes.padding, device=runner.device)
        self.tokens = runner.new_log(owner.ticks, size)
        # Two runs over padding rows compile kernels and show the shapes of a tick's extras.
        extras = Extras()
        with _side_stream():
            for _ in range(2):
                runner.lanes.books.tick.fill_(-1)
                extras, _ = runner.tick(self.lane, (), features, context, self.tokens)
        self.extras = [None if values is None else values.new_zeros(owner.ticks, *values.shape) for values in extras]
        self.several = min(_TICKS, owner.ticks) if size <= _FEW_LANES else 1
        self.single = self._capture(owner, features, context, 1)
        self.many = self.single if self.several == 1 else self._capture(owner, features, context, self.several)

    def _capture(self, owner: Graphs, features: Features, context: int, ticks: int) -> torch.cuda.CUDAGraph:
        graph, runner = torch.cuda.CUDAGraph(), self.runner
        with torch.cuda.graph(graph, pool=owner.pool):
            for _ in range(ticks):
                extras, _ = runner.tick(self.lane, (), features, context, self.tokens)
                for buffer, values in zip(self.extras, extras, strict=True):
                    if buffer is not None and values is not None:
                        buffer.index_copy_(0, runner.lanes.books.tick, values[None])
        owner.pool = graph.pool()
        return graph

    def run(self, lanes: list[int], ticks: int) -> tuple[Tensor, Extras]:
        """Runs ``ticks`` ticks of these lanes; results are valid once the stream has completed the copy to the host."""
        padding = self.runner.lanes.padding
        if lanes != self.lane_numbers:
            self.lane.copy_(self.runner.as_tensor(lanes + [padding] * (self.size - len(lanes))))
            self.lane_numbers = list(lanes)
        books = self.runner.lanes.books
        books.tick.fill_(-1)
        books.place[padding:].zero_()  # else padding rows would attend to one more slot with every tick
        for _ in range(ticks // self.several):
            self.many.replay()
        for _ in range(ticks % self.several):
            self.single.replay()
        extras = (None if values is None else to_host(values[:ticks]) for values in self.extras)
        return to_host(self.tokens[:ticks]), Extras(*extras)


class GraphedBody(Body):
    """Runs passes of ``body`` by replaying CUDA graphs; the pools must be the same in every call.

    Used when a tick cannot be one graph: for prefill, whose rows change from tick to tick, and with a user's own
    policy. Passes with decode rows only, or with prefill rows only and a fused body, are padded to a few sizes and
    replayed; other passes run eagerly. Padding rows attend to nothing (prefill) or only to themselves (decode).
    """

    def __init__(self, body: Body, owner: Graphs, padding: int):
        self.body, self.owner, self.padding = body, owner, padding
        self.tiled = isinstance(body, FusedBody)  # other bodies read the cohorts on the host
        self.graphs: dict[Hashable, _PassGraph] = {}

    def row_shapes(self) -> list[RowShape]:
        return self.body.row_shapes()

    def forward(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        if rows.cohorts and (rows.num_single or not self.tiled or not by_kernels(pools.keys[0], pools.values[0])):
            return self.body.forward(x, position, rows, pools)
        tiles: list[tuple[int, int, int, int]] = []
        if rows.cohorts:
            from adaponder.ops.ledger_attention import triton as kernels

            size, block = pad_prefill(len(x)), kernels.block_of(rows.cohorts)
            tiles = kernels.tiles_of(rows.cohorts, block)
            tiles += [(first, size, self.padding, 0) for first in range(len(x), size, block)]
            room = size // block + _SPARE_TILES
            while room < len(tiles):
                room *= 2
            key: tuple[int, ...] = (size, block, room)
        else:
            key = (pad_lanes(len(x)), 0, pad_context(rows.reach, rows.index.shape[2]))
        if key not in self.graphs:
            self.graphs[key] = _PassGraph(self, key, x, rows, pools)
        return self.graphs[key].run(x, position, rows, tiles)


class _PassGraph:
    """A CUDA graph of a pass; ``key`` is (rows, 0, context) for decode, (rows, rows per tile, tiles) for prefill."""

    def __init__(self, owner: GraphedBody, key: tuple[int, ...], x: Tensor, rows: LedgerRows, pools: Pools):
        size, block, bound = key
        self.padding = owner.padding
        self.x = x.new_zeros(size, x.shape[1])
        self.position, self.lane, self.slot, self.iteration, self.row = x.new_zeros(5, size, dtype=torch.long)
        self.padding_slot = 0 if block == 0 else -1  # a padding decode row attends to itself at slot 0
        self.slot.fill_(self.padding_slot)
        self.lane.fill_(owner.padding)
        layout: dict[str, Any] = {"num_single": size, "longest": bound}
        self.table = None
        if block:
            self.table = torch.zeros(bound, 4, dtype=torch.int32, device=x.device)
            layout = {"num_single": 0, "tiles": Tiles(block, self.table)}
        ledger = LedgerRows(rows.index, self.lane, self.slot, self.iteration, self.row, **layout)
        with _side_stream():  # over padding rows, to compile kernels
            owner.body.forward(self.x, self.position, ledger, pools)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=owner.owner.pool):
            self.output = owner.body.forward(self.x, self.position, ledger, pools)
        owner.owner.pool = self.graph.pool()

    def run(self, x: Tensor, position: Tensor, rows: LedgerRows, tiles: list[tuple[int, int, int, int]]) -> Pass:
        count = len(x)
        self.x[:count] = x
        inputs = (position, rows.lane, rows.slot, rows.iteration, rows.row)
        buffers = (self.position, self.lane, self.slot, self.iteration, self.row)
        for buffer, values in zip(buffers, inputs, strict=True):
            buffer[:count] = values
        self.position[count:], self.lane[count:], self.slot[count:] = 0, self.padding, self.padding_slot
        self.iteration[count:], self.row[count:] = 0, 0  # page 0 is never allocated
        if self.table is not None:
            table = torch.zeros(len(self.table), 4, dtype=torch.int32)
            table[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
            self.table.copy_(table, non_blocking=True)
        self.graph.replay()
        # The next replay overwrites the graph's memory.
        return Pass(self.output.hidden[:count].clone(), self.output.stream[:count].clone())


@contextmanager
def _side_stream() -> Iterator[None]:
    """Context manager that runs work on a side stream, as capture requires, ordered with the current stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
