"""Methods that may be stopped at any depth: tokens halt at random in training, and gates learn the gain ahead.

:class:`Anytime` is PonderLM's recurrence, :class:`Relay` Ouro's, :class:`Reread` PonderNet's; losses, random halts and
gates are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from adaponder.errors import ConfigError
from adaponder.execution.base import Execution, Pass, Rows
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
    losses_by_depth,
    own_count,
    with_term,
)
from adaponder.policies import GateOrChance, LearnedGate, Policy, RandomRates, as_int64


class Anytime(AdaPonder):
    """``E^{i+1} = E^i + m^{i+1} e^i``: AdaPonder's gates, which decide only which tokens continue and weigh nothing.

    At full depth this is PonderLM. Training halts tokens at random (``halt_prior``), independently of the gates, and
    takes the loss after every iteration (``loss_prior``), so that the backbone learns with halted tokens at any depth.
    Gates learn beside it, from detached states, whether some later iteration lowers a token's loss by more than
    ``lookahead_delta``; neither loss gives the other's parameters a gradient. With ``gate_share`` the gates themselves
    halt the tokens of some sequences, as they will at inference.
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
        """Halts rows by gates that read detached states; returns the gates' probabilities."""
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

    # --- facts --------------------------------------------------------------------------------------------------

    has_ponder_term = False
    gates_apart = True
    gate_meaning = "foreseen: a later iteration helps"

    def training_policy(self, progress: float) -> Policy:
        """Returns random halts that become as frequent as ``halt_prior`` over the warm-up, from almost none."""
        return RandomRates(min(1e6, self.config.halt_prior / max(progress, 1e-6))) if progress < 1 else self.halting

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        return iterations

    @classmethod
    def requested_depth(cls, config: Recurrence, pressed: float) -> None:
        """Returns ``None``: the budget is set after training."""
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
            raise ConfigError(f"loss_prior={list(prior)} adds up to {sum(prior):g}; its shares must add up to 1")
        config.loss_prior = [float(share) for share in prior]


class Relay(Anytime):
    """``E^{i+1} = h^i``: the next iteration reads the final-normed state itself, as in Ouro."""

    mixes_vocabulary = False

    def advance(self, rows: Rows, state: State) -> State:
        self.decide(rows, state.hidden)
        return State(state.hidden, state.hidden)


class Reread(Anytime):
    """``E^{i+1} = E^0 + c h^i``: what PonderNet's next step reads, ``c`` being ``state_scale``."""

    mixes_vocabulary = False

    def start(self, rows: Rows, embedded: Tensor) -> State:
        x = self.scaled(embedded)
        return State(x, carried=(x,))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        return State(state.input, rows.freeze(output.hidden, state.hidden), state.carried)

    def advance(self, rows: Rows, state: State) -> State:
        hidden, (x,) = state.hidden, state.carried
        self.decide(rows, hidden)
        return State(torch.add(x, hidden.to(x.dtype), alpha=self.config.state_scale), hidden, (x,))


# --- losses -----------------------------------------------------------------------------------------------------


@dataclass
class EveryDepthLoss:
    """``sum_i prior[i] / r_i * loss_i`` over the iterations ``i`` that each token took part in, the mean over targets.

    ``r_i`` is the expected share of tokens that reach iteration ``i`` where the policy halts at random, else 1, so this
    estimates ``sum_i prior[i] * E[loss_i]``, and any partition into micro-steps has the same sum. In a sequence whose
    tokens the gates halted, only the loss at each token's own depth counts, as at inference.
    """

    needs_states: ClassVar[bool] = True

    prior: tuple[float, ...]

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        return self.from_losses(losses_by_depth(trajectory, score), score, execution)

    def from_losses(self, losses: Tensor, score: Scorer, execution: Execution) -> Losses:
        """Computes it from the losses of each token after each iteration, ``[iterations, batch, time]``."""
        terms = {"cross_entropy": score.mean(losses[-1])}  # of each token's last state, at its own depth
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
    """Returns ``[batch, 1]``, in which sequences the gates halted tokens; ``None`` where the policy has no such."""
    policy = execution.control.policy
    if not isinstance(policy, GateOrChance):
        return None
    seed, depth = execution.control.seed, execution.depth
    if not isinstance(seed, torch.Tensor):
        seed = torch.full((len(depth),), as_int64(seed), device=depth.device)
    return policy.by_gate(seed.to(depth.device)).unsqueeze(1)


def _share_reaching(policy: Policy, iteration: int) -> float:
    """Returns the share of tokens that random halts let reach ``iteration``; 1 for other policies."""
    by_chance = policy.by_chance if isinstance(policy, GateOrChance) else policy
    return by_chance.reaching(iteration) if isinstance(by_chance, RandomRates) else 1.0


def _mean_where(values: Tensor, mask: Tensor, score: Scorer) -> Tensor:
    """Returns the mean over the targets of tokens in ``mask``; 0 where there are none."""
    count = score.mean(mask.to(values.dtype))
    return score.mean(values * mask) / count.clamp_min(torch.finfo(values.dtype).tiny)


@dataclass
class LookaheadLoss:
    """The loss of every depth plus each gate's binary cross-entropy against its label, the mean over gates.

    The label of gate ``i`` says whether a later iteration lowers the token's loss by more than ``delta``. Only tokens
    read to the end have labels: among those cut short only positive labels would be known. Each sequence counts
    equally, since one that reads deeply has more of them. Sequences in which the gates halted tokens give no labels:
    their tokens at full depth are not like the others. No gradient goes into the labels.

    Attributes:
        depths: the loss of the backbone.
        delta: nats.
        by: the weight of a label: ``tokens``, all equal, or ``nats``, the distance of its gain from ``delta``, so that
            a gate is above one half where the expected gain is above ``delta``.
        share, mean_count: see :class:`adaponder.methods.objectives.Objective`.
        without_target: whether tokens without a target have the label 0: no iteration can lower their loss.
    """

    needs_states: ClassVar[bool] = True

    depths: EveryDepthLoss
    delta: float
    by: Literal["tokens", "nats"] = "tokens"
    share: float | None = None
    without_target: bool = False
    mean_count: Callable[[Tensor], Tensor] = own_count

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
    """Returns each token's weighted binary cross-entropy, the mean over gates (the first axis)."""
    return nn.functional.binary_cross_entropy_with_logits(logit, label, weights, reduction="none").mean(0)


def gains_ahead(losses: Tensor) -> Tensor:
    """Equals ``losses[i] - min(losses[i + 1:])`` for each ``i`` but the last, along the first axis."""
    best_from = losses.flip(0).cummin(0).values.flip(0)
    return losses[:-1] - best_from[1:]


def mean_over_sequences(values: Tensor, mask: Tensor, mean_count: Callable[[Tensor], Tensor] = own_count) -> Tensor:
    """Averages ``values`` in ``mask`` (``[batch, time]``) within each sequence, then over sequences that have any.

    Returns 0 if none has. ``mean_count`` makes it the mean over several processes.
    """
    count = mask.sum(1)
    means = (values * mask).sum(1) / count.clamp_min(1)
    sequences = mean_count((count > 0).sum())
    return means.sum() / (sequences + (sequences == 0))
