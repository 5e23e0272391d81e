"""Cuts a stream of tokens into windows that fit a context; each prediction is scored in exactly one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.evaluation.text import Text


class WindowBatch(NamedTuple):
    """Windows of one length; window ``w`` holds predictions ``first[w] …`` of the stream.

    ``fresh`` marks the predictions that no earlier window scored; ``documents`` is set where attention may not cross
    them.
    """

    first: np.ndarray
    input_ids: Tensor
    targets: Tensor
    fresh: np.ndarray
    documents: Tensor | None


@dataclass(frozen=True)
class Windows:
    """Disjoint windows of ``length`` predictions, or sliding ones that advance by ``stride`` and score the new ones.

    ``across_documents``: whether a token may attend to the documents before its own, as packed training lets it.
    ``every`` and ``offset`` keep one window in ``every`` and leave the others' predictions unscored: the halves of a
    text are ``every=2`` with ``offset`` 0 and 1.
    """

    length: int
    stride: int | None = None
    across_documents: bool = True
    every: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"--window {self.length}: at least one token")
        if self.stride is not None and not 1 <= self.stride <= self.length:
            raise InputError(f"--stride {self.stride}: from 1 to {self.length}, the window")
        if not 0 <= self.offset < self.every:
            raise InputError(f"offset={self.offset}: from 0 to every - 1 = {self.every - 1}")

    def __str__(self) -> str:
        kind = "disjoint" if self.stride in (None, self.length) else f"sliding by {self.stride:,}"
        return f"{kind} windows of {self.length:,}" + ("" if self.across_documents else ", each document alone")

    def starts(self, predictions: int) -> np.ndarray:
        """The first prediction of each window; the last sliding one is moved back so that it, too, is full."""
        step = self.stride or self.length
        if predictions <= self.length or step == self.length:
            return np.arange(0, predictions, self.length)
        count = -(-(predictions - self.length) // step) + 1
        return np.minimum(np.arange(count) * step, predictions - self.length)

    def scored(self, predictions: int) -> np.ndarray:
        """``bool[predictions]``: predictions that are scored: all, unless ``every`` leaves windows out."""
        starts, lengths, fresh = self._cut(predictions)
        bounds = np.zeros(predictions + 1, np.int64)
        np.add.at(bounds, fresh, 1)
        np.add.at(bounds, starts + lengths, -1)
        return np.cumsum(bounds[:-1]) > 0

    def _cut(self, predictions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each window's first prediction, its length, and the first prediction that no window before it scores."""
        starts = self.starts(predictions)
        lengths = np.minimum(self.length, predictions - starts)
        fresh = np.concatenate([[0], starts[:-1] + lengths[:-1]])
        chosen = slice(self.offset, None, self.every)
        return starts[chosen], lengths[chosen], fresh[chosen]

    def batches(self, text: Text, size: int) -> Iterator[WindowBatch]:
        """Batches of ``size`` windows; a shorter last window is a batch of its own, so nothing is ever padded."""
        starts, lengths, scored = self._cut(text.predictions)
        full = int((lengths == self.length).sum())
        groups = [slice(begin, min(begin + size, full)) for begin in range(0, full, size)]
        for group in [*groups, *([slice(full, None)] if full < len(starts) else [])]:
            yield self._batch(text, starts[group], int(lengths[group][0]), scored[group])

    def _batch(self, text: Text, first: np.ndarray, length: int, scored: np.ndarray) -> WindowBatch:
        index = first[:, None] + np.arange(length + 1)
        tokens = torch.from_numpy(text.stream[index])
        documents = None
        if not self.across_documents:
            documents = torch.from_numpy(np.searchsorted(text.starts, index[:, :-1], "right") - 1)
        return WindowBatch(first, tokens[:, :-1], tokens[:, 1:], index[:, :-1] >= scored[:, None], documents)
