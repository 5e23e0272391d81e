"""Runs any decoder as the engine's body, through its own unmodified layers."""

from __future__ import annotations

import torch
from torch import Tensor

from adaponder.backbones.attention import LedgerLane
from adaponder.backbones.views import IterationView, KeysValues, PlainView
from adaponder.backbones.wrapper import Backbone
from adaponder.execution.base import Pass
from adaponder.inference.bodies.base import Body, Pools, RowShape
from adaponder.ops.ledger_attention import LedgerRows
from adaponder.ops.masks import Places


class StockBody(Body):
    """The wrapped stock layers.

    Where the decoder uses our attention function, all rows form one batch entry and attend through the index. Where it
    does not, or expands its cache (latent attention), each row is a batch entry and its keys and values are gathered.
    """

    def __init__(self, backbone: Backbone, *, stream: bool):
        self.backbone, self.stream = backbone, stream
        self.gathers = backbone.unfolds or not backbone.packs()

    @torch.no_grad()
    def row_shapes(self) -> list[RowShape]:
        backbone, weight = self.backbone, self.backbone.head()[0]
        x = torch.zeros(1, 1, backbone.stock.config.hidden_size, dtype=weight.dtype, device=weight.device)
        position = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        rows = backbone.read(x, position=position, mask=None, view=PlainView, stream=False).rows
        return [RowShape(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]) for keys, values in rows]

    def forward(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        output = (self._forward_gathered if self.gathers else self._forward_indexed)(x, position, rows, pools)
        return Pass(output.hidden.flatten(0, 1), output.stream.flatten(0, 1))

    def _forward_indexed(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools):
        return self.backbone.read(
            x[None],
            position=position[None],
            mask=None,
            view=PoolView,
            holding={"pools": pools, "row": rows.row},
            lane=LedgerLane(rows, self.backbone.layer_windows, []),
            stream=self.stream,
        )

    def _forward_gathered(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools):
        slots = rows.index.shape[2] if rows.longest is None else rows.longest
        slots = max([slots, *(cohort.last_slot + 1 for cohort in rows.cohorts)])
        read = rows.index[rows.lane, rows.iteration, :slots]
        slot = torch.arange(slots, device=x.device).expand_as(read)
        query = Places(rows.slot[:, None], rows.slot[:, None])
        mask = self.backbone.mask(query, Places(slot, slot, present=read >= 0), x.dtype)
        return self.backbone.read(
            x[:, None],
            position=position[:, None],
            mask=mask,
            view=GatheringView,
            holding={"pools": pools, "row": rows.row, "read": read.clamp(min=0).long()},
            stream=self.stream,
        )


class PoolView(IterationView):
    """Writes the rows of a pass to the pools and returns the pools; attention reads them through the index."""

    def __init__(self, layers: int, *, pools: Pools, row: Tensor):
        super().__init__(layers)
        self.pools, self.row = pools, row

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        pools = self.pools
        pools.keys[layer].index_copy_(0, self.row, keys.transpose(1, 2).flatten(0, 1))
        pools.values[layer].index_copy_(0, self.row, values.transpose(1, 2).flatten(0, 1))
        self.written[layer] = pools.keys[layer], pools.values[layer]
        return pools.keys[layer], pools.values[layer]


class GatheringView(PoolView):
    """Writes like :class:`PoolView` and returns the keys and values of each row, ``[n, heads, slots, size]``."""

    def __init__(self, layers: int, *, pools: Pools, row: Tensor, read: Tensor):
        super().__init__(layers, pools=pools, row=row)
        self.read = read

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        keys, values = super().answer(keys, values, layer)
        return keys[self.read].transpose(1, 2), values[self.read].transpose(1, 2)
