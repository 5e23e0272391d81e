"""What fused bodies share: rotary tables, the step through the pools, and the final norm."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from adaponder.backbones.wrapper import Backbone
from adaponder.execution.base import Pass
from adaponder.inference.bodies.base import Body, Pools, RowShape
from adaponder.inference.bodies.weights import norm_of, rotary_table
from adaponder.ops.ledger_attention import LedgerRows, ledger_attention
from adaponder.ops.row_linear import row_norm


class FusedBody(Body):
    """A decoder whose layers are few kernels each, on the parameters of its own modules.

    Args:
        backbone: one that the class's ``fits`` has no objection to.
        positions: how many positions there are at most; by default as many as the config names.
    """

    def __init__(self, backbone: Backbone, *, positions: int | None = None):
        config: Any = backbone.stock.config
        self.config, self.windows = config, backbone.layer_windows
        self.norm = norm_of(backbone.norm)
        like = self.norm.weight
        self.cos, self.sin = rotary_table(backbone, like, positions or config.max_position_embeddings)
        self.heads: int = config.num_attention_heads
        self.key_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    def row_shapes(self) -> list[RowShape]:
        return [RowShape(self.key_heads, self.size, self.key_heads, self.size)] * len(self.windows)

    def read(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        stream = x
        for layer in range(len(self.windows)):
            stream = self.layer(layer, stream, position, rows, pools)
        return Pass(row_norm(stream, self.norm), stream)

    @abstractmethod
    def layer(self, layer: int, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Tensor:
        """The residual stream ``[n, d]`` after a layer."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        rows: LedgerRows,
        pools: Pools,
        *,
        scale: float,
    ) -> Tensor:
        """Turns queries and keys, writes keys and values to the pools and attends: ``[n, heads * size]``.

        ``query [n, heads, size]``, ``key`` and ``value [n, key heads, size]``, all as the products gave them.
        """
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        query, key = (_turned(heads, cos, sin) for heads in (query, key))
        pools.keys[layer].index_copy_(0, rows.row, key)
        pools.values[layer].index_copy_(0, rows.row, value)
        mixed = ledger_attention(
            query, pools.keys[layer], pools.values[layer], rows, window=self.windows[layer], scale=scale
        )
        return mixed.flatten(1)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``heads [n, heads, size]`` turned by ``cos`` and ``sin [n, 1, width]``; what lies beyond the width stays."""
    width = cos.shape[-1]
    first, second = heads[..., : width // 2], heads[..., width // 2 : width]
    turned = heads[..., :width] * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, heads[..., width:]), -1) if heads.shape[-1] > width else turned
