"""Ouro (LoopLM): the final-normed state is fed in again, and an exit gate spreads each token's loss over the loops."""

from __future__ import annotations

from torch import Tensor, nn

from adaponder.execution.base import Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import gate_probability
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import LossFunction, Objective
from adaponder.methods.objectives.exits import ExitImprovementLoss, ExpectedExitLoss
from adaponder.ops.precision import wide_dtype
from adaponder.policies import ExitThreshold, Policy


class Exit(nn.Linear):
    """The logit of a loop's exit probability, lambda."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).squeeze(-1)


class Ouro(Method):
    """One exit gate for all loops; training always runs every loop, exits happen in evaluation."""

    def __init__(self, config: Recurrence):
        super().__init__(config)
        self.exit = Exit(config.hidden_size, 1)

    def start(self, rows: Rows, embedded: Tensor) -> State:
        staying = embedded.new_ones(embedded.shape[:-1], dtype=wide_dtype(embedded.dtype))
        return State(self.scaled(embedded), carried=(staying,))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        hidden, (staying,) = rows.freeze(output.hidden, state.hidden), state.carried
        logit = rows.gate((self.exit,), hidden)
        staying = staying * gate_probability(-logit)  # prod (1 - lambda_j)
        return State(hidden, hidden, (staying,))

    def advance(self, rows: Rows, state: State) -> State:
        (staying,) = state.carried
        rows.decide(staying, state.hidden)
        return state

    def default_policy(self, *, training: bool) -> Policy:
        assert self.config.exit_threshold is not None  # filled in by complete
        return self.full_depth if training else ExitThreshold(self.config.exit_threshold)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.exit.weight, std=std)
        nn.init.zeros_(self.exit.bias)

    def objective(self, values: Objective) -> LossFunction:
        if values.exit_stage == 2:
            return ExitImprovementLoss()
        beta = values.exit_entropy_weight
        return ExpectedExitLoss(self.config.exit_entropy_weight if beta is None else beta)

    # --- facts --------------------------------------------------------------------------------------------------

    halts = True
    signal = "exit"
    has_exit_loss = True
    gate_meaning = "exit probability"
    gates_decide = False  # a policy looks at the probability of having stayed until now, the product of all exits

    @classmethod
    def gates_asked(cls, iterations: int) -> int:
        """The exit gate speaks after the last loop too, though nothing is left to decide."""
        return iterations

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        return iterations

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """Exits before the last loop only where a threshold is given."""
        if config.exit_threshold is None:
            config.exit_threshold = 1.0

    @classmethod
    def own_parameters(cls, config: Recurrence) -> int:
        return config.hidden_size + 1
