"""Mixture-of-Recursions with expert choice: before each further recursion, a router selects tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from adaponder.errors import ConfigError
from adaponder.execution.base import Execution, Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import Logit, gate_probability
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import CrossEntropy, Losses, LossFunction, Objective, Scorer, Trajectory, with_term
from adaponder.ops.precision import wide_dtype, widened
from adaponder.policies import Policy, Ranked, RouterThreshold, Shares


class MixtureOfRecursions(Method):
    """``x[selected] += alpha sigmoid(router) stack(x[selected])``; other tokens keep ``x`` and cannot be attended to.

    The first recursion computes every token, without weighting, so it needs no router and K = 1 is vanilla (law 4).
    Training selects the tokens of a sequence with the largest logits, so the selection depends on later tokens.
    Evaluation and decoding select the tokens with positive logits; :class:`RouterLoss` trains routers so that both
    select the same tokens.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        # Each router maps the residual stream before the final norm to the logit of computing the token again.
        self.routers = nn.ModuleList(Logit(config.hidden_size, bias=False) for _ in range(config.gates()))

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

    def top_share(self, progress: float = 1.0) -> Policy:
        """Returns the non-causal training policy: keeps all tokens at progress 0, ``config.capacities`` at 1."""
        ramp = 0.5 * (1.0 - math.cos(math.pi * min(1.0, max(0.0, progress))))
        capacities = self.config.capacities or []
        return Ranked(Shares(shares=tuple(1.0 - (1.0 - capacity) * ramp for capacity in capacities[1:])))

    def reset_parameters(self, std: float) -> None:
        for weight in self.routers.parameters():
            nn.init.normal_(weight, std=std)

    def objective(self, values: Objective) -> LossFunction:
        return RouterLoss(weight=self.config.router_loss_weight, share=values.share)

    halts = True
    signal = "router"
    gate_meaning = "router's sigmoid"
    after_halting = "halted: out of sight"

    @classmethod
    def reuse_rule(cls, config: Recurrence) -> str:
        return "absent"

    def training_policy(self, progress: float) -> Policy:
        return self.top_share(progress)

    @classmethod
    def requested_depth(cls, config: Recurrence, closed_share: float) -> float:
        return float(sum(config.capacities or ()))

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """Sets unset ``capacities``, and raises on invalid ones.

        For K = 4, the default is the paper's capacities (mean depth 3.8); for any other K, every capacity is 1.
        """
        iterations, capacities = config.iterations, config.capacities
        if capacities is None:
            capacities = [1.0, 0.97, 0.93, 0.9] if iterations == 4 else [1.0] * iterations
        values = [float(value) for value in capacities]
        if len(values) != iterations:
            raise ConfigError(f"capacities has {len(values)} entries for iterations={iterations}: one per iteration")
        if values[0] != 1.0:
            raise ConfigError(f"capacities[0]={values[0]} must be 1: the first recursion reads every token")
        if any(not 0.0 < value <= 1.0 for value in values) or values != sorted(values, reverse=True):
            raise ConfigError(f"capacities={values} must be above 0, at most 1, and must not increase")
        config.capacities = values


@dataclass
class RouterLoss:
    """Cross-entropy plus ``weight`` times :func:`selection_loss`, summed over routers.

    The term makes a router's logit positive for the tokens that training selects and negative for others.
    """

    needs_states: ClassVar[bool] = False

    weight: float
    share: float | None = None

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)
        if not execution.gate_logits:
            return losses
        depth = execution.depth
        # Router i selects the tokens of iteration i + 1 among those of iteration i.
        terms = [selection_loss(logit, depth > i, depth > i + 1) for i, logit in enumerate(execution.gate_logits)]
        return with_term(losses, "router", torch.stack(terms).sum(), score, weight=self.weight, share=self.share)


def selection_loss(logit: Tensor, eligible: Tensor, selected: Tensor) -> Tensor:
    """Returns the binary cross-entropy of logits against the mask ``selected``, averaged over eligible tokens."""
    logit = widened(logit)
    bce = nn.functional.binary_cross_entropy_with_logits(logit, selected.to(logit.dtype), reduction="none")
    return (bce * eligible).sum() / eligible.sum().clamp_min(1)
