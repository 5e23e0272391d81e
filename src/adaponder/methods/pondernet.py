"""PonderNet: a pass reads embedding plus last state; the loss keeps exit probabilities near a geometric prior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution, Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import Gate, gate_probability
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import Losses, LossFunction, Objective, Scorer, Trajectory, losses_by_depth
from adaponder.methods.ouro import exit_log_probabilities
from adaponder.ops.precision import wide_dtype
from adaponder.policies import Policy


class PonderNet(Method):
    """``h_{n+1} = Transformer(E^0 + c h_n)``, ``h_0 = 0``, each final-normed (Banino 2021).

    ``c`` is ``state_scale``, 1 in the paper. One gate serves all iterations: ``lambda_n = sigmoid(w h_n + b)`` is the
    probability of an exit after iteration ``n`` if the token has not exited before, so
    ``p_n = lambda_n prod_{j<n} (1 - lambda_j)``; the last iteration gets the remainder. Training runs every iteration
    and takes the expected loss under ``p``. At inference a token exits at the median of ``p`` (``exit_threshold`` 0.5);
    :class:`adaponder.policies.SampledExit` samples the exit, as the paper does.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        units = min(1, config.gates())  # none if K = 1
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
        return self.full_depth if training else self.exit_policy()

    def objective(self, values: Objective) -> LossFunction:
        return GeometricExitLoss(prior=self.config.exit_prior, weight=self.config.exit_prior_weight)

    halts = True
    signal = "exit"
    browser_update = "reread"
    exit_threshold = 0.5  # the median of the exit distribution
    gate_meaning = "exit probability"
    gates_decide = False  # a policy compares the probability of no exit so far, a product over steps

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        return iterations

    @classmethod
    def requested_depth(cls, config: Recurrence, closed_share: float) -> float:
        """Returns the mean depth under the geometric prior; there is no ponder loss that closes gates."""
        return mean_exit(config.exit_prior, config.iterations)

    @classmethod
    def described(cls, config: Recurrence) -> dict[str, Any]:
        return {
            "exits when probabilities reach": config.exit_threshold,
            "exit prior": config.exit_prior,
            "gate bias at start": config.gate_bias,
        }


@dataclass
class GeometricExitLoss:
    """The mean over targets of ``sum_n p_n loss_n + weight * KL(p || geometric(prior))``.

    ``p_n`` is a token's probability of an exit after iteration ``n``. Under the geometric prior, a token exits after
    each iteration with probability ``prior``, and always after the last. The term ``expected_depth`` is the mean of
    ``sum_n n p_n``; it is reported because every token has depth K in training.
    """

    needs_states: ClassVar[bool] = True

    prior: float
    weight: float

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = losses_by_depth(trajectory, score)
        logit = torch.zeros_like(losses[:1])  # a placeholder: every token exits after the last iteration
        if trajectory.gates is not None:
            logit = torch.cat([trajectory.gates.movedim(-1, 0).to(losses.dtype), logit])
        log_p = exit_log_probabilities(logit)
        p, number = log_p.exp(), torch.arange(1, len(losses) + 1, device=losses.device)
        expected = score.mean((p * losses).sum(0))
        log_prior = geometric_log_probabilities(self.prior, len(losses)).to(losses)
        divergence = score.mean((p * (log_p - log_prior[:, None, None])).sum(0))
        terms = {"cross_entropy": score.mean(losses[-1]), "expected": expected, "prior_divergence": divergence}
        terms["expected_depth"] = score.mean((p * number[:, None, None]).sum(0)).detach()
        return Losses(expected + self.weight * divergence, terms)


def geometric_log_probabilities(prior: float, iterations: int) -> Tensor:
    """Equals ``log(prior (1 - prior)^{n-1})`` for ``n = 1 … K - 1`` and ``log((1 - prior)^{K-1})`` for ``n = K``."""
    logit = math.log(prior) - math.log1p(-prior)
    return exit_log_probabilities(torch.full((iterations,), logit, dtype=torch.float64))


def mean_exit(prior: float, iterations: int) -> float:
    """Returns the mean depth under a geometric prior with exit probability ``prior``, capped at ``iterations``."""
    return (1.0 - (1.0 - prior) ** iterations) / prior
