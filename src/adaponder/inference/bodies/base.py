"""Defines what the engine needs of a backbone: one forward pass over rows that read and write the KV pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.execution.base import Pass
from adaponder.ops.ledger_attention import LedgerRows


class RowShape(NamedTuple):
    """The shape of one row in a layer: keys ``[heads, key_size]``, values ``[value_heads, value_size]``."""

    heads: int
    key_size: int
    value_heads: int
    value_size: int

    def numel(self) -> int:
        """Returns the number of elements of one row in this layer."""
        return self.heads * self.key_size + self.value_heads * self.value_size


class Pools(NamedTuple):
    """The keys and values of all rows, one pair of tensors ``[rows, heads, size]`` per layer."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def empty(cls, shapes: list[RowShape], rows: int, dtype: torch.dtype, device: torch.device) -> Pools:
        """Allocates ``rows`` rows of zeros: attention multiplies masked values by 0, and 0 times NaN is NaN."""
        keys = [torch.zeros(rows, shape.heads, shape.key_size, dtype=dtype, device=device) for shape in shapes]
        values = [
            torch.zeros(rows, shape.value_heads, shape.value_size, dtype=dtype, device=device) for shape in shapes
        ]
        return cls(keys, values)


class Body(ABC):
    """A backbone without its embedding and head."""

    @abstractmethod
    def row_shapes(self) -> list[RowShape]:
        """Returns the shape of a row in each layer."""

    @abstractmethod
    def forward(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        """Runs one pass (eq. 1) over ``x [n, d]`` at ``position [n]``; returns hidden states and residual stream.

        Each layer writes every row's keys and values to the pools at ``rows.row``, then lets each row attend to the
        rows that the index lists for it.
        """
