"""Computes the logits of a tick's rows, and the expected next embedding of rows whose token is still active."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from adaponder.ops.vocab_expectation.torch import mixture


def row_logits(hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Computes ``hidden @ weight.T + bias``, ``[n, vocabulary]``, in the precision of the head."""
    return functional.linear(hidden, weight, bias)


def row_expectation(
    logits: Tensor, table: Tensor, active: Tensor | None = None, *, scale: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Computes ``softmax(logits) @ table * scale`` for the active rows of ``logits [n, vocabulary]``, zeros for others.

    ``active`` is bool ``[n]``, or ``None`` if all rows are. With ``top_k`` the softmax is over the k largest logits.
    """
    mixed = mixture(logits, table, top_k) * scale
    return mixed if active is None else mixed.masked_fill(~active[:, None], 0.0)
