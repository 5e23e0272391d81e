"""Loop Transformer: the whole layer stack again on its own residual stream; and vanilla, the loop of one."""

from __future__ import annotations

from adaponder.execution.base import Pass, Rows
from adaponder.methods.base import Method, State


class Loop(Method):
    """No input injection, no norm between loops: the final norm is applied once, to what the last loop left."""

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        return State(output.stream, output.hidden)

    def needs_stream(self, iterations: int) -> bool:
        return iterations > 1


class Vanilla(Loop):
    """The stock decoder: one iteration."""

    fixed_iterations = 1
