"""What every method of the family is: a way of reading one backbone again, written once for every way to run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from adaponder.config import AdaPonderConfig
from adaponder.execution.runs import Run
from adaponder.execution.tokens import Tokens
from adaponder.halting import bottom_k_mean
from adaponder.methods.facts import Facts
from adaponder.policies import FixedDepth, Policy
from adaponder.settings import check_fields, limited


class Iteration(NamedTuple):
    """What an ``on_iteration`` hook is shown after each pass: grids ``[batch, time, …]``.

    ``gate`` is how much the model wants to read on (see :class:`adaponder.policies.PolicyInput`), ``None`` where
    nothing is left to decide; ``active`` are the tokens that this pass read.
    """

    index: int
    hidden: Tensor
    gate: Tensor | None
    active: Tensor


def _nobody_watches(iteration: Iteration) -> None:
    """The default hook."""


@dataclass(frozen=True)
class Ask:
    """How one forward is to be done.

    Attributes:
        iterations: the most passes of this forward, at most ``config.iterations``.
        policy: who halts tokens (asked only by methods that can).
        seed: handed to the policy.
        every_gate: evaluate later gates of halted tokens too (the ponder loss needs them; decoding does not).
        show: is shown each iteration as it happens.
    """

    iterations: int
    policy: Policy
    seed: int = 0
    every_gate: bool = True
    show: Callable[[Iteration], None] = _nobody_watches


@dataclass(frozen=True)
class Objective:
    """The training loss around cross-entropy; the defaults add nothing to it.

    Attributes:
        ponder_weight: the paper's lambda (eq. 12).
        ponder_fraction: ``k_s``, the share of gates that bottom-K averages (eq. 13).
        exit_stage: ouro, 1 trains with expected loss and entropy, 2 trains exits on the improvement of each loop
            (freeze the backbone for it: the exit gate's gradient does not stop there).
        exit_entropy_weight: ouro, beta of stage I; ``None`` takes the config's.
        bottom_k: how the pool of gates is averaged; several processes rank their gates together.
        share: what every term beside the losses of targets weighs. ``None``: this batch's part of
            ``num_items_in_batch``, which is all that one forward can know; who averages forwards equally says 1.
    """

    ponder_weight: float = limited(0, 1_000_000, default=0.0)
    ponder_fraction: float = limited(0, 1, default=0.0)
    exit_stage: Literal[1, 2] = 1
    exit_entropy_weight: float | None = limited(0, 1_000_000)
    bottom_k: Callable[[Tensor, float], Tensor] = bottom_k_mean
    share: float | None = limited(0, 1_000_000)

    def __post_init__(self) -> None:
        check_fields(self, "objective.")


class Routing(NamedTuple):
    """One choice of mor: the router's logits, who could be chosen, who was."""

    logit: Tensor
    eligible: Tensor
    chosen: Tensor


@dataclass
class Trajectory:
    """What a recurrence leaves behind.

    Attributes:
        hidden: final-normed hidden states ``[batch, time, d]``, each token's last.
        gates: what each gate said, as logits ``[batch, time, gates]``; ``None`` if there was none.
        routing: mor's choices.
        states: hidden states after each iteration, where they were collected.
    """

    hidden: Tensor
    gates: Tensor | None = None
    routing: list[Routing] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class Losses(NamedTuple):
    total: Tensor
    terms: dict[str, Tensor]


class Scorer(NamedTuple):
    """How a method's loss sees the labels.

    ``nll`` gives per-token losses ``[batch, time]`` of hidden states, ``mean`` their mean over what counts, and
    ``mean_nll`` equals ``mean(nll(hidden))`` for less; ``share`` is this batch's part of that mean where a caller
    spreads it over several batches (see :func:`with_term`).
    """

    nll: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]
    mean_nll: Callable[[Tensor], Tensor]
    share: Tensor | float = 1.0


class Method(Facts, nn.Module, ABC):
    """One recurrence: its own parameters, and ``forward`` as in its paper.

    ``keep_logits`` trades memory for time where a method mixes the vocabulary: see
    :func:`adaponder.ops.vocab_expectation.torch.vocab_expectation`.
    """

    loss_needs_states: ClassVar[bool] = False

    def __init__(self, config: AdaPonderConfig):
        super().__init__()
        self.config = config
        self.keep_logits = False

    @abstractmethod
    def forward(self, run: Run, embedded: Tensor, ask: Ask) -> Trajectory: ...

    def reset_parameters(self, std: float) -> None:
        """Initialises what is the method's own."""

    def reuse(self) -> str:
        """What others see of a halted token (see :class:`adaponder.execution.runs.Run`)."""
        return self.reuse_rule(self.config)

    def needs_stream(self, iterations: int) -> bool:
        """Whether the recurrence looks at the residual stream before the final norm."""
        return False

    def arrange(self, tokens: Tokens, iterations: int) -> Tokens:
        """The tokens as the backbone reads them."""
        return tokens

    def default_policy(self, *, training: bool) -> Policy:
        return FixedDepth(self.config.iterations)

    def loss(self, seen: Trajectory, score: Scorer, run: Run, objective: Objective) -> Losses:
        """The training loss."""
        return plain_loss(seen, score)

    def scaled(self, embedded: Tensor) -> Tensor:
        """Embeddings as the recurrence takes them in: E^0."""
        return embedded * self.config.input_scale


def plain_loss(seen: Trajectory, score: Scorer) -> Losses:
    cross_entropy = score.mean_nll(seen.hidden)
    return Losses(cross_entropy, {"cross_entropy": cross_entropy})


def with_term(losses: Losses, name: str, term: Tensor, *, weight: float, score: Scorer, objective: Objective) -> Losses:
    """``losses`` and ``share * weight * term``, multiplied in the term's own precision."""
    factor = weight * (score.share if objective.share is None else objective.share)
    if isinstance(factor, Tensor):
        factor = factor.to(term.dtype)
    return Losses(losses.total + factor * term, losses.terms | {name: term})


def stack_gates(gates: list[Tensor]) -> Tensor | None:
    return torch.stack(gates, dim=-1) if gates else None
