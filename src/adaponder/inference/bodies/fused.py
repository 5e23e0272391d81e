"""What fused bodies share: rotary tables, the step through the pools, and the final norm."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaponder.backbones.wrapper import Backbone
from adaponder.execution.base import Pass
from adaponder.inference.bodies.base import Body, Pools, RowShape
from adaponder.inference.bodies.weights import norm_of, rotary_table
from adaponder.ops.ledger_attention import (
    LedgerRows,
    Projection,
    Scratch,
    Turn,
    decode_attention,
    enter,
    ledger_attention,
    scratch_for,
)
from adaponder.ops.row_linear import row_norm


class Where(NamedTuple):
    """Where the rows of a pass stand: those alone, and those in cohorts counted from their own first.

    ``together`` is ``None`` where there are no cohorts.
    """

    alone: LedgerRows
    turn: Turn
    together: LedgerRows | None
    together_turn: Turn


class FusedBody(Body):
    """A decoder whose layers are few kernels each, on the parameters of its own modules.

    Args:
        backbone: one that the class's ``fits`` has no objection to.
        lanes: the most rows alone in a pass.
        apart: whether rows alone are of different lanes, so that none sees another of the same pass. Where a token
            takes several slots (``pause``) they are not.
        positions: how many positions there are at most; by default as many as the config names.
    """

    def __init__(self, backbone: Backbone, *, lanes: int, apart: bool, positions: int | None = None):
        config: Any = backbone.stock.config
        self.config, self.windows, self.apart = config, backbone.layer_windows, apart
        self.norm = norm_of(backbone.norm)
        like = self.norm.weight
        self.cos, self.sin = rotary_table(backbone, like, positions or config.max_position_embeddings)
        self.heads: int = config.num_attention_heads
        self.key_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.scratch: Scratch | None = None
        # Kernels that start before the one before them ends need compute capability 9.
        self.dependent = like.is_cuda and torch.cuda.get_device_capability(like.device) >= (9, 0)
        if like.is_cuda:
            self.scratch = scratch_for(lanes, self.heads, self.size, like.device)

    def row_shapes(self) -> list[RowShape]:
        return [RowShape(self.key_heads, self.size, self.key_heads, self.size)] * len(self.windows)

    def read(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        where, stream = self._where(position, rows), x
        for layer in range(len(self.windows)):
            stream = self.layer(layer, stream, where, pools)
        return Pass(row_norm(stream, self.norm), stream)

    @abstractmethod
    def layer(self, layer: int, x: Tensor, where: Where, pools: Pools) -> Tensor:
        """The residual stream ``[n, d]`` after a layer."""

    def _where(self, position: Tensor, rows: LedgerRows) -> Where:
        first, rest = slice(0, rows.alone), slice(rows.alone, None)
        together = None
        if rows.cohorts:
            shift = rows.alone
            cohorts = tuple(x._replace(start=x.start - shift, stop=x.stop - shift) for x in rows.cohorts)
            together = _part(rows, rest)._replace(alone=0, cohorts=cohorts)
        elif rows.tiles is not None:
            together = rows
        turn, later = (Turn(position[part], self.cos, self.sin) for part in (first, rest))
        return Where(_part(rows, first)._replace(cohorts=()), turn, together, later)

    def attend(
        self, layer: int, qkv: Tensor, where: Where, pools: Pools, projection: Projection, *, scale: float
    ) -> Tensor:
        """Turns queries and keys, writes keys and values to the pools and attends: ``[n, heads * size]``.

        ``qkv [n, (heads + 2 key heads) size]`` is the product, laid out as ``projection`` says.
        """
        keys, values, window = pools.keys[layer], pools.values[layer], self.windows[layer]
        count, mixed = where.alone.alone, []
        if count and self.apart:
            mixed.append(
                decode_attention(
                    qkv[:count],
                    keys,
                    values,
                    where.alone,
                    projection,
                    where.turn,
                    window=window,
                    scale=scale,
                    scratch=self.scratch,
                    dependent=self.dependent,
                )
            )
        elif count:
            query = enter(qkv[:count], keys, values, where.alone.row, projection, where.turn)
            mixed.append(
                ledger_attention(query, keys, values, where.alone, window=window, scale=scale, scratch=self.scratch)
            )
        if where.together is not None:
            query = enter(qkv[count:], keys, values, where.together.row, projection, where.together_turn)
            mixed.append(ledger_attention(query, keys, values, where.together, window=window, scale=scale))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(1)


def _part(rows: LedgerRows, part: slice) -> LedgerRows:
    """The places of some rows of a pass."""
    names = ("lane", "slot", "iteration", "row")
    return rows._replace(**{name: getattr(rows, name)[part] for name in names})
