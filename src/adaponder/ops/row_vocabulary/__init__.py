"""Head and expectation of the rows of a tick: each weight of the vocabulary is read at most once."""

from torch import Tensor

from adaponder.ops.fused import runs_fused
from adaponder.ops.row_vocabulary import torch as reference

__all__ = ["row_expectation", "row_logits"]


def row_logits(hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """The torch version, or its Triton kernel where it runs."""
    if runs_fused(hidden):
        from adaponder.ops.row_vocabulary import triton

        return triton.row_logits(hidden, weight, bias=bias)
    return reference.row_logits(hidden, weight, bias=bias)


def row_expectation(
    logits: Tensor,
    table: Tensor,
    goes_on: Tensor | None = None,
    *,
    scale: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """The torch version, or its Triton kernels where they run; the k likeliest are few rows and left to torch."""
    if top_k is None and runs_fused(table):
        from adaponder.ops.row_vocabulary import triton

        return triton.row_expectation(logits, table, goes_on, scale=scale)
    return reference.row_expectation(logits, table, goes_on, scale=scale, top_k=top_k)
