"""Loop Transformer, which runs the layers again on their own residual stream, and vanilla, which runs them once."""

from __future__ import annotations

from adaponder.execution.base import Pass, Rows
from adaponder.methods.base import Method, State


class Loop(Method):
    """Runs the layers on their own output: E^0 is not added again, and only the last loop's output is normed."""

    browser_update = "stream"

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        return State(output.stream, output.hidden)

    def needs_stream(self, iterations: int) -> bool:
        return iterations > 1


class Vanilla(Loop):
    """The stock decoder: one iteration."""

    fixed_iterations = 1
    browser_update = "stream"
