"""Loop Transformer: the whole layer stack again on its own residual stream; and vanilla, the loop of one."""

from __future__ import annotations

from torch import Tensor

from adaponder.execution.runs import Run
from adaponder.methods.base import Ask, Iteration, Method, Trajectory


class Loop(Method):
    """No input injection, no norm between loops: the final norm is applied once, to what the last loop left."""

    def forward(self, run: Run, embedded: Tensor, ask: Ask) -> Trajectory:
        hidden, stream = run.read(self.scaled(embedded))
        ask.show(Iteration(0, hidden, None, run.active))
        for i in range(1, ask.iterations):
            hidden, stream = run.read(stream)
            ask.show(Iteration(i, hidden, None, run.active))
        return Trajectory(hidden)

    def needs_stream(self, iterations: int) -> bool:
        return iterations > 1


class Vanilla(Loop):
    """The stock decoder: one iteration."""

    fixed_iterations = 1
