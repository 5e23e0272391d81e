"""Computes the logits of a tick's rows, and the expected next embedding of those rows that continue."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from adaponder.ops.vocab_expectation.torch import mixture


def row_logits(hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Computes ``hidden @ weight.T + bias``, ``[n, vocabulary]``, in the precision of the head."""
    return functional.linear(hidden, weight, bias)


def row_expectation(
    logits: Tensor, table: Tensor, goes_on: Tensor | None = None, *, scale: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Computes ``softmax(logits) @ table * scale`` for the rows of ``logits [n, vocabulary]`` that continue.

    Other rows get zeros; ``goes_on`` is bool ``[n]``, or ``None`` if all continue. With ``top_k`` the softmax is over
    the k largest logits.
    """
    mixed = mixture(logits, table, top_k) * scale
    return mixed if goes_on is None else mixed.masked_fill(~goes_on[:, None], 0.0)
