"""PonderLM that may be stopped at any depth: tokens halt by chance in training, and gates only watch and foresee."""

from __future__ import annotations

import torch

from adaponder.errors import ConfigError
from adaponder.execution.base import Rows
from adaponder.fields import Recurrence
from adaponder.halting import gate_probability, pondered
from adaponder.methods.adaponder import AdaPonder
from adaponder.methods.base import State
from adaponder.methods.objectives import LossFunction, Objective
from adaponder.methods.objectives.depths import EveryDepthLoss
from adaponder.methods.objectives.lookahead import LookaheadLoss
from adaponder.policies import GateOrChance, LearnedGate, Policy, RandomRates


class Anytime(AdaPonder):
    """``E^{i+1} = E^i + m^{i+1} e^i``: AdaPonder's gates, which here decide who goes on and weigh nothing.

    At full depth this is PonderLM. Training halts tokens at random (``halt_prior``), whatever the gates say, and takes
    the loss after every iteration (``loss_prior``), so that states and the reused rows of halted tokens are what the
    backbone has learned with at any depth. Gates learn beside it, from detached states, whether some later iteration
    lowers a token's loss by more than ``lookahead_delta``: the backbone's loss gives them no gradient, and theirs gives
    the backbone none.

    With ``gate_share`` the gates themselves halt the tokens of some sequences, as they will at inference. Tokens
    without a target then learn to halt at once: what the others need of them, training shows.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        self.halting: Policy = RandomRates(config.halt_prior)
        if config.gate_share:
            self.halting = GateOrChance(config.gate_share, config.tau, config.halt_prior)

    def advance(self, rows: Rows, state: State) -> State:
        embedding, hidden = state.input, state.hidden
        s = gate_probability(rows.gate(self.gates, hidden.detach()))
        rows.decide(s, hidden)
        expected = self.expected_embedding(rows, hidden)
        embedding = rows.compiled(pondered)(embedding, expected, rows.active, torch.ones_like(s))
        return State(embedding, hidden)

    def default_policy(self, *, training: bool) -> Policy:
        return self.halting if training else LearnedGate(self.config.tau)

    def objective(self, values: Objective) -> LossFunction:
        prior = self.config.loss_prior or [1.0 / self.config.iterations] * self.config.iterations
        return LookaheadLoss(
            EveryDepthLoss(tuple(prior)),
            delta=self.config.lookahead_delta,
            by=self.config.lookahead_by,
            share=values.share,
            without_target=self.config.gate_share > 0,
            mean_count=values.mean_count,
        )

    # --- facts --------------------------------------------------------------------------------------------------

    has_ponder_term = False
    gates_apart = True
    gate_meaning = "foreseen: a later iteration helps"

    def training_policy(self, progress: float) -> Policy:
        """Halts become as frequent as ``halt_prior`` says: at the beginning almost every token is read to the end."""
        return RandomRates(min(1e6, self.config.halt_prior / max(progress, 1e-6))) if progress < 1 else self.halting

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        return iterations

    @classmethod
    def requested_depth(cls, config: Recurrence, pressed: float) -> None:
        """Training names no depth: the dial does, afterwards."""
        return

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """Checks that the prior has a share for each depth."""
        prior = config.loss_prior
        if prior is None:
            return
        if len(prior) != config.iterations:
            raise ConfigError(f"loss_prior has {len(prior)} entries for iterations={config.iterations}: one per depth")
        if abs(sum(prior) - 1.0) > 1e-6:
            raise ConfigError(f"loss_prior={list(prior)}: shares add up to {sum(prior):g}, and must to 1")
        config.loss_prior = [float(share) for share in prior]
