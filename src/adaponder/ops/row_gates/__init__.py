"""Computes each row's own gate, ``W2 gelu(W1 h + b1) + b2``, where rows stand at different iterations.

The torch version multiplies with all stacked gates and picks. For up to ``FEW`` rows the kernel's program owns one
row and a block of inner features and reads that row's gate only; the program of a row that ends last adds the parts
in order, so the result does not depend on which that is. H200, bf16, one row, d = 1,024, inner width 4,096: 6.3 us.
"""

from torch import Tensor

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.row_gates import torch as plain
from adaponder.ops.row_gates.torch import StackedGates

__all__ = ["StackedGates", "counter_for", "stacked_gates"]


def _runs(stacked: StackedGates, hidden: Tensor, *rest: Tensor, **options: object) -> bool:
    return runs_fused(hidden)


stacked_gates = dispatch(plain.stacked_gates, "adaponder.ops.row_gates.triton", when=_runs)


def counter_for(hidden: Tensor) -> Tensor | None:
    """Returns the kernel's counter, ``None`` where torch runs; calls that share it must follow each other."""
    if not runs_fused(hidden):
        return None
    from adaponder.ops.row_gates import triton

    return triton.counter_on(hidden.device)
