"""What counts as a prediction, and how its loss is averaged: padding and strangers excluded, parts adding up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaponder.errors import InputError
from adaponder.execution.tokens import check_ids
from adaponder.methods.objectives.base import Scorer, Trajectory
from adaponder.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_sum
from adaponder.ops.precision import widened


def as_targets(
    ids: Tensor, labels: Tensor | None, targets: Tensor | None, vocabulary: int, *, document: Tensor | None
) -> Tensor | None:
    """What each token should predict: the targets as they are, or labels moved one to the left within each document."""
    for name, values in (("labels", labels), ("targets", targets)):
        if values is not None and values.shape != ids.shape:
            raise InputError(f"{name} has shape {tuple(values.shape)}, input_ids {tuple(ids.shape)}: they must agree")
        if values is not None:
            check_ids(name, values, vocabulary)
    if labels is None:
        return None if targets is None else targets.to(ids.device, torch.long)
    if targets is not None:
        raise InputError("labels and targets: give one")
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100).to(ids.device, torch.long)
    return shifted if document is None else within_documents(shifted, document)


def within_documents(targets: Tensor, document: Tensor) -> Tensor:
    """Without what follows a document's last token: it belongs to a stranger, and nothing there could predict it."""
    strangers = nn.functional.pad(document[:, 1:] != document[:, :-1], (0, 1))
    return targets.masked_fill(strangers, -100)


def _finely(count: Tensor) -> Tensor:
    """The count in float64, so that shares add up; as it is on a device that has none (MPS)."""
    return count if count.device.type == "mps" else count.double()


def scorer(
    trajectory: Trajectory,
    logits: Tensor | None,
    targets: Tensor,
    real: Tensor,
    head: tuple[Tensor, Tensor | None],
    items: Tensor | int | None,
) -> Scorer:
    """How a method's loss sees the targets; ``items`` is the count to average over, if it is more than this batch.

    ``logits`` are those of the last hidden state where they exist anyway; any others are never held whole.
    """
    # What a padding token predicts does not count, so the first real token of a left-padded row is no target.
    counted = (targets != -100) & real
    share: Tensor | float = 1.0
    if items is None:
        items = counted.sum().clamp_min(1)
    else:
        share = _finely(counted.sum()) / items

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
