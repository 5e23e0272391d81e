"""Defines what training losses receive and return, computes the cross-entropy, and holds scheduled loss settings."""

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
    """The result of a recurrence over a batch; hidden states are final-normed."""

    hidden: Tensor  # the state after each token's last iteration, [batch, time, d]
    gates: Tensor | None = None  # logits of all gates, [batch, time, gates]; None if no gate was evaluated
    states: list[Tensor] = field(default_factory=list)  # after each pass; empty unless requested


class Losses(NamedTuple):
    """The loss to differentiate, and its unweighted terms by name."""

    total: Tensor
    terms: dict[str, Tensor]


class Scorer:
    """Computes the cross-entropy of hidden states; means are sums divided by ``items``.

    ``items=None`` is the number of counted tokens. ``logits`` are the logits of ``trajectory.hidden``, if already
    computed; logits of other hidden states are computed in chunks.

    Attributes:
        counted: ``bool[batch, time]``: real tokens with a target.
        share: number of counted tokens divided by ``items``; 1 if ``items`` is ``None``.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        logits: Tensor | None,
        targets: Tensor,
        real: Tensor,
        head: tuple[Tensor, Tensor | None],
        items: Tensor | int | None,
    ):
        # Predictions at padding do not count, so the first real token of a left-padded sequence is never a target.
        self.counted = (targets != -100) & real
        self.share: Tensor | float = 1.0
        count = self.counted.sum()
        if items is None:
            items = count.clamp_min(1)
        else:
            # In float64, so that shares add up; MPS has no float64.
            self.share = (count if count.device.type == "mps" else count.double()) / items
        self._trajectory, self._logits, self._targets, self._items = trajectory, logits, targets, items
        self._weight, self._bias = head

    def nll(self, hidden: Tensor) -> Tensor:
        """Returns the cross-entropy of each token, ``[batch, time]``, for ``hidden [batch, time, d]``."""
        targets = self._targets
        if self._logits is None or hidden is not self._trajectory.hidden:
            return linear_cross_entropy(hidden, self._weight, targets, bias=self._bias)
        logits = widened(self._logits).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)

    def mean(self, values: Tensor) -> Tensor:
        """Returns the sum of ``values [batch, time]`` over counted tokens, divided by ``items``."""
        return self._per_item((values * self.counted).sum())

    def mean_nll(self, hidden: Tensor) -> Tensor:
        """Equals ``mean(nll(hidden))``, but is cheaper."""
        if self._logits is not None and hidden is self._trajectory.hidden:
            return self.mean(self.nll(hidden))
        weight, targets = self._weight, self._targets
        return self._per_item(linear_cross_entropy_sum(hidden, weight, targets, self.counted, bias=self._bias))

    def _per_item(self, total: Tensor) -> Tensor:
        # The count is rounded only once, to the precision of the total.
        return total / (self._items.to(total.dtype) if isinstance(self._items, Tensor) else self._items)


class LossFunction(Protocol):
    """A training loss; ``needs_states``: whether it reads ``trajectory.states``, the hidden states after each pass."""

    needs_states: ClassVar[bool]

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses: ...


class CrossEntropy:
    """The cross-entropy of the last hidden state (eq. 11)."""

    needs_states: ClassVar[bool] = False

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        cross_entropy = score.mean_nll(trajectory.hidden)
        return Losses(cross_entropy, {"cross_entropy": cross_entropy})


def local_count(count: Tensor) -> Tensor:
    """Returns ``count`` unchanged: the default of ``Objective.mean_count``, for runs with a single process."""
    return count


@dataclass(frozen=True)
class Objective:
    """The scheduled settings from which each method builds its loss (``Method.objective``).

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
        local_count,
        "averages a term's divisor, such as the number of sequences with labels, over the processes of a run",
    )
    share: float | None = setting(
        None,
        "factor on every term that is not a mean over targets (ponder, router). None: this batch's share of the "
        "num_items_in_batch targets, for callers that sum batches; callers that average batches equally pass 1",
        "[0, 1_000_000]",
    )

    def __post_init__(self) -> None:
        check_fields(self, "objective.")


def losses_by_depth(trajectory: Trajectory, score: Scorer) -> Tensor:
    """Returns each token's loss after each iteration, ``[iterations, batch, time]``; constant after the token halts."""
    return torch.stack([score.nll(state) for state in trajectory.states])


def with_term(losses: Losses, name: str, term: Tensor, score: Scorer, *, weight: float, share: float | None) -> Losses:
    """Returns ``losses`` with ``share * weight * term`` added to the total, and ``term`` to the terms.

    Use it for a ``term`` that is not a mean over targets. ``share=None`` takes ``score.share``, the batch's share of
    all targets, so that summing the losses of several batches averages ``term`` over the batches.
    """
    factor = weight * (score.share if share is None else share)
    if isinstance(factor, Tensor):
        factor = factor.to(term.dtype)
    return Losses(losses.total + factor * term, losses.terms | {name: term})


def as_targets(
    ids: Tensor, labels: Tensor | None, targets: Tensor | None, vocabulary: int, *, document: Tensor | None
) -> Tensor | None:
    """Returns each token's target: ``targets``, or ``labels`` shifted left by one with -100 at document ends.

    Returns ``None`` if neither is given; raises if both are.
    """
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
    # A document's last token must not predict the next document's first token.
    last = nn.functional.pad(document[:, 1:] != document[:, :-1], (0, 1))
    return shifted.masked_fill(last, -100)
