"""What the engine asks of a backbone: one pass over rows that read and write a ledger's pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.execution.base import Pass
from adaponder.ops.ledger_attention import LedgerRows


class RowShape(NamedTuple):
    """The size of one row in a layer: keys are ``[heads, key_size]``, values ``[value_heads, value_size]``."""

    heads: int
    key_size: int
    value_heads: int
    value_size: int

    def numbers(self) -> int:
        return self.heads * self.key_size + self.value_heads * self.value_size


class Pools(NamedTuple):
    """Keys and values of every row, one pair of tensors ``[rows, heads, size]`` per layer."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def empty(cls, shapes: list[RowShape], rows: int, dtype: torch.dtype, device: torch.device) -> Pools:
        """Room for so many rows. They hold zeros: attention multiplies what it masks by 0, and 0 times NaN is NaN."""
        keys = [torch.zeros(rows, shape.heads, shape.key_size, dtype=dtype, device=device) for shape in shapes]
        values = [
            torch.zeros(rows, shape.value_heads, shape.value_size, dtype=dtype, device=device) for shape in shapes
        ]
        return cls(keys, values)


class Body(ABC):
    """A backbone without its embedding and head."""

    @abstractmethod
    def row_shapes(self) -> list[RowShape]:
        """What one row holds, per layer."""

    @abstractmethod
    def read(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        """One pass (eq. 1) over ``x [n, d]`` at ``position [n]``: hidden states and residual stream, ``[n, d]`` each.

        Each layer writes every row's keys and values to the pools at ``rows.row`` and then lets each row see what the
        index shows it.
        """
