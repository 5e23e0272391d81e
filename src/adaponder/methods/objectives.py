"""Training losses: what an objective receives, what it returns, and how targets are scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from adaponder.errors import InputError
from adaponder.execution.base import Execution
from adaponder.execution.tokens import check_ids
from adaponder.fields import check_fields, setting
from adaponder.halting import bottom_k_mean
from adaponder.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_sum
from adaponder.ops.precision import widened


@dataclass
class Trajectory:
    """What a recurrence leaves behind.

    Attributes:
        hidden: final-normed hidden states ``[batch, time, d]``, each token's last.
        gates: the logits of all gates ``[batch, time, gates]``; ``None`` if there was none.
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
    """How an objective scores hidden states against the targets.

    Attributes:
        nll: per-token losses ``[batch, time]`` of hidden states.
        mean: mean of per-token values over the tokens that count.
        mean_nll: equals ``mean(nll(hidden))`` at less cost.
        counted: which tokens count, ``[batch, time]``.
        share: this batch's part of that mean where a caller spreads it over several batches (see :func:`with_term`).
    """

    nll: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]
    mean_nll: Callable[[Tensor], Tensor]
    counted: Tensor
    share: Tensor | float = 1.0


class LossFunction(Protocol):
    """A training loss. ``needs_states`` requests the hidden states after each pass (``trajectory.states``)."""

    needs_states: ClassVar[bool]

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses: ...


class CrossEntropy:
    """The loss of the last hidden state (eq. 11), and nothing else."""

    needs_states: ClassVar[bool] = False

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        cross_entropy = score.mean_nll(trajectory.hidden)
        return Losses(cross_entropy, {"cross_entropy": cross_entropy})


def own_count(count: Tensor) -> Tensor:
    """Returns the count itself: that of a single process."""
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
    """Returns each token's loss after each iteration, ``[iterations, batch, time]``; constant once it has halted."""
    return torch.stack([score.nll(state) for state in trajectory.states])


def with_term(losses: Losses, name: str, term: Tensor, score: Scorer, *, weight: float, share: float | None) -> Losses:
    """Equals ``losses`` plus ``share * weight * term``, multiplied in the term's own precision.

    ``share`` is the weight of a term beside the losses of targets; ``None`` is this batch's part of all targets.
    """
    factor = weight * (score.share if share is None else share)
    if isinstance(factor, Tensor):
        factor = factor.to(term.dtype)
    return Losses(losses.total + factor * term, losses.terms | {name: term})


# --- targets --------------------------------------------------------------------------------------------------------


def as_targets(
    ids: Tensor, labels: Tensor | None, targets: Tensor | None, vocabulary: int, *, document: Tensor | None
) -> Tensor | None:
    """Returns what each token should predict: ``targets``, or labels shifted one to the left within each document."""
    for name, values in (("labels", labels), ("targets", targets)):
        if values is not None and values.shape != ids.shape:
            raise InputError(f"{name} has shape {tuple(values.shape)}, input_ids {tuple(ids.shape)}: they must agree")
        if values is not None:
            check_ids(name, values, vocabulary)
    if labels is None:
        return None if targets is None else targets.to(ids.device, torch.long)
    if targets is not None:
        raise InputError("labels and targets: give only one of them")
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100).to(ids.device, torch.long)
    if document is None:
        return shifted
    # A document's last token cannot predict the first one of the next.
    last = nn.functional.pad(document[:, 1:] != document[:, :-1], (0, 1))
    return shifted.masked_fill(last, -100)


def scorer(
    trajectory: Trajectory,
    logits: Tensor | None,
    targets: Tensor,
    real: Tensor,
    head: tuple[Tensor, Tensor | None],
    items: Tensor | int | None,
) -> Scorer:
    """Builds the scorer of a method's loss; ``items`` is the count to average over, if it is more than this batch.

    ``logits`` are those of the last hidden state where they exist anyway; others are never materialised whole.
    """
    # Predictions of padding do not count, so the first real token of a left-padded row is no target.
    counted = (targets != -100) & real
    share: Tensor | float = 1.0
    if items is None:
        items = counted.sum().clamp_min(1)
    else:
        count = counted.sum()
        # In float64, so that shares add up; MPS has none.
        share = (count if count.device.type == "mps" else count.double()) / items

    def per_item(total: Tensor) -> Tensor:
        # A count is rounded once, to the precision of what it divides.
        return total / (items.to(total.dtype) if isinstance(items, Tensor) else items)

    def nll(hidden: Tensor) -> Tensor:
        if logits is None or hidden is not trajectory.hidden:
            return linear_cross_entropy(hidden, head[0], targets, bias=head[1])
        flat = nn.functional.cross_entropy(widened(logits).flatten(0, 1), targets.flatten(), reduction="none")
        return flat.view(targets.shape)

    def mean(values: Tensor) -> Tensor:
        return per_item((values * counted).sum())

    def mean_nll(hidden: Tensor) -> Tensor:
        if logits is None or hidden is not trajectory.hidden:
            return per_item(linear_cross_entropy_sum(hidden, head[0], targets, counted, bias=head[1]))
        return mean(nll(hidden))

    return Scorer(nll, mean, mean_nll, counted, share)
