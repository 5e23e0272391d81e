"""Mixture-of-Recursions, expert choice: routers choose, recursion by recursion, which tokens are computed again."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from adaponder.errors import ConfigError
from adaponder.execution.base import Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import gate_probability
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import LossFunction, Objective
from adaponder.methods.objectives.router import RouterLoss
from adaponder.ops.precision import wide_dtype
from adaponder.policies import Policy, Ranked, RouterThreshold, Shares


class Router(nn.Linear):
    """How much a token wants to be computed again, from the un-normed stream; no bias."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1, bias=False)

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.weight, std=std)

    def forward(self, stream: Tensor) -> Tensor:
        return super().forward(stream).squeeze(-1)


class MixtureOfRecursions(Method):
    """``x[chosen] += alpha sigmoid(router) stack(x[chosen])``; the others pass through and vanish from sight.

    The first recursion computes every token, plainly, so it needs no router and K = 1 is vanilla (law 4). In training
    the top share of each sequence is chosen, which looks at the future; evaluation and decoding choose by the sign of
    the router's logit, which the auxiliary loss trains to agree.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        self.routers = nn.ModuleList(Router(config.hidden_size) for _ in range(config.gates()))

    def start(self, rows: Rows, embedded: Tensor) -> State:
        gate = embedded.new_zeros(embedded.shape[:-1], dtype=wide_dtype(embedded.dtype))
        return State(self.scaled(embedded), carried=(gate,))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        x, (gate,) = state.input, state.carried

        def recursed() -> Tensor:
            update = (self.config.router_alpha * gate).to(x.dtype)[..., None] * output.stream
            return torch.where(rows.active[..., None], x + update, x)

        x = rows.after_first(output.stream, recursed)
        return State(x, rows.backbone.final_norm(x), (gate,))

    def advance(self, rows: Rows, state: State) -> State:
        gate = gate_probability(rows.gate(self.routers, state.input))
        rows.decide(gate, state.hidden)
        return State(state.input, state.hidden, (gate,))

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

    def objective(self, values: Objective) -> LossFunction:
        return RouterLoss(weight=self.config.router_loss_weight, share=values.share)

    # --- facts --------------------------------------------------------------------------------------------------

    halts = True
    signal = "router"
    gate_meaning = "router's sigmoid"
    after_halting = "halted: out of sight"

    @classmethod
    def reuse_rule(cls, config: Recurrence) -> str:
        return "absent"

    @classmethod
    def own_parameters(cls, config: Recurrence) -> int:
        return config.gates() * config.hidden_size

    def training_policy(self, progress: float) -> Policy:
        return self.top_share(progress)

    @classmethod
    def requested_depth(cls, config: Recurrence, pressed: float) -> float:
        return float(sum(config.capacities or ()))

    @classmethod
    def complete(cls, config: Recurrence) -> None:
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
