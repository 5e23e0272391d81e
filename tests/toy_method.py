"""A method of one's own in one file: it halts, owns parameters, adds a term to the loss, and is registered by one line.

Whoever adds a method to the family writes such a file in ``methods/``, its line in ``registry.py``, and recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from adaponder.config import AdaPonderConfig
from adaponder.execution.base import Execution, Pass, Rows
from adaponder.halting import gate_probability
from adaponder.methods import Method, Objective
from adaponder.methods.base import State
from adaponder.methods.objectives import CrossEntropy, Losses, LossFunction, Scorer, Trajectory, with_term
from adaponder.policies import LearnedGate, Policy

NAME = "echo"


class Ear(nn.Linear):
    """How much a token wants to hear its echo, as a logit."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).squeeze(-1)


class Echo(Method):
    """``E <- E + s * loudness * h``: a token's own hidden state, scaled by a learned vector, is added to its input."""

    def __init__(self, config: AdaPonderConfig):
        super().__init__(config)
        self.ear = Ear(config.hidden_size, 1)
        self.loudness = nn.Parameter(torch.empty(config.hidden_size))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        return State(state.input, rows.freeze(output.hidden, state.hidden))

    def advance(self, rows: Rows, state: State) -> State:
        s = gate_probability(rows.gate((self.ear,), state.hidden))
        rows.decide(s, state.hidden)
        echo = s.to(state.input.dtype)[..., None] * self.loudness * state.hidden
        return State(torch.where(rows.active[..., None], state.input + echo, state.input), state.hidden)

    def default_policy(self, *, training: bool) -> Policy:
        return LearnedGate(self.config.tau)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.ear.weight, std=10 * std)  # tokens differ from the beginning
        nn.init.constant_(self.ear.bias, self.config.gate_bias)
        nn.init.constant_(self.loudness, 0.1)

    def objective(self, values: Objective) -> LossFunction:
        return EchoLoss(share=values.share)

    halts = True
    gate_meaning = "loudness of the echo"
    after_halting = "halted: silent"

    @classmethod
    def own_parameters(cls, config: AdaPonderConfig) -> int:
        return (config.hidden_size + 1) + config.hidden_size

    @classmethod
    def described(cls, config: AdaPonderConfig) -> dict[str, float]:
        return {"silence below": config.tau}


@dataclass
class EchoLoss:
    """Cross-entropy plus a hundredth of the mean gate: whoever listens pays."""

    needs_states: ClassVar[bool] = False

    share: float | None = None

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)
        if trajectory.gates is None:
            return losses
        listening = gate_probability(trajectory.gates)[execution.tokens.real].mean()
        return with_term(losses, "listening", listening, score, weight=0.01, share=self.share)
