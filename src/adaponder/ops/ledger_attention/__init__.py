"""Attention of rows at any iteration, through an index into pools of keys and values."""

from torch import Tensor

from adaponder.ops.ledger_attention import torch as reference
from adaponder.ops.ledger_attention.torch import Cohort, LedgerRows

__all__ = ["Cohort", "LedgerRows", "ledger_attention"]


def ledger_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The torch version."""
    return reference.ledger_attention(query, keys, values, rows, window=window, scale=scale)
