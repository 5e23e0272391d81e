"""Ouro (LoopLM): the final-normed state is fed in again, and an exit gate spreads each token's loss over the loops."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaponder.config import AdaPonderConfig
from adaponder.errors import InputError
from adaponder.execution.runs import Run
from adaponder.methods.base import Ask, Iteration, Losses, Method, Objective, Scorer, Trajectory
from adaponder.policies import ExitThreshold, FixedDepth, Policy


class Ouro(Method):
    """One exit gate for all loops; training always runs every loop, exits happen in evaluation."""

    loss_needs_states = True

    def __init__(self, config: AdaPonderConfig):
        super().__init__(config)
        self.exit = nn.Linear(config.hidden_size, 1)
        # Made here: a compiler (torch 2.11) does not find the fields of one that is made while it traces.
        self.every_loop = FixedDepth(config.iterations)

    def forward(self, run: Run, embedded: Tensor, ask: Ask) -> Trajectory:
        hidden = run.read(self.scaled(embedded)).hidden
        logits = [self._exit(run, hidden, ask)]
        staying = torch.ones(embedded.shape[:2], device=embedded.device)
        for i in range(ask.iterations - 1):
            staying = staying * torch.sigmoid(-logits[-1].float())  # prod (1 - lambda_j)
            ask.show(Iteration(i, hidden, staying, run.active))
            run.decide(ask.policy, staying, hidden, seed=ask.seed)
            hidden = run.settle(run.read(hidden).hidden, hidden)
            logits.append(self._exit(run, hidden, ask))
        ask.show(Iteration(ask.iterations - 1, hidden, None, run.active))
        return Trajectory(hidden, torch.stack(logits, dim=-1))

    def _exit(self, run: Run, hidden: Tensor, ask: Ask) -> Tensor:
        """The logit of lambda."""
        return run.map(lambda rows: self.exit(rows).squeeze(-1), hidden, everyone=ask.every_gate)

    def default_policy(self, *, training: bool) -> Policy:
        return self.every_loop if training else ExitThreshold(self.config.exit_threshold)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.exit.weight, std=std)
        nn.init.zeros_(self.exit.bias)

    def loss(self, seen: Trajectory, score: Scorer, run: Run, objective: Objective) -> Losses:
        assert seen.gates is not None  # forward always leaves them
        losses = torch.stack([score.nll(state) for state in seen.states])
        logit = seen.gates.movedim(-1, 0).to(losses.dtype)
        terms = {"cross_entropy": score.mean(losses[-1])}
        if objective.exit_stage == 2:
            exits = score.mean(improvement_loss(logit, losses))
            return Losses(exits, terms | {"exits": exits})
        if objective.exit_stage != 1:
            raise InputError(f"exit_stage={objective.exit_stage}: ouro trains in stage 1 or 2")
        beta = objective.exit_entropy_weight
        beta = self.config.exit_entropy_weight if beta is None else beta
        log_p = exit_log_probabilities(logit)
        expected = score.mean((log_p.exp() * losses).sum(0))
        entropy = score.mean(-(log_p.exp() * log_p).sum(0))
        return Losses(expected - beta * entropy, terms | {"expected": expected, "entropy": entropy})

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
    def own_parameters(cls, config: AdaPonderConfig) -> int:
        return config.hidden_size + 1


def exit_log_probabilities(logit: Tensor) -> Tensor:
    """Equals ``log(lambda_t * prod_{j<t} (1 - lambda_j))`` along the first axis, the remainder on the last loop."""
    log_exit = nn.functional.logsigmoid(logit)
    log_stay = nn.functional.logsigmoid(-logit)
    before = torch.cat([torch.zeros_like(log_stay[:1]), log_stay.cumsum(0)[:-1]])
    return torch.cat([(log_exit + before)[:-1], before[-1:]])


def improvement_loss(logit: Tensor, losses: Tensor) -> Tensor:
    """Stage II, per token: go on where the loop helped. Target ``sigmoid(50 (I_t - 0.005))`` for ``1 - lambda_t``."""
    if len(losses) == 1:
        return torch.zeros_like(losses[0])
    improvement = (losses[:-1] - losses[1:]).clamp_min(0).detach()
    target = torch.sigmoid(50.0 * (improvement - 0.005))
    return nn.functional.binary_cross_entropy_with_logits(-logit[1:], target, reduction="none").mean(0)
