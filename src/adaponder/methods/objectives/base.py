"""What a training loss is given and what it returns; cross-entropy is the plainest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from adaponder.execution.base import Execution
from adaponder.halting import bottom_k_mean
from adaponder.settings import check_fields, limited


@dataclass
class Trajectory:
    """What a recurrence leaves behind.

    Attributes:
        hidden: final-normed hidden states ``[batch, time, d]``, each token's last.
        gates: what each gate said, as logits ``[batch, time, gates]``; ``None`` if there was none.
        states: hidden states after each pass, where they were collected.
    """

    hidden: Tensor
    gates: Tensor | None = None
    states: list[Tensor] = field(default_factory=list)


class Losses(NamedTuple):
    """The loss to differentiate, and its terms by name, before their weights."""

    total: Tensor
    terms: dict[str, Tensor]


class Scorer(NamedTuple):
    """How an objective sees the labels.

    ``nll`` gives per-token losses ``[batch, time]`` of hidden states, ``mean`` their mean over what counts, and
    ``mean_nll`` equals ``mean(nll(hidden))`` for less; ``counted`` says which tokens count, ``[batch, time]``;
    ``share`` is this batch's part of that mean where a caller spreads it over several batches (see :func:`with_term`).
    """

    nll: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]
    mean_nll: Callable[[Tensor], Tensor]
    counted: Tensor
    share: Tensor | float = 1.0


class LossFunction(Protocol):
    """A training loss. ``needs_states`` asks for the hidden states after each pass (``trajectory.states``)."""

    needs_states: ClassVar[bool]

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses: ...


class CrossEntropy:
    """The loss of the last hidden state (eq. 11), and nothing else."""

    needs_states: ClassVar[bool] = False

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        cross_entropy = score.mean_nll(trajectory.hidden)
        return Losses(cross_entropy, {"cross_entropy": cross_entropy})


def own_count(count: Tensor) -> Tensor:
    """The count itself: that of one process alone."""
    return count


@dataclass(frozen=True)
class Objective:
    """No loss itself: the numbers that a schedule turns, of which each method makes its loss (``Method.objective``).

    The defaults add nothing to what the method has of its own.

    Attributes:
        ponder_weight: the paper's lambda (eq. 12).
        ponder_fraction: ``k_s``, the share of gates that bottom-K averages (eq. 13).
        exit_stage: ouro, 1 trains with expected loss and entropy, 2 trains exits on the improvement of each loop
            (freeze the backbone for it: the exit gate's gradient does not stop there).
        exit_entropy_weight: ouro, beta of stage I; ``None`` takes the config's.
        bottom_k: how the pool of gates is averaged; several processes rank their gates together.
        mean_count: what of a count a term divides by, where it is a mean over things that not every batch has as many
            of; several processes give their mean count.
        share: factor on every term that is not a mean over targets (ponder, router). ``None``: this batch's targets
            over ``num_items_in_batch``, right where a caller sums batches; a caller that averages them equally gives 1.
    """

    ponder_weight: float = limited(0, 1_000_000, default=0.0)
    ponder_fraction: float = limited(0, 1, default=0.0)
    exit_stage: Literal[1, 2] = 1
    exit_entropy_weight: float | None = limited(0, 1_000_000)
    bottom_k: Callable[[Tensor, float], Tensor] = bottom_k_mean
    mean_count: Callable[[Tensor], Tensor] = own_count
    share: float | None = limited(0, 1_000_000)

    def __post_init__(self) -> None:
        check_fields(self, "objective.")


def losses_by_depth(trajectory: Trajectory, score: Scorer) -> Tensor:
    """Losses of each token after each iteration, ``[iterations, batch, time]``; a halted token's stays what it was."""
    return torch.stack([score.nll(state) for state in trajectory.states])


def with_term(losses: Losses, name: str, term: Tensor, score: Scorer, *, weight: float, share: float | None) -> Losses:
    """``losses`` plus ``share * weight * term``, multiplied in the term's own precision.

    ``share`` is what a term beside the losses of targets weighs; ``None`` is this batch's part of all targets.
    """
    factor = weight * (score.share if share is None else share)
    if isinstance(factor, Tensor):
        factor = factor.to(term.dtype)
    return Losses(losses.total + factor * term, losses.terms | {name: term})
