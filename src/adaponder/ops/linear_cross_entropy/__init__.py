"""The loss of each token, or their weighted sum, without the logits of all."""

from torch import Tensor

from adaponder.ops.fused import runs_fused
from adaponder.ops.linear_cross_entropy import torch as reference
from adaponder.ops.linear_cross_entropy.torch import plain_linear_cross_entropy

__all__ = ["linear_cross_entropy", "linear_cross_entropy_sum", "plain_linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """The torch version, or its Triton kernels where they run."""
    if runs_fused(hidden):
        from adaponder.ops.linear_cross_entropy.triton import linear_cross_entropy as fused

        return fused(hidden, weight, targets, bias=bias, chunk=chunk)
    return reference.linear_cross_entropy(hidden, weight, targets, bias=bias, chunk=chunk)


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The torch version, or its Triton kernels where they run."""
    if runs_fused(hidden):
        from adaponder.ops.linear_cross_entropy.triton import linear_cross_entropy_sum as fused

        return fused(hidden, weight, targets, token_weights, bias=bias, chunk=chunk)
    return reference.linear_cross_entropy_sum(hidden, weight, targets, token_weights, bias=bias, chunk=chunk)
