"""Methods that may stop at any depth: training halts tokens at random, and gates predict the gain of later iterations.

:class:`Anytime` has the recurrence of PonderLM, :class:`Relay` that of Ouro, :class:`Reread` that of PonderNet; losses,
random halts and gates are the same in all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from adaponder.errors import ConfigError
from adaponder.execution.base import Execution, Rows
from adaponder.fields import Recurrence
from adaponder.halting import gate_probability, pondered
from adaponder.methods.adaponder import AdaPonder
from adaponder.methods.base import State
from adaponder.methods.objectives import (
    Losses,
    LossFunction,
    Objective,
    Scorer,
    Trajectory,
    local_count,
    losses_by_depth,
    with_term,
)
from adaponder.policies import GateOrChance, LearnedGate, Policy, RandomRates, as_int64


class Anytime(AdaPonder):
    """``E^{i+1} = E^i + m^{i+1} e^i``: AdaPonder's gates decide which tokens continue, but do not weight updates.

    At full depth this is PonderLM. Training halts tokens at random (``halt_prior``), independently of the gates, and
    takes the loss after every iteration (``loss_prior``), so the backbone learns to predict from a context of halted
    tokens. Gates learn whether a later iteration lowers a token's loss by more than ``lookahead_delta``. They read
    detached states: the gates' loss trains only the gates, the prediction loss only the backbone. In a share of the
    sequences (``gate_share``), the gates halt tokens instead, as at inference.
    """

    def __init__(self, config: Recurrence):
        super().__init__(config)
        self.halting: Policy = RandomRates(config.halt_prior)
        if config.gate_share:
            self.halting = GateOrChance(config.gate_share, config.tau, config.halt_prior)

    def advance(self, rows: Rows, state: State) -> State:
        embedding, hidden = state.input, state.hidden
        s = self.decide(rows, hidden)
        expected = self.expected_embedding(rows, hidden)
        embedding = rows.compiled(pondered)(embedding, expected, rows.active, torch.ones_like(s))
        return State(embedding, hidden)

    def decide(self, rows: Rows, hidden: Tensor) -> Tensor:
        """Evaluates the gates on detached states, lets the policy halt rows, and returns the gates' probabilities."""
        s = gate_probability(rows.gate(self.gates, hidden.detach()))
        rows.decide(s, hidden)
        return s

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

    has_ponder_term = False
    gates_apart = True
    gate_meaning = "foreseen: a later iteration helps"
    browser_update = "mixed"

    def training_policy(self, progress: float) -> Policy:
        """Returns a policy of random halts, more frequent as ``progress`` grows; from 1 on, ``self.halting``."""
        return RandomRates(min(1e6, self.config.halt_prior / max(progress, 1e-6))) if progress < 1 else self.halting

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        return iterations

    @classmethod
    def requested_depth(cls, config: Recurrence, closed_share: float) -> None:
        """Returns ``None``: the mean depth is chosen after training."""

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """Raises unless ``loss_prior``, if set, has one share per depth, adding up to 1."""
        prior = config.loss_prior
        if prior is None:
            return
        if len(prior) != config.iterations:
            raise ConfigError(f"loss_prior has {len(prior)} entries for iterations={config.iterations}: one per depth")
        if abs(sum(prior) - 1.0) > 1e-6:
            raise ConfigError(f"loss_prior={list(prior)} adds up to {sum(prior):g}; its shares must add up to 1")
        config.loss_prior = [float(share) for share in prior]


class Relay(Anytime):
    """``E^{i+1} = h^i``, as in Ouro: the final-normed state is the next iteration's input."""

    mixes_vocabulary = False
    browser_update = "state"

    def advance(self, rows: Rows, state: State) -> State:
        self.decide(rows, state.hidden)
        return State(state.hidden, state.hidden)


class Reread(Anytime):
    """``E^{i+1} = E^0 + c h^i`` with ``c = state_scale``, as in PonderNet: adds the state to the first input."""

    mixes_vocabulary = False
    browser_update = "reread"

    def start(self, rows: Rows, embedded: Tensor) -> State:
        x = self.scaled(embedded)
        return State(x, carried=(x,))

    def advance(self, rows: Rows, state: State) -> State:
        hidden, (x,) = state.hidden, state.carried
        self.decide(rows, hidden)
        return State(torch.add(x, hidden.to(x.dtype), alpha=self.config.state_scale), hidden, (x,))


@dataclass
class EveryDepthLoss:
    """The mean over targets of ``sum_i prior[i] / r_i * loss_i``, over iterations ``i`` in which the token is active.

    ``r_i`` is the expected share of tokens that reach iteration ``i`` under random halts (1 with other policies). So
    the loss estimates ``sum_i prior[i] * E[loss_i]``, however a batch is split into micro-batches. In sequences whose
    tokens are halted by gates, only each token's loss after its last iteration counts, as at inference.
    """

    prior: tuple[float, ...]

    def from_losses(self, losses: Tensor, score: Scorer, execution: Execution) -> Losses:
        """Computes the loss from ``losses [iterations, batch, time]``, each token's loss after each iteration."""
        terms = {"cross_entropy": score.mean(losses[-1])}  # each token's last state, at its own depth
        total = torch.zeros_like(terms["cross_entropy"])
        gated = gated_sequences(execution)
        for i, (loss, share) in enumerate(zip(losses, self.prior, strict=False)):
            reached = execution.depth > i
            weight = share / _share_reaching(execution.control.policy, i) * reached.to(loss.dtype)
            if gated is not None:
                weight = torch.where(gated, (execution.depth == i + 1).to(loss.dtype), weight)
            total = total + score.mean(loss * weight)
            terms[f"depth_{i + 1}"] = _mean_where(loss.detach(), reached, score)
        return Losses(total, terms | {"every_depth": total})


def gated_sequences(execution: Execution) -> Tensor | None:
    """Returns a mask ``[batch, 1]`` of sequences halted by gates; ``None`` if the policy is not a ``GateOrChance``."""
    policy = execution.control.policy
    if not isinstance(policy, GateOrChance):
        return None
    seed, depth = execution.control.seed, execution.depth
    if not isinstance(seed, torch.Tensor):
        seed = torch.full((len(depth),), as_int64(seed), device=depth.device)
    return policy.by_gate(seed.to(depth.device)).unsqueeze(1)


def _share_reaching(policy: Policy, iteration: int) -> float:
    """Returns the expected share of tokens that reach ``iteration`` under random halts; 1 for other policies."""
    by_chance = policy.by_chance if isinstance(policy, GateOrChance) else policy
    return by_chance.reaching(iteration) if isinstance(by_chance, RandomRates) else 1.0


def _mean_where(values: Tensor, mask: Tensor, score: Scorer) -> Tensor:
    """Returns the mean of ``values`` over tokens in ``mask`` with a target; 0 if there are none."""
    count = score.mean(mask.to(values.dtype))
    return score.mean(values * mask) / count.clamp_min(torch.finfo(values.dtype).tiny)


@dataclass
class LookaheadLoss:
    """The backbone's loss plus the binary cross-entropy of gates against labels, averaged over gates.

    The label of gate ``i`` is 1 if a later iteration lowers the token's loss by more than ``delta`` nats, else 0. Only
    tokens at full depth are labelled, because the gains of halted tokens are unknown, and only in sequences halted at
    random, because elsewhere the gates decide which tokens reach full depth. Sequences are weighted equally.

    Attributes:
        depths: the loss that trains the backbone.
        by: ``tokens`` weights all labels equally; ``nats`` weights a label by the distance of the gain from ``delta``,
            so that a gate learns to be above one half where the expected gain is above ``delta``.
        share, mean_count: see :class:`adaponder.methods.objectives.Objective`.
        without_target: whether tokens without a target are labelled 0, since no iteration can lower their loss.
    """

    needs_states: ClassVar[bool] = True

    depths: EveryDepthLoss
    delta: float
    by: Literal["tokens", "nats"] = "tokens"
    share: float | None = None
    without_target: bool = False
    mean_count: Callable[[Tensor], Tensor] = local_count

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        by_depth = losses_by_depth(trajectory, score)
        losses = self.depths.from_losses(by_depth, score, execution)
        if trajectory.gates is None:
            return losses
        gain = gains_ahead(by_depth.detach()) - self.delta
        label = (gain > 0).to(gain.dtype)
        finished, gated = execution.depth == execution.passes, gated_sequences(execution)
        if gated is not None:
            finished = finished & ~gated
        labelled = finished & score.counted
        logit = trajectory.gates.movedim(-1, 0).to(by_depth.dtype)
        losses.terms["helped"] = mean_over_sequences(label.mean(0), labelled, self.mean_count)
        weights = gain.abs() if self.by == "nats" else torch.ones_like(gain)
        term = mean_over_sequences(_gate_loss(logit, label, weights), labelled, self.mean_count)
        if self.without_target:
            zeros, ones = torch.zeros_like(label), torch.ones_like(label)
            unlabelled = finished & ~score.counted
            term = term + mean_over_sequences(_gate_loss(logit, zeros, ones), unlabelled, self.mean_count)
        return with_term(losses, "lookahead", term, score, weight=1.0, share=self.share)


def _gate_loss(logit: Tensor, label: Tensor, weights: Tensor) -> Tensor:
    """Returns each token's weighted binary cross-entropy, averaged over gates (the first axis)."""
    return nn.functional.binary_cross_entropy_with_logits(logit, label, weights, reduction="none").mean(0)


def gains_ahead(losses: Tensor) -> Tensor:
    """Equals ``losses[i] - min(losses[i + 1:])`` for each ``i`` but the last, along the first axis."""
    best_from = losses.flip(0).cummin(0).values.flip(0)
    return losses[:-1] - best_from[1:]


def mean_over_sequences(values: Tensor, mask: Tensor, mean_count: Callable[[Tensor], Tensor] = local_count) -> Tensor:
    """Averages ``values [batch, time]`` where ``mask [batch, time]`` is true, first per sequence, then over sequences.

    Sequences without true entries do not count. ``mean_count`` averages the number of sequences that count over all
    processes, so that every process divides by the same number.
    """
    count = mask.sum(1)
    means = (values * mask).sum(1) / count.clamp_min(1)
    sequences = mean_count((count > 0).sum())
    return means.sum() / (sequences + (sequences == 0))
