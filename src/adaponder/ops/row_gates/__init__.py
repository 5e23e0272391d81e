"""The gates of rows at different iterations: each row asks its own."""

from collections.abc import Sequence

from torch import Tensor, nn

from adaponder.ops.fused import runs_fused
from adaponder.ops.row_gates.torch import StackedGates, called_gates, stack_gates, stacked_gates

__all__ = ["RowGates", "StackedGates", "stack_gates"]


class RowGates:
    """Gates as an engine asks them: gate ``i`` after iteration ``i``, the last one after all later ones.

    Plain gates are copied side by side once (``gates`` times the size of one); any other modules are called each. Calls
    follow one another on one stream.
    """

    def __init__(self, gates: Sequence[nn.Module] | nn.ModuleList):
        self.gates = gates
        self.stacked = stack_gates(gates)
        self.counter: Tensor | None = None

    def __call__(self, hidden: Tensor, iteration: Tensor) -> Tensor:
        """The logit of each row's own gate: ``hidden [n, …, d]`` and ``iteration [n, …]`` to ``[n, …]``."""
        rows, depth = hidden.reshape(-1, hidden.shape[-1]), iteration.reshape(-1)
        return self._rows(rows, depth).reshape(iteration.shape)

    def _rows(self, hidden: Tensor, iteration: Tensor) -> Tensor:
        if self.stacked is None:
            return called_gates(self.gates, hidden, iteration)
        if runs_fused(hidden):
            from adaponder.ops.row_gates import triton

            if self.counter is None:
                self.counter = triton.counter_on(hidden.device)
            return triton.stacked_gates(self.stacked, hidden, iteration, counter=self.counter)
        return stacked_gates(self.stacked, hidden, iteration)
