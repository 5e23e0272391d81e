"""Mixture-of-Recursions, expert choice: routers choose, recursion by recursion, who is read again."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from adaponder.config import AdaPonderConfig
from adaponder.errors import ConfigError
from adaponder.execution.runs import Run
from adaponder.halting import gate_probability
from adaponder.methods.base import (
    Ask,
    Iteration,
    Losses,
    Method,
    Objective,
    Routing,
    Scorer,
    Trajectory,
    plain_loss,
    stack_gates,
    with_term,
)
from adaponder.policies import Policy, Ranked, RouterThreshold, Shares


class Router(nn.Linear):
    """How much a token wants to be read again, from the un-normed stream; no bias."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1, bias=False)

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.weight, std=std)

    def forward(self, stream: Tensor) -> Tensor:
        return super().forward(stream).squeeze(-1)


class MixtureOfRecursions(Method):
    """``x[chosen] += alpha sigmoid(router) stack(x[chosen])``; the others pass through and vanish from sight.

    The first recursion reads every token, plainly, so it needs no router and K = 1 is vanilla (law 4). In training
    the top share of each sequence is chosen, which looks at the future; evaluation and decoding choose by the sign of
    the router's logit, which the auxiliary loss trains to agree.
    """

    def __init__(self, config: AdaPonderConfig):
        super().__init__(config)
        self.routers = nn.ModuleList(Router(config.hidden_size) for _ in range(config.gates()))

    def forward(self, run: Run, embedded: Tensor, ask: Ask) -> Trajectory:
        x = run.read(self.scaled(embedded)).stream
        routing = []
        for i in range(ask.iterations - 1):
            logit = run.map(self.routers[i], x, everyone=ask.every_gate)
            gate = gate_probability(logit)
            hidden, eligible = run.backbone.final_norm(x), run.active
            ask.show(Iteration(i, hidden, gate, eligible))
            run.decide(ask.policy, gate, hidden, seed=ask.seed)
            routing.append(Routing(logit, eligible, run.active))
            update = (self.config.router_alpha * gate).to(x.dtype)[..., None] * run.read(x).stream
            x = torch.where(run.active[..., None], x + update, x)
        hidden = run.backbone.final_norm(x)
        ask.show(Iteration(ask.iterations - 1, hidden, None, run.active))
        return Trajectory(hidden, stack_gates([choice.logit for choice in routing]), routing)

    def needs_stream(self, iterations: int) -> bool:
        return True

    def default_policy(self, *, training: bool) -> Policy:
        return self.top_share() if training else RouterThreshold()

    def top_share(self, warm: float = 1.0) -> Policy:
        """The training-time choice, non-causal. ``warm`` goes from 0 (keep all) to 1 (the config's capacities)."""
        ramp = 0.5 * (1.0 - math.cos(math.pi * min(1.0, max(0.0, warm))))
        capacities = self.config.capacities or []
        return Ranked(Shares(shares=tuple(1.0 - (1.0 - capacity) * ramp for capacity in capacities[1:])))

    def reset_parameters(self, std: float) -> None:
        for router in self.routers:
            router.reset_parameters(std)

    def loss(self, seen: Trajectory, score: Scorer, run: Run, objective: Objective) -> Losses:
        losses = plain_loss(seen, score)
        if not seen.routing:
            return losses
        router = torch.stack([_agreement(*routing) for routing in seen.routing]).sum()
        weight = self.config.router_loss_weight
        return with_term(losses, "router", router, weight=weight, score=score, objective=objective)

    # --- facts --------------------------------------------------------------------------------------------------

    halts = True
    signal = "router"
    gate_meaning = "router's sigmoid"
    after_halting = "halted: out of sight"

    @classmethod
    def reuse_rule(cls, config: AdaPonderConfig) -> str:
        return "absent"

    @classmethod
    def own_parameters(cls, config: AdaPonderConfig) -> int:
        return config.gates() * config.hidden_size

    def training_policy(self, progress: float) -> Policy:
        return self.top_share(progress)

    @classmethod
    def requested_depth(cls, config: AdaPonderConfig, pressed: float) -> float:
        return float(sum(config.capacities or ()))

    @classmethod
    def complete(cls, config: AdaPonderConfig) -> None:
        """Capacities left open are the paper's keeping ratios at K = 4 (sum 3.80, its 3.8x), else all tokens'."""
        iterations, capacities = config.iterations, config.capacities
        if capacities is None:
            capacities = [1.0, 0.97, 0.93, 0.9] if iterations == 4 else [1.0] * iterations
        values = [float(value) for value in capacities]
        if len(values) != iterations:
            raise ConfigError(f"capacities has {len(values)} entries for iterations={iterations}: one each is needed")
        if values[0] != 1.0:
            raise ConfigError(f"capacities[0]={values[0]}: the first recursion reads every token, so it is 1")
        if any(not 0.0 < value <= 1.0 for value in values) or values != sorted(values, reverse=True):
            raise ConfigError(f"capacities={values}: shares in (0, 1], never growing")
        config.capacities = values


def _agreement(logit: Tensor, eligible: Tensor, chosen: Tensor) -> Tensor:
    """Binary cross-entropy of each logit against having been chosen, over those who could be."""
    logit = logit.to(torch.promote_types(logit.dtype, torch.float32))
    bce = nn.functional.binary_cross_entropy_with_logits(logit, chosen.to(logit.dtype), reduction="none")
    return (bce * eligible).sum() / eligible.sum().clamp_min(1)
