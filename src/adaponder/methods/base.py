"""What every method of the family is: what one row does between two passes of the same backbone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution, Pass, Rows
from adaponder.execution.tokens import Tokens
from adaponder.fields import Recurrence
from adaponder.methods.facts import Facts
from adaponder.methods.objectives import CrossEntropy, LossFunction, Objective, Trajectory
from adaponder.policies import FixedDepth, Policy


class State(NamedTuple):
    """What a method keeps of each row from one pass to the next: tensors with one entry per row.

    Attributes:
        input: what the next pass reads, ``[…, d]``.
        hidden: the final-normed hidden state after the last pass, which head and gates read; ``None`` before the first.
        carried: whatever else the method needs, one entry per row each.
    """

    input: Tensor
    hidden: Tensor = None  # type: ignore[assignment]
    carried: tuple[Tensor, ...] = ()


class Method(Facts, nn.Module, ABC):
    """One recurrence, said for a row: ``start``, then ``receive`` after each pass and ``advance`` before the next.

    :meth:`forward` runs it over whole batches, all rows at one iteration. The three may also be called with rows at
    different iterations, so nothing in them may depend on the batch.

    ``keep_logits`` trades memory for time where a method mixes the vocabulary: see
    :func:`adaponder.ops.vocab_expectation.torch.vocab_expectation`.
    """

    def __init__(self, config: Recurrence):
        super().__init__()
        self.config = config
        self.keep_logits = False
        # Made here: a compiler (torch 2.11) does not find the fields of one that is made while it traces.
        self.full_depth = FixedDepth(config.iterations)

    # --- the recurrence -----------------------------------------------------------------------------------------

    def start(self, rows: Rows, embedded: Tensor) -> State:
        """What the first pass reads: E^0."""
        return State(self.scaled(embedded))

    @abstractmethod
    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        """The state after a pass."""

    def advance(self, rows: Rows, state: State) -> State:
        """The state for the next pass; not called after the last. Methods that halt call ``rows.decide`` here, once."""
        return state

    def forward(self, execution: Execution, embedded: Tensor) -> Trajectory:
        """The recurrence over a whole batch, ``embedded [batch, time, d]``."""
        passes = self.passes(execution.control.iterations)
        state = self.start(execution, embedded)
        for i in range(passes):
            state = self.receive(execution, state, execution.read(state.input))
            hidden = state.hidden
            if i < passes - 1:
                state = self.advance(execution, state)
            if execution.shown == i:
                execution.show(hidden)  # decide has not shown it, with a gate
        return Trajectory(state.hidden, _stacked(execution.gate_logits), execution.states)

    def scaled(self, embedded: Tensor) -> Tensor:
        """Embeddings as the recurrence takes them in: E^0."""
        return embedded * self.config.input_scale

    # --- training -----------------------------------------------------------------------------------------------

    def reset_parameters(self, std: float) -> None:
        """Initialises what is the method's own."""

    def default_policy(self, *, training: bool) -> Policy:
        return self.full_depth

    def objective(self, values: Objective) -> LossFunction:
        """The method's training loss at these values of the schedule."""
        return CrossEntropy()

    # --- facts of a model (those of the class are in facts.py) ---------------------------------------------------

    def reuse(self) -> str:
        """What others see of a halted token (see :class:`adaponder.execution.base.Execution`)."""
        return self.reuse_rule(self.config)

    def needs_stream(self, iterations: int) -> bool:
        """Whether the recurrence looks at the residual stream before the final norm."""
        return False

    def arrange(self, tokens: Tokens, iterations: int) -> Tokens:
        """The tokens as the backbone reads them."""
        return tokens


def _stacked(gates: list[Tensor]) -> Tensor | None:
    return torch.stack(gates, dim=-1) if gates else None
