"""ACT as in the Universal Transformer: states are fed in again until a token's halting probabilities add up to one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adaponder.execution.base import Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import Gate, gate_probability
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import LossFunction, Objective
from adaponder.methods.objectives.ponder_cost import PonderCostLoss
from adaponder.ops.precision import wide_dtype
from adaponder.policies import ExitThreshold, Policy


class AdaptiveComputationTime(Method):
    """``y = sum_n p_n s_n``: the head reads the mean of a token's states, weighted by where it may halt (Graves 2016).

    ``s_1 = Transformer(E^0)``, ``s_{n+1} = Transformer(s_n + t_n)``, each final-normed. One halting unit serves all
    iterations, ``h_n = sigmoid(w s_n + b)``. A token halts at ``N``, the first iteration at which
    ``h_1 + … + h_n >= 1 - epsilon`` (``exit_threshold``), or at K; ``p_n = h_n`` before, and the last iteration gets
    the remainder, ``p_N = R = 1 - (h_1 + … + h_{N-1})``. Tokens halt in training too.

    ``t_n`` is a learned vector for each iteration but the first, zero in the beginning: the Universal Transformer tells
    iterations apart by such a signal. It adds a sinusoid, of which K - 1 values would be used here.

    Whoever else halts a token (a fixed depth, another threshold), the remainder is its last iteration's; read on beyond
    ``N``, a token has nothing left to weigh its states with, and its output stays.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        units = min(1, config.gates())  # none where there is nothing to decide
        self.gates = nn.ModuleList(Gate(config.hidden_size, width=0, bias=-config.gate_bias) for _ in range(units))
        self.signals = nn.ParameterList(nn.Parameter(torch.zeros(config.hidden_size)) for _ in range(config.gates()))

    def start(self, rows: Rows, embedded: Tensor) -> State:
        wide = wide_dtype(embedded.dtype)
        mean = torch.zeros_like(embedded, dtype=wide)
        spent = embedded.new_zeros(embedded.shape[:-1], dtype=wide)
        return State(self.scaled(embedded), carried=(torch.zeros_like(embedded), mean, spent, torch.zeros_like(spent)))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        before, mean, spent, count = state.carried
        own = rows.freeze(output.hidden, None if state.hidden is None else before)  # s_n
        hidden = rows.compiled(read_out)(mean, spent, own)  # y, if the token halts here
        return State(state.input, hidden, (own, mean, spent, count))

    def advance(self, rows: Rows, state: State) -> State:
        own, mean, spent, count = state.carried
        halting = gate_probability(rows.gate(self.gates, own))  # h_n
        left = (1.0 - spent - halting).clamp_min(0.0)  # 1 - (h_1 + … + h_n)
        rows.decide(left, state.hidden)
        weight = torch.where(rows.active, torch.minimum(halting, 1.0 - spent), 0.0)  # p_n of tokens that go on
        mean = mean + weight[..., None] * own
        return State(own + self._signal(count, own), state.hidden, (own, mean, spent + weight, count + 1))

    def _signal(self, count: Tensor, own: Tensor) -> Tensor:
        """``t_n`` of each row, ``count`` iterations after its first."""
        table = torch.stack(list(self.signals)).to(own.dtype)
        return nn.functional.embedding(count.long().clamp(max=len(table) - 1), table)

    def default_policy(self, *, training: bool) -> Policy:
        assert self.config.exit_threshold is not None  # filled in by complete
        return ExitThreshold(self.config.exit_threshold)

    def reset_parameters(self, std: float) -> None:
        for gate in self.gates:
            gate.reset_parameters(std)
        for signal in self.signals:
            nn.init.zeros_(signal)

    def objective(self, values: Objective) -> LossFunction:
        return PonderCostLoss(self.config.halting_cost)

    # --- facts --------------------------------------------------------------------------------------------------

    halts = True
    signal = "exit"
    gate_meaning = "halting probability"
    gates_decide = False  # a policy looks at what is left of 1, after the sum of all halting probabilities

    def training_policy(self, progress: float) -> Policy:
        """Its own rule from the first step on: the mean over states is what teaches the halting unit."""
        return self.default_policy(training=True)

    @classmethod
    def own_parameters(cls, config: Recurrence) -> int:
        return min(1, config.gates()) * (config.hidden_size + 1) + config.gates() * config.hidden_size

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """Graves' threshold, ``1 - epsilon`` with ``epsilon = 0.01``, where none is given."""
        if config.exit_threshold is None:
            config.exit_threshold = 0.99

    @classmethod
    def described(cls, config: Recurrence) -> dict[str, Any]:
        return {
            "halts when probabilities reach": config.exit_threshold,
            "ponder cost": config.halting_cost,
            "gate bias at start": config.gate_bias,
        }


def read_out(mean: Tensor, spent: Tensor, own: Tensor) -> Tensor:
    """Equals ``sum_{n<N} p_n s_n + R s_N``: what halts here gives the remainder to its last state."""
    return (mean + (1.0 - spent)[..., None] * own).to(own.dtype)
