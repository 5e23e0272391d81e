"""Multiplies few rows with wide matrices, with the norm before and the activation or residual after.

A decoding step spends its time here. Norms, sums, activations and the residual sum are in float32; results are
rounded once. How many rows there are decides how (``FEW`` and ``SOME`` in ``triton.py``):

- few: matrix-vector. A program owns one row and a few outputs, and loads their weights before it
  waits for the kernel before it (``launch_options`` in ``ops/kernels.py``).
- some: a program owns a few outputs of all rows; weights stream through shared memory
  once.
- more: the matrix library, with the norm as a kernel.

Measured times by shape and rows are in ``benchmarks/records/tuning-h200.json``; what was tried and left out in
``experiments/LOG.md``.
"""

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.row_linear import torch as plain
from adaponder.ops.row_linear.torch import ACTIVATIONS, Linear, Norm, Piece, Term

__all__ = ["ACTIVATIONS", "Linear", "Norm", "Piece", "Term"]
__all__ += ["gated_linear", "normed_linears", "residual_linears", "row_norm"]

_KERNELS = "adaponder.ops.row_linear.triton"
row_norm = dispatch(plain.row_norm, _KERNELS, when=runs_fused)
normed_linears = dispatch(plain.normed_linears, _KERNELS, when=runs_fused)
gated_linear = dispatch(plain.gated_linear, _KERNELS, when=runs_fused)
residual_linears = dispatch(plain.residual_linears, _KERNELS, when=runs_fused)
