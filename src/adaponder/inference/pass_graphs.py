"""Passes of the body as CUDA graphs, where a tick as a whole cannot be one: the host has a part in what comes between.

That is so for prompts, whose rows come and go, and for rows whose policy is a user's own Python. The rows are padded to
one of a few numbers; a row that fills up is nobody's, and sees nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from adaponder.execution.base import Pass
from adaponder.inference.bodies.base import Body, Pools, RowShape
from adaponder.inference.bodies.fused import FusedBody
from adaponder.inference.graphs import Graphs, bucket_of, context_of
from adaponder.ops.ledger_attention import LedgerRows, Tiles
from adaponder.ops.ledger_attention.choice import by_kernels

_SPARE = 64  # tiles beyond those of one long cohort


def padded_rows(rows: int) -> int:
    """The least number of rows in cohorts, of those that graphs are made for, that is not smaller."""
    step = max(64, 1 << (rows - 1).bit_length() >> (3 if rows <= 1024 else 4))  # at most a quarter, or an eighth, more
    return -(-rows // step) * step


class GraphedBody(Body):
    """A body that answers as ``body`` does, by replaying graphs of it, always with the same pools.

    A pass of rows alone, or of cohorts where the body is fused, is replayed; any other is read as it comes.
    """

    def __init__(self, body: Body, owner: Graphs, nobody: int):
        self.body, self.owner, self.nobody = body, owner, nobody
        self.tiled = isinstance(body, FusedBody)  # others read the cohorts on the host
        self.graphs: dict[Hashable, _PassGraph] = {}

    def row_shapes(self) -> list[RowShape]:
        return self.body.row_shapes()

    def read(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        if rows.cohorts and (rows.alone or not self.tiled or not by_kernels(pools.keys[0], pools.values[0])):
            return self.body.read(x, position, rows, pools)
        tiles: list[tuple[int, int, int, int]] = []
        if rows.cohorts:
            from adaponder.ops.ledger_attention import launch

            size, block = padded_rows(len(x)), launch.block_of(rows.cohorts)
            tiles = launch.tiles_of(rows.cohorts, block)
            tiles += [(first, size, self.nobody, 0) for first in range(len(x), size, block)]
            room = size // block + _SPARE
            while room < len(tiles):
                room *= 2
            key: tuple[int, ...] = (size, block, room)
        else:
            key = (bucket_of(len(x)), 0, context_of(rows.reach, rows.index.shape[2]))
        if key not in self.graphs:
            self.graphs[key] = _PassGraph(self, key, x, rows, pools)
        return self.graphs[key].run(x, position, rows, tiles)


class _PassGraph:
    """One graph: ``key`` is (rows, 0, bound on slots) for rows alone, (rows, rows of a tile, tiles) for cohorts."""

    def __init__(self, owner: GraphedBody, key: tuple[int, ...], x: Tensor, rows: LedgerRows, pools: Pools):
        size, block, bound = key
        self.nobody = owner.nobody
        self.x = x.new_zeros(size, x.shape[1])
        self.position, self.lane, self.slot, self.iteration, self.row = x.new_zeros(5, size, dtype=torch.long)
        self.blank = 0 if block == 0 else -1  # a row alone reads no keys but its own at slot 0
        self.slot.fill_(self.blank)
        self.lane.fill_(owner.nobody)
        where: dict[str, Any] = {"alone": size, "longest": bound}
        self.table = None
        if block:
            self.table = torch.zeros(bound, 4, dtype=torch.int32, device=x.device)
            where = {"alone": 0, "tiles": Tiles(block, self.table)}
        places = LedgerRows(rows.index, self.lane, self.slot, self.iteration, self.row, **where)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # over nobody's rows: kernels are compiled
            owner.body.read(self.x, self.position, places, pools)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=owner.owner.pool):
            self.output = owner.body.read(self.x, self.position, places, pools)
        owner.owner.pool = self.graph.pool()

    def run(self, x: Tensor, position: Tensor, rows: LedgerRows, tiles: list[tuple[int, int, int, int]]) -> Pass:
        count = len(x)
        self.x[:count] = x
        given = (position, rows.lane, rows.slot, rows.iteration, rows.row)
        for kept, values in zip((self.position, self.lane, self.slot, self.iteration, self.row), given, strict=True):
            kept[:count] = values
        self.position[count:], self.lane[count:], self.slot[count:] = 0, self.nobody, self.blank
        self.iteration[count:], self.row[count:] = 0, 0  # the first page is nobody's
        if self.table is not None:
            table = torch.zeros(len(self.table), 4, dtype=torch.int32)
            table[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
            self.table.copy_(table, non_blocking=True)
        self.graph.replay()
        # The graph's own memory holds the next pass's answer soon.
        return Pass(self.output.hidden[:count].clone(), self.output.stream[:count].clone())
