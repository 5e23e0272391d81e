"""Products of few rows with wide matrices: what a decoding step spends its time on."""

from collections.abc import Sequence

from torch import Tensor

from adaponder.ops.fused import runs_fused
from adaponder.ops.row_linear import torch as reference
from adaponder.ops.row_linear.torch import ACTIVATIONS, Linear, Norm, Piece, Term

__all__ = ["ACTIVATIONS", "Linear", "Norm", "Piece", "Term"]
__all__ += ["gated_linear", "normed_linears", "residual_linears", "row_norm"]


def row_norm(x: Tensor, norm: Norm) -> Tensor:
    """The torch version, or its Triton kernel where it runs."""
    if runs_fused(x):
        from adaponder.ops.row_linear import triton

        return triton.row_norm(x, norm)
    return reference.row_norm(x, norm)


def normed_linears(x: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The torch version, or its Triton kernels where they run."""
    if runs_fused(x):
        from adaponder.ops.row_linear import triton

        return triton.normed_linears(x, pieces)
    return reference.normed_linears(x, pieces)


def gated_linear(x: Tensor, gate: Linear, up: Linear, norm: Norm, *, activation: str) -> Tensor:
    """The torch version, or its Triton kernels where they run."""
    if runs_fused(x):
        from adaponder.ops.row_linear import triton

        return triton.gated_linear(x, gate, up, norm, activation=activation)
    return reference.gated_linear(x, gate, up, norm, activation=activation)


def residual_linears(residual: Tensor, terms: Sequence[Term]) -> Tensor:
    """The torch version, or its Triton kernel where it runs."""
    if runs_fused(residual):
        from adaponder.ops.row_linear import triton

        return triton.residual_linears(residual, terms)
    return reference.residual_linears(residual, terms)
