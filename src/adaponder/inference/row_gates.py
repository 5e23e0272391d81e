"""A method's gates as rows at different iterations ask them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adaponder.halting import Column, Gate
from adaponder.ops.precision import widened
from adaponder.ops.row_gates import StackedGates, counter_for, stacked_gates


class RowGates:
    """Gate ``i`` after iteration ``i``, the last one after all later ones.

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
        if self.counter is None:
            self.counter = counter_for(hidden)
        return stacked_gates(self.stacked, hidden, iteration, counter=self.counter)


def stack_gates(gates: Sequence[nn.Module] | nn.ModuleList) -> StackedGates | None:
    """The gates' weights side by side, or ``None`` where one of them is not a plain :class:`adaponder.halting.Gate`."""
    plain = [gate for gate in gates if type(gate) is Gate and type(gate.out) is Column]
    shapes = {gate.out.weight.shape for gate in plain}
    kinds = {type(gate.inner) for gate in plain}
    if len(plain) != len(gates) or len(shapes) != 1 or kinds not in ({nn.Linear}, {type(None)}):
        return None
    maps = [gate.inner for gate in plain if gate.inner is not None]
    with torch.no_grad():
        return StackedGates(
            torch.stack([x.weight for x in maps]) if maps else None,
            torch.stack([x.bias for x in maps]) if maps else None,
            widened(torch.stack([gate.out.weight[0] for gate in plain])),
            widened(torch.stack([gate.out.bias[0] for gate in plain])),
        )


def called_gates(gates: Sequence[nn.Module] | nn.ModuleList, hidden: Tensor, iteration: Tensor) -> Tensor:
    """The same for any modules that map ``[n, d]`` to ``[n]``: each is called with all rows."""
    logits = torch.stack([gate(hidden) for gate in gates], dim=-1)
    return logits.gather(-1, iteration.clamp(max=len(gates) - 1)[:, None]).squeeze(-1)
