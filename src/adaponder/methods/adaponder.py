"""AdaPonderLM, Algorithms 1 and 2: ponder on the expected next embedding until the token's own gate says enough."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from adaponder.config import AdaPonderConfig
from adaponder.execution.runs import Run
from adaponder.halting import Gate, gate_probability, ponder_pool, pondered, read_gate
from adaponder.methods.base import (
    Ask,
    Iteration,
    Losses,
    Method,
    Objective,
    Scorer,
    Trajectory,
    plain_loss,
    stack_gates,
    with_term,
)
from adaponder.methods.ponder import expected_embedding
from adaponder.policies import LearnedGate, Policy


class AdaPonder(Method):
    """K-1 gates on a PonderLM recurrence; ``i`` counts iterations from 0 as the paper does."""

    def __init__(self, config: AdaPonderConfig):
        super().__init__(config)
        count = min(1, config.gates()) if config.shared_gate else config.gates()
        self.gates = nn.ModuleList(
            Gate(config.hidden_size, width=config.gate_width, bias=config.gate_bias) for _ in range(count)
        )

    def forward(self, run: Run, embedded: Tensor, ask: Ask) -> Trajectory:
        embedding = self.scaled(embedded)  # E^0
        hidden = run.read(embedding).hidden  # eq. 1: h^0
        gates = []
        for i in range(ask.iterations - 1):
            read = partial(run.compiled(read_gate), self.gate(i))
            gate = run.map(read, hidden, everyone=ask.every_gate)  # eq. 2: g^i = MLP_i(h^i)
            s = gate_probability(gate)  # eq. 3: s^i = sigmoid(g^i)
            ask.show(Iteration(i, hidden, s, run.active))
            run.decide(ask.policy, s, hidden, seed=ask.seed)  # eq. 4 and 5: m^{i+1} = m^i * (s^i >= tau)
            expected = run.map(lambda h: expected_embedding(run.backbone, h, self), hidden)  # eq. 6 to 8
            # eq. 9: E^{i+1} = E^i + (m^{i+1} s^i) e^i
            embedding = run.compiled(pondered)(embedding, expected, run.active, s)
            # eq. 1 again, with eq. 10 inside: halted tokens keep their keys, values and hidden state.
            hidden = run.settle(run.read(embedding).hidden, hidden)
            gates.append(gate)
        ask.show(Iteration(ask.iterations - 1, hidden, None, run.active))
        return Trajectory(hidden, stack_gates(gates))

    def gate(self, i: int) -> nn.Module:
        return self.gates[0 if self.config.shared_gate else i]

    def default_policy(self, *, training: bool) -> Policy:
        return LearnedGate(self.config.tau)

    def reset_parameters(self, std: float) -> None:
        for gate in self.gates:
            gate.reset_parameters(std)

    def loss(self, seen: Trajectory, score: Scorer, run: Run, objective: Objective) -> Losses:
        losses = plain_loss(seen, score)  # eq. 11
        if seen.gates is None or objective.ponder_weight == 0.0:
            return losses
        # Without padding every token counts, and the pool's size is known without asking the device.
        real = None if run.tokens.plain else run.tokens.real
        pool = ponder_pool(seen.gates, real, run.depth, on=self.config.ponder_on, pool=self.config.ponder_pool)
        ponder = objective.bottom_k(pool, objective.ponder_fraction)  # eq. 13
        weight = objective.ponder_weight
        return with_term(losses, "ponder", ponder, weight=weight, score=score, objective=objective)  # eq. 12

    # --- facts --------------------------------------------------------------------------------------------------

    halts = True
    has_ponder_term = True
    mixes_vocabulary = True
    gate_meaning = "gate s"

    @classmethod
    def reuse_rule(cls, config: AdaPonderConfig) -> str:
        return config.reuse

    @classmethod
    def own_parameters(cls, config: AdaPonderConfig) -> int:
        d, inner = config.hidden_size, config.gate_width * config.hidden_size
        gates = min(1, config.gates()) if config.shared_gate else config.gates()
        return gates * (inner * d + inner + inner + 1 if inner else d + 1)

    @classmethod
    def gate_flops(cls, config: AdaPonderConfig) -> int:
        """``W2 gelu(W1 h)``; of width 0, one row of weights."""
        d, inner = config.hidden_size, config.gate_width * config.hidden_size
        return 2 * (d * inner + inner) if inner else 2 * d

    @classmethod
    def requested_depth(cls, config: AdaPonderConfig, pressed: float) -> float:
        """A closed gate is one iteration less: ``K - k (K - 1)``."""
        return config.iterations - pressed * config.gates()

    @classmethod
    def described(cls, config: AdaPonderConfig) -> dict[str, Any]:
        return {"tau": config.tau, "gate width": config.gate_width, "gate bias at start": config.gate_bias}
