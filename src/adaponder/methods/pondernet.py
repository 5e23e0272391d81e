"""PonderNet: a step sees the token and its own last state, and a chance to exit after each is held near a prior."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adaponder.execution.base import Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import Gate, gate_probability
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import LossFunction, Objective
from adaponder.methods.objectives.geometric import GeometricExitLoss, mean_exit
from adaponder.ops.precision import wide_dtype
from adaponder.policies import ExitThreshold, Policy


class PonderNet(Method):
    """``h_{n+1} = Transformer(E^0 + c h_n)``, ``h_0 = 0``, each final-normed: a step of ``x`` and ``h`` (Banino 2021).

    The paper's ``c`` is 1; ``state_scale`` sets it.

    One unit serves all iterations: ``lambda_n = sigmoid(w h_n + b)`` is the chance to exit after iteration ``n`` for
    who has come so far, so ``p_n = lambda_n prod_{j<n} (1 - lambda_j)``, the rest on the last iteration. Training runs
    every iteration and takes the expected loss under ``p``. The paper samples exits at inference; by default a token
    here exits at the median of ``p`` (``exit_threshold`` 0.5 of the cumulative probability): a function of the token's
    own row, the same in every run. :class:`adaponder.policies.SampledExit` samples.

    There is no signal of the iteration: the paper has none.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        units = min(1, config.gates())  # none where there is nothing to decide
        self.gates = nn.ModuleList(Gate(config.hidden_size, width=0, bias=-config.gate_bias) for _ in range(units))

    def start(self, rows: Rows, embedded: Tensor) -> State:
        x = self.scaled(embedded)
        staying = torch.ones(x.shape[:-1], dtype=wide_dtype(x.dtype), device=x.device)
        return State(x, carried=(x, staying))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        return State(state.input, rows.freeze(output.hidden, state.hidden), state.carried)

    def advance(self, rows: Rows, state: State) -> State:
        hidden, (x, staying) = state.hidden, state.carried
        staying = staying * gate_probability(-rows.gate(self.gates, hidden))  # prod (1 - lambda_j)
        rows.decide(staying, hidden)
        return State(torch.add(x, hidden.to(x.dtype), alpha=self.config.state_scale), hidden, (x, staying))

    def default_policy(self, *, training: bool) -> Policy:
        assert self.config.exit_threshold is not None  # filled in by complete
        return self.full_depth if training else ExitThreshold(self.config.exit_threshold)

    def reset_parameters(self, std: float) -> None:
        for gate in self.gates:
            gate.reset_parameters(std)

    def objective(self, values: Objective) -> LossFunction:
        return GeometricExitLoss(prior=self.config.exit_prior, weight=self.config.exit_prior_weight)

    # --- facts --------------------------------------------------------------------------------------------------

    halts = True
    signal = "exit"
    gate_meaning = "exit probability"
    gates_decide = False  # a policy looks at the probability of having stayed until now, the product over all exits

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        return iterations

    @classmethod
    def own_parameters(cls, config: Recurrence) -> int:
        return min(1, config.gates()) * (config.hidden_size + 1)

    @classmethod
    def requested_depth(cls, config: Recurrence, pressed: float) -> float:
        """The mean of the prior."""
        return mean_exit(config.exit_prior, config.iterations)

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """The median of the exit distribution, where no threshold is given."""
        if config.exit_threshold is None:
            config.exit_threshold = 0.5

    @classmethod
    def described(cls, config: Recurrence) -> dict[str, Any]:
        return {
            "exits when probabilities reach": config.exit_threshold,
            "exit prior": config.exit_prior,
            "gate bias at start": config.gate_bias,
        }
