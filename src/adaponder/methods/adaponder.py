"""AdaPonderLM, Algorithms 1 and 2: adds expected next embeddings to a token's input until its gate closes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution, Pass, Rows
from adaponder.fields import Recurrence
from adaponder.halting import Gate, gate_probability, ponder_pool, pondered
from adaponder.methods.base import State
from adaponder.methods.objectives import CrossEntropy, Losses, LossFunction, Objective, Scorer, Trajectory, with_term
from adaponder.methods.ponder import Ponder
from adaponder.policies import LearnedGate, Policy


class AdaPonder(Ponder):
    """PonderLM's recurrence with K-1 gates; ``i`` counts iterations from 0, as in the paper.

    Algorithm 1: ``E^0 = start``; for ``i = 0 … K-1``: ``h^i = receive(Transformer(E^i))``, ``E^{i+1} = advance(h^i)``.
    :meth:`Method.forward` is the loop. E^K would not be used, so the last iteration has no gate.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        count = min(1, config.gates()) if config.shared_gate else config.gates()
        gate = partial(Gate, config.hidden_size, width=config.gate_width, bias=config.gate_bias)
        self.gates = nn.ModuleList(gate() for _ in range(count))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        # The pass computed eq. 1 and 10: halted tokens kept their keys and values. Here they keep h as well.
        return State(state.input, rows.freeze(output.hidden, state.hidden), state.carried)

    def advance(self, rows: Rows, state: State) -> State:
        embedding, hidden = state.input, state.hidden
        gate = rows.gate(self.gates, hidden)  # eq. 2: g^i = MLP_i(h^i)
        s = gate_probability(gate)  # eq. 3: s^i = sigmoid(g^i)
        rows.decide(s, hidden)  # eq. 4 and 5: m^{i+1} = m^i * (s^i >= tau)
        expected = self.expected_embedding(rows, hidden)  # eq. 6 to 8: e^i
        # eq. 9: E^{i+1} = E^i + (m^{i+1} s^i) e^i
        embedding = rows.compiled(pondered)(embedding, expected, rows.active, s)
        return State(embedding, hidden)

    def default_policy(self, *, training: bool) -> Policy:
        return LearnedGate(self.config.tau)

    def objective(self, values: Objective) -> LossFunction:
        return PonderLoss(
            weight=values.ponder_weight,
            fraction=values.ponder_fraction,
            on=self.config.ponder_on,
            pool=self.config.ponder_pool,
            bottom_k=values.bottom_k,
            share=values.share,
        )

    halts = True
    has_ponder_term = True
    gate_meaning = "gate s"
    exported = True
    browser_update = "gated"

    @classmethod
    def reuse_rule(cls, config: Recurrence) -> str:
        return config.reuse

    @classmethod
    def gate_flops(cls, config: Recurrence) -> int:
        """Returns the FLOPs of ``W2 gelu(W1 h)``, or of one linear layer if ``gate_width`` is 0."""
        d, inner = config.hidden_size, config.gate_width * config.hidden_size
        return 2 * (d * inner + inner) if inner else 2 * d

    @classmethod
    def requested_depth(cls, config: Recurrence, closed_share: float) -> float:
        """Returns ``K - closed_share * (K - 1)``: each closed gate saves one iteration."""
        return config.iterations - closed_share * config.gates()

    @classmethod
    def described(cls, config: Recurrence) -> dict[str, Any]:
        return {"tau": config.tau, "gate width": config.gate_width, "gate bias at start": config.gate_bias}


@dataclass
class PonderLoss:
    """Cross-entropy plus ``weight`` times the mean of the smallest ``fraction`` of all gates (eq. 12 and 13).

    With ``pool="each"`` that mean is taken per iteration, then averaged. ``weight`` and ``fraction`` are the paper's
    lambda and ``k_s``. See :func:`adaponder.halting.ponder_pool` for ``on`` and ``pool``, :class:`Objective` for
    ``bottom_k`` and ``share``.
    """

    needs_states: ClassVar[bool] = False

    weight: float
    fraction: float
    on: str
    pool: str
    bottom_k: Callable[[Tensor, float], Tensor]
    share: float | None = None

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)  # eq. 11
        if trajectory.gates is None or self.weight == 0.0:
            return losses
        # None if there is no padding: then the pool's size is known without synchronising with the device.
        real = None if execution.tokens.plain else execution.tokens.real
        pool = ponder_pool(trajectory.gates, real, execution.depth, on=self.on, pool=self.pool)
        if self.pool == "each":
            ponder = torch.stack([self.bottom_k(gate, self.fraction) for gate in pool.unbind(-1)]).mean()
        else:
            ponder = self.bottom_k(pool, self.fraction)  # eq. 13
        return with_term(losses, "ponder", ponder, score, weight=self.weight, share=self.share)  # eq. 12
