"""Multiplies a small batch of rows with weight matrices, fused with the norm before and activation or residual after.

Decoding spends most of its time here. The kernels compute norms, sums, activations and the residual sum in float32 and
round results once. The number of rows selects the implementation (``FEW`` and ``SOME`` in ``triton.py``):

- up to ``FEW``, a matrix-vector kernel: a program computes a few outputs of one row and loads their weights
  before it waits for the previous kernel (``launch_options`` in ``ops/kernels.py``);
- up to ``SOME``: a program computes a few outputs of all rows; each weight passes through shared memory once;
- more rows: the matrix library, with the norm as a kernel.

Measured times are in ``benchmarks/records/tuning-h200.json``, rejected variants in ``experiments/LOG.md``.
"""

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.row_linear import torch as plain
from adaponder.ops.row_linear.torch import ACTIVATIONS, Linear, Norm, Piece, Term

__all__ = ["ACTIVATIONS", "Linear", "Norm", "Piece", "Term"]
__all__ += ["gated_linear", "normed_linears", "residual_linears", "row_norm"]

row_norm = dispatch(plain.row_norm, when=runs_fused)
normed_linears = dispatch(plain.normed_linears, when=runs_fused)
gated_linear = dispatch(plain.gated_linear, when=runs_fused)
residual_linears = dispatch(plain.residual_linears, when=runs_fused)
