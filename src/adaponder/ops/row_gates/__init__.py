"""Computes the gate of each row, ``W2 gelu(W1 h + b1) + b2``, for rows at different iterations.

The torch version computes all stacked gates for all rows and selects. For up to ``FEW`` rows, a program of the kernel
computes a block of inner features of one row and reads only that row's gate; the last program of a row to finish sums
the blocks in order, so the result is deterministic.
"""

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.row_gates import torch as plain
from adaponder.ops.row_gates.torch import StackedGates, counter_on

__all__ = ["StackedGates", "counter_on", "stacked_gates"]

stacked_gates = dispatch(plain.stacked_gates, when=lambda stacked, hidden, *rest, **options: runs_fused(hidden))
