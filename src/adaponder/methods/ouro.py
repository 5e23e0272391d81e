"""Ouro (LoopLM): the final-normed state is the next loop's input, and an exit gate weights the loss of each loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution, Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import Logit, gate_probability
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import Losses, LossFunction, Objective, Scorer, Trajectory, losses_by_depth
from adaponder.ops.precision import wide_dtype
from adaponder.policies import Policy


class Ouro(Method):
    """Ouro with one exit gate for all loops. Training runs every loop; tokens exit early only in evaluation."""

    def __init__(self, config: Recurrence):
        super().__init__(config)
        self.exit = Logit(config.hidden_size)  # logit of lambda, the exit probability

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
        return self.full_depth if training else self.exit_policy()

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.exit.weight, std=std)
        nn.init.zeros_(self.exit.bias)

    def objective(self, values: Objective) -> LossFunction:
        if values.exit_stage == 2:
            return ExitImprovementLoss()
        beta = values.exit_entropy_weight
        return ExpectedExitLoss(self.config.exit_entropy_weight if beta is None else beta)

    halts = True
    signal = "exit"
    browser_update = "state"
    exit_threshold = 1.0  # no exit before the last loop
    has_exit_loss = True
    gate_meaning = "exit probability"
    gates_decide = False  # a policy compares the probability of no exit so far, a product over loops

    @classmethod
    def gates_asked(cls, iterations: int) -> int:
        """Returns ``iterations``: the exit gate is evaluated after the last loop too, where it decides nothing."""
        return iterations

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        return iterations


@dataclass
class ExpectedExitLoss:
    """Loss of stage I: the expectation under each token's exit distribution, minus ``entropy_weight`` * its entropy."""

    needs_states: ClassVar[bool] = True

    entropy_weight: float

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses, logit = _per_loop(trajectory, score)
        log_p = exit_log_probabilities(logit)
        expected = score.mean((log_p.exp() * losses).sum(0))
        entropy = score.mean(-(log_p.exp() * log_p).sum(0))
        terms = {"cross_entropy": score.mean(losses[-1]), "expected": expected, "entropy": entropy}
        return Losses(expected - self.entropy_weight * entropy, terms)


class ExitImprovementLoss:
    """Loss of stage II: after each loop, the exit gate learns to continue if that loop lowered the token's loss."""

    needs_states: ClassVar[bool] = True

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses, logit = _per_loop(trajectory, score)
        cross_entropy = score.mean(losses[-1])
        exits = score.mean(improvement_loss(logit, losses))
        return Losses(exits, {"cross_entropy": cross_entropy, "exits": exits})


def _per_loop(trajectory: Trajectory, score: Scorer) -> tuple[Tensor, Tensor]:
    """Returns per-token losses and exit logits after each loop, both ``[loops, batch, time]``."""
    assert trajectory.gates is not None  # the exit gate is evaluated after every loop
    losses = losses_by_depth(trajectory, score)
    return losses, trajectory.gates.movedim(-1, 0).to(losses.dtype)


def exit_log_probabilities(logit: Tensor) -> Tensor:
    """Equals ``log(lambda_t * prod_{j<t} (1 - lambda_j))`` along the first axis; the last loop gets the remainder."""
    log_exit = nn.functional.logsigmoid(logit)
    log_stay = nn.functional.logsigmoid(-logit)
    before = torch.cat([torch.zeros_like(log_stay[:1]), log_stay.cumsum(0)[:-1]])
    return torch.cat([(log_exit + before)[:-1], before[-1:]])


def improvement_loss(logit: Tensor, losses: Tensor) -> Tensor:
    """Returns each token's binary cross-entropy of ``1 - lambda_t`` against its target, averaged over loops ``t``.

    ``lambda_t = sigmoid(logit)`` is the exit probability. The target is ``sigmoid(50 (I_t - 0.005))``, where
    ``I_t = max(0, L_{t-1} - L_t)`` is the loop's gain. The first loop has no gain, so K loops have K - 1 terms.
    """
    if len(losses) == 1:
        return torch.zeros_like(losses[0])
    improvement = (losses[:-1] - losses[1:]).clamp_min(0).detach()
    target = torch.sigmoid(50.0 * (improvement - 0.005))
    return nn.functional.binary_cross_entropy_with_logits(-logit[1:], target, reduction="none").mean(0)
