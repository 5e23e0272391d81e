"""ACT as in the Universal Transformer: each state is the next input until halting probabilities sum to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution, Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import Gate, gate_probability
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import CrossEntropy, Losses, LossFunction, Objective, Scorer, Trajectory
from adaponder.ops.precision import wide_dtype
from adaponder.policies import Policy


class AdaptiveComputationTime(Method):
    """``y = sum_n p_n s_n``: the head reads the mean of states, weighted by halting probability (Graves 2016).

    ``s_1 = Transformer(E^0)``, ``s_{n+1} = Transformer(s_n + t_n)``, each final-normed. One halting unit serves all
    iterations, ``h_n = sigmoid(w s_n + b)``. A token's depth is ``N``, the first ``n`` with
    ``h_1 + … + h_n >= 1 - epsilon`` (``exit_threshold``), or K if there is none. ``p_n = h_n`` for ``n < N``, and
    iteration ``N`` gets the remainder, ``p_N = R = 1 - (h_1 + … + h_{N-1})``. Tokens halt in training too.

    ``t_n`` is the step embedding: a learned vector for each iteration but the first, initially 0 (the Universal
    Transformer has sinusoids). If another policy halts a token later, the states after ``N`` have weight 0.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        units = min(1, config.gates())  # none if K = 1
        self.gates = nn.ModuleList(Gate(config.hidden_size, width=0, bias=-config.gate_bias) for _ in range(units))
        self.signals = nn.ParameterList(nn.Parameter(torch.zeros(config.hidden_size)) for _ in range(config.gates()))

    def start(self, rows: Rows, embedded: Tensor) -> State:
        wide = wide_dtype(embedded.dtype)
        mean = torch.zeros_like(embedded, dtype=wide)
        spent = embedded.new_zeros(embedded.shape[:-1], dtype=wide)
        return State(self.scaled(embedded), carried=(torch.zeros_like(embedded), mean, spent, torch.zeros_like(spent)))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        before, mean, spent, count = state.carried
        latest = rows.freeze(output.hidden, None if state.hidden is None else before)  # s_n
        hidden = rows.compiled(read_out)(mean, spent, latest)  # y, if the token halts here
        return State(state.input, hidden, (latest, mean, spent, count))

    def advance(self, rows: Rows, state: State) -> State:
        latest, mean, spent, count = state.carried
        halting = gate_probability(rows.gate(self.gates, latest))  # h_n
        left = (1.0 - spent - halting).clamp_min(0.0)  # 1 - (h_1 + … + h_n)
        rows.decide(left, state.hidden)
        weight = torch.where(rows.active, torch.minimum(halting, 1.0 - spent), 0.0)  # p_n of tokens that continue
        mean = mean + weight[..., None] * latest
        return State(latest + self._signal(count, latest), state.hidden, (latest, mean, spent + weight, count + 1))

    def _signal(self, count: Tensor, latest: Tensor) -> Tensor:
        """Returns each row's step embedding ``t_n``; ``count`` is the index of the iteration just finished, from 0."""
        table = torch.stack(list(self.signals)).to(latest.dtype)
        return nn.functional.embedding(count.long().clamp(max=len(table) - 1), table)

    def default_policy(self, *, training: bool) -> Policy:
        return self.exit_policy()

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        for signal in self.signals:
            nn.init.zeros_(signal)

    def objective(self, values: Objective) -> LossFunction:
        return PonderCostLoss(self.config.halting_cost)

    halts = True
    signal = "exit"
    exit_threshold = 0.99  # Graves' 1 - epsilon
    gate_meaning = "halting probability"
    gates_decide = False  # a policy compares 1 minus the sum of the halting probabilities so far

    def training_policy(self, progress: float) -> Policy:
        """Returns the default policy at any ``progress``, so tokens halt from the first step.

        No warm-up is needed: gradients reach the halting unit through the weighted mean of states that the head reads.
        """
        return self.default_policy(training=True)

    @classmethod
    def described(cls, config: Recurrence) -> dict[str, Any]:
        return {
            "halts when probabilities reach": config.exit_threshold,
            "ponder cost": config.halting_cost,
            "gate bias at start": config.gate_bias,
        }


def read_out(mean: Tensor, spent: Tensor, latest: Tensor) -> Tensor:
    """Returns the output of tokens that halt now: ``mean + R s_N``, where ``s_N`` is ``latest`` and ``R = 1 - spent``.

    ``mean`` is ``sum_{n<N} p_n s_n`` and ``spent`` is ``sum_{n<N} p_n``.
    """
    return (mean + (1.0 - spent)[..., None] * latest).to(latest.dtype)


@dataclass
class PonderCostLoss:
    """Cross-entropy plus ``weight`` times the mean over targets of ``N + R``.

    ``N`` is a token's depth and ``R = 1 - (h_1 + … + h_{N-1})`` the remainder; only ``R`` has gradients.
    """

    needs_states: ClassVar[bool] = False

    weight: float

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)
        if trajectory.gates is None:
            return losses
        left = remainder(trajectory.gates, execution.depth)
        cost = score.mean(execution.depth + left)
        terms = losses.terms | {"ponder_cost": cost, "remainder": score.mean(left).detach()}
        return Losses(losses.total + self.weight * cost, terms)


def remainder(logits: Tensor, depth: Tensor) -> Tensor:
    """Equals ``1 - (h_1 + … + h_{N-1})``, at least 0, from halting logits ``[…, K - 1]`` and depths ``N [...]``."""
    before = torch.arange(1, logits.shape[-1] + 1, device=logits.device) < depth[..., None]
    return 1.0 - (gate_probability(logits) * before).sum(-1).clamp_max(1.0)
