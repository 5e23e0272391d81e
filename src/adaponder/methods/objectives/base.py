"""What a training loss is given and what it returns; cross-entropy is the plainest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from adaponder.execution.base import Execution
from adaponder.fields import check_fields, setting
from adaponder.halting import bottom_k_mean


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
    """The numbers that a schedule sets, from which each method makes its loss (``Method.objective``).

    The defaults add nothing to the method's own loss.
    """

    ponder_weight: float = setting(0.0, "the paper's lambda (eq. 12)", "[0, 1_000_000]")
    ponder_fraction: float = setting(0.0, "k_s, the share of gates that bottom-K averages (eq. 13)", "[0, 1]")
    exit_stage: Literal[1, 2] = setting(
        1,
        "ouro: 1 trains with expected loss and entropy, 2 trains exits on the improvement of each loop (freeze the "
        "backbone for it: the exit gate's gradient does not stop there)",
    )
    exit_entropy_weight: float | None = setting(
        None, "ouro: beta of stage I; None takes the config's", "[0, 1_000_000]"
    )
    bottom_k: Callable[[Tensor, float], Tensor] = setting(
        bottom_k_mean, "averages the pool of gates; several processes rank their gates together"
    )
    mean_count: Callable[[Tensor], Tensor] = setting(
        own_count,
        "the divisor of a term that is a mean over things of which batches have different numbers; several "
        "processes give their mean count",
    )
    share: float | None = setting(
        None,
        "factor on every term that is not a mean over targets (ponder, router). None: this batch's targets over "
        "num_items_in_batch, right where a caller sums batches; a caller that averages them equally gives 1",
        "[0, 1_000_000]",
    )

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
