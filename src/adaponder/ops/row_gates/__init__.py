"""The gates of rows at different iterations: each row asks its own."""

from torch import Tensor

from adaponder.ops.fused import runs_fused
from adaponder.ops.row_gates import torch as reference
from adaponder.ops.row_gates.torch import StackedGates

__all__ = ["StackedGates", "counter_for", "stacked_gates"]


def stacked_gates(stacked: StackedGates, hidden: Tensor, iteration: Tensor, *, counter: Tensor | None = None) -> Tensor:
    """The torch version, or its Triton kernel where it runs, which counts in ``counter``."""
    if runs_fused(hidden):
        from adaponder.ops.row_gates import triton

        return triton.stacked_gates(stacked, hidden, iteration, counter=counter)
    return reference.stacked_gates(stacked, hidden, iteration)


def counter_for(hidden: Tensor) -> Tensor | None:
    """What the kernel counts in; ``None`` where the torch version runs. Calls that share it follow one another."""
    if not runs_fused(hidden):
        return None
    from adaponder.ops.row_gates import triton

    return triton.counter_on(hidden.device)
