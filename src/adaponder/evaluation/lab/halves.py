"""Splits a text into a tuning half and a held-out half that share no target.

A text of many documents is split by whole documents. With few or very unequal documents, windows alternate between the
halves; bootstrap intervals then resample windows, which makes them narrower than if they resampled documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from adaponder.errors import InputError
from adaponder.evaluation.scoring import Scores, ScoringOptions, score
from adaponder.evaluation.summary import FEW, Interval, bootstrap, per_document
from adaponder.evaluation.text import Text, Windows
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.terminal import counted

_ENOUGH_DOCUMENTS = 2 * FEW
_UNEQUAL = 0.1


@dataclass(frozen=True)
class Half:
    """The tuning or the held-out half of an evaluation text: the predictions of ``text`` that ``windows`` score.

    ``own_text`` contains only these predictions; confidence intervals resample its documents.
    """

    text: Text
    windows: Windows
    own_text: Text

    @property
    def mask(self) -> np.ndarray:
        """Returns ``bool[text.predictions]``: the predictions of this half."""
        return self.windows.scored(self.text.predictions)

    @property
    def tokens(self) -> int:
        return self.own_text.predictions

    @property
    def learned(self) -> int:
        """Returns the number of predictions included in the mean loss."""
        return int(self.own_text.counted.sum())

    @property
    def documents(self) -> int:
        return len(np.unique(self.text.document[self.mask]))

    def score(self, model: AdaPonderForCausalLM, how: ScoringOptions, **options: Any) -> Scores:
        """Returns the scores of this half; ``options`` are passed on to :func:`adaponder.evaluation.scoring.score`."""
        return score(model, self.text, self.windows, how=how, **options).at(self.mask)

    def depth_interval(self, scores: Scores, *, seed: int) -> Interval | None:
        """Returns the bootstrap interval of the mean of ``scores.depth``."""
        return bootstrap(per_document(self.own_text, scores.depth.astype(np.float64)), self.own_text.lengths, seed=seed)

    def everywhere(self, values: np.ndarray, otherwise: int) -> np.ndarray:
        """Returns one value per prediction of the whole text: ``values`` in this half, ``otherwise`` elsewhere."""
        result = np.full(self.text.predictions, otherwise, values.dtype)
        result[self.mask] = values
        return result


class Halves(NamedTuple):
    """The two halves of a text, and a description of the split (``how``).

    ``drawn`` says what bootstrap intervals resample: ``documents`` or ``windows``.
    """

    tuning: Half
    held_out: Half
    how: str
    drawn: str


def halve(text: Text, windows: Windows) -> Halves:
    """Splits a text into halves of about equal size: by whole documents if they are many and balance, else by windows.

    Raises if the text has a single window to split, or if a half has no learned tokens.
    """
    documents = len(text.starts)
    in_first = _assign(text.lengths)
    larger = max(in_first[text.document].sum(), (~in_first)[text.document].sum())
    even = 2 * larger - text.predictions <= _UNEQUAL * text.predictions
    if documents >= _ENOUGH_DOCUMENTS and even:
        texts = [_documents(text, in_half) for in_half in (in_first, ~in_first)]
        halves = [Half(half_text, windows, half_text) for half_text in texts]
        how, drawn = f"{documents} documents assigned whole", "documents"
    elif len(windows.starts(text.predictions)) < 2:
        raise InputError(
            f"--data has {text.predictions:,} tokens, one window of {windows.length:,}, and cannot be split in two; "
            "use more text or a shorter --window"
        )
    else:
        halves = [_every_other(text, windows, offset) for offset in (0, 1)]
        few = counted(documents, "document")
        how, drawn = f"alternate windows ({few}: too few or too unequal to assign whole)", "windows"
    if not all(half.learned for half in halves):
        raise InputError("--data: one half has no learned tokens to score; use more text")
    return Halves(*halves, how, drawn)


def _assign(lengths: np.ndarray) -> np.ndarray:
    """Returns ``bool[documents]``, true in the first half; each document goes to the half with fewer tokens so far."""
    in_first, lead = np.zeros(len(lengths), bool), 0
    for index, length in enumerate(lengths.tolist()):
        in_first[index] = lead <= 0
        lead += length if in_first[index] else -length
    return in_first


def _documents(text: Text, mask: np.ndarray) -> Text:
    """Returns the text of the documents that ``mask``, ``bool[documents]``, selects; an end token precedes each."""
    lengths = text.lengths[mask]
    starts = np.cumsum(lengths) - lengths
    return _selected(text, mask[text.document], starts, np.flatnonzero(mask), text.utf8_bytes[mask])


def _every_other(text: Text, windows: Windows, offset: int) -> Half:
    """Returns the half that consists of every second window, from window ``offset`` on."""
    windows = replace(windows, every=2, offset=offset)
    predictions = windows.scored(text.predictions)
    index = np.flatnonzero(predictions)
    # A window begins where its first prediction does not follow the one before it.
    starts = np.flatnonzero(np.diff(index, prepend=-2) > 1)
    first = text.document[index[starts]]
    lengths = np.diff(starts, append=len(index))
    # The bytes of a window are estimated by its share of the tokens of the document that it begins in.
    utf8_bytes = np.round(text.utf8_bytes[first] * lengths / text.lengths[first]).astype(np.int64)
    return Half(text, windows, _selected(text, predictions, starts, first, utf8_bytes))


def _selected(text: Text, mask: np.ndarray, starts: np.ndarray, documents: np.ndarray, utf8_bytes: np.ndarray) -> Text:
    """Returns the text of the predictions that ``mask`` selects.

    Document i of the returned text starts at its prediction ``starts[i]`` and is part of document ``documents[i]`` of
    ``text``.
    """
    return replace(
        text,
        stream=np.concatenate([text.stream[:1], text.stream[1:][mask]]),
        starts=starts,
        sources=tuple(text.sources[document] for document in documents),
        utf8_bytes=utf8_bytes,
        learned=None if text.learned is None else text.learned[mask],
    )
