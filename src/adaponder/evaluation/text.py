"""Reads the text of an evaluation and cuts it into windows; every token of every document is predicted once.

The stream is an end token, followed by the documents, each closed by an end token. Prediction ``p`` has input
``stream[p]`` and target ``stream[p + 1]``, and belongs to the document of its target. So a document's first token is
predicted from the end token before it, and its closing end token is one of its targets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer
from torch import Tensor

from adaponder.checkpoints.loading import refuse_code, tokenizer_of
from adaponder.data import Shards, sources
from adaponder.data.encode import Encoder
from adaponder.data.manifest import MANIFEST, SKIPPED, dtype_of
from adaponder.data.tokenizers import load_tokenizer, tokenizer_hash, vocabulary_size
from adaponder.errors import InputError
from adaponder.terminal import errors, line
from adaponder.text.spelling import unknown_id


class Vocabulary(NamedTuple):
    """A checkpoint's tokenizer, the id of its end-of-document token, and the id of its UNK token (``None``: no UNK)."""

    tokenizer: Tokenizer
    end_id: int
    unknown_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, end_id: int) -> Vocabulary:
        return cls(tokenizer, end_id, unknown_id(tokenizer, end_id))

    @property
    def hash(self) -> str:
        return tokenizer_hash(self.tokenizer)


def open_vocabulary(spec: str) -> Vocabulary:
    """Opens the tokenizer of a model folder or hub repository, or a ``tokenizer.json``; converts older formats.

    Raises if the tokenizer has no end token or is not a fast one.
    """
    folder = Path(spec)
    if folder.is_dir():
        refuse_code(folder)
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        return Vocabulary.of(*load_tokenizer(spec))
    loaded: Any = tokenizer_of(folder)  # transformers converts other formats
    end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.bos_token_id
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if end is None or tokenizer is None:
        raise InputError(
            f"{folder}: the tokenizer has no end token or is not a fast one; pass another with --tokenizer"
        )
    tokenizer.encode_special_tokens = True
    return Vocabulary.of(tokenizer, end)


@dataclass(frozen=True)
class Text:
    """Documents as one stream of tokens.

    Attributes:
        stream: ``int64[predictions + 1]``: an end token, then the documents, each closed by an end token.
        starts: ``int64[documents]``: the first prediction of each document.
        sources: the source of each document.
        utf8_bytes: ``int64[documents]``: the size of each document in bytes.
        learned: ``bool[predictions]``: targets that training learns and mean losses include (the assistant's turns of
            conversations, answers and ends of puzzles). ``None``: all.
    """

    stream: np.ndarray
    starts: np.ndarray
    sources: tuple[str, ...]
    utf8_bytes: np.ndarray
    vocabulary: Vocabulary
    learned: np.ndarray | None = None

    @property
    def predictions(self) -> int:
        return len(self.stream) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Returns the number of predictions of each document, ``int64[documents]``."""
        return np.diff(self.starts, append=self.predictions)

    @property
    def document(self) -> np.ndarray:
        """Returns the document index of each prediction, ``int64[predictions]``."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    @property
    def counted(self) -> np.ndarray:
        """Returns ``bool[predictions]``: the predictions included in the mean loss."""
        return np.ones(self.predictions, bool) if self.learned is None else self.learned

    @property
    def unknown(self) -> np.ndarray:
        """Returns ``bool[predictions]``: the targets that stand for text which the tokenizer does not know."""
        unknown = self.vocabulary.unknown_id
        return self.stream[1:] == (-1 if unknown is None else unknown)

    @property
    def position(self) -> np.ndarray:
        """Returns the position of each predicted token in its document, ``int64[predictions]``."""
        return np.arange(self.predictions) - self.starts[self.document]

    def first(self, predictions: int) -> Text:
        """Returns the text of the first ``predictions`` predictions; the last document may be truncated."""
        if predictions >= self.predictions:
            return self
        count = int(np.searchsorted(self.starts, predictions, "left"))
        stream, sizes = self.stream[: predictions + 1], self.utf8_bytes[:count].copy()
        if count == len(self.starts) or self.starts[count] != predictions:
            tokens = stream[self.starts[count - 1] + 1 :].tolist()
            sizes[-1] = len(self.vocabulary.tokenizer.decode(tokens).encode())
        learned = None if self.learned is None else self.learned[:predictions]
        return Text(stream, self.starts[:count], self.sources[:count], sizes, self.vocabulary, learned)


def open_text(
    data: str, vocabulary: Vocabulary, *, whose: str, split: str = "validation", max_tokens: int | None = None
) -> Text:
    """Opens ``data`` as a text of at most ``max_tokens`` tokens; raises if it has no learned tokens.

    ``data`` is a folder made by ``adaponder prepare`` (its ``split`` is read), or any input of ``prepare``: a text
    file, a folder of text files, ``.jsonl`` (all of these also compressed), ``.parquet``, ``stdlib``, ``hf:NAME``.
    If the folder was prepared with another tokenizer, the error calls the checkpoint ``whose``.
    """
    hint = ""
    if os.path.isfile(Path(data) / MANIFEST):
        hint = f" in its {split} split; name the other with --split, or prepare more text"
        documents = _prepared(Path(data), split, vocabulary, whose)
    else:
        documents = _encoded(data, vocabulary)
    text = _joined(documents, vocabulary, max_tokens)
    if text is None:
        raise InputError(f"--data {data} has no text{hint}")
    if not text.counted.any():
        raise InputError(f"--data {data} has no learned tokens, so there is nothing to score")
    return text


class _Piece(NamedTuple):
    tokens: np.ndarray
    source: str
    utf8_bytes: int
    learned: np.ndarray | None = None


def _prepared(folder: Path, split: str, vocabulary: Vocabulary, whose: str) -> Iterator[_Piece]:
    shards = Shards.open(folder, split)
    shards.require_tokenizer(vocabulary.hash, whose)
    first = 0
    for shard in shards.manifest.splits[split]:
        table = pq.read_table(folder / split / shard.docs_name, columns=["length", "source", "utf8_bytes"])
        for batch in table.to_batches(max_chunksize=1024):
            lengths, names, sizes = (batch.column(name).to_pylist() for name in table.column_names)
            total, ends = sum(lengths), np.cumsum(lengths)[:-1]
            parts = np.split(shards.read(first, total), ends)
            learned = shards.learned_blocks(np.array([first]), total)
            masks = [None] * len(parts) if learned is None else np.split(learned[0], ends)
            yield from map(_Piece, parts, names, sizes, masks)
            first += total


def _encoded(data: str, vocabulary: Vocabulary) -> Iterator[_Piece]:
    size = vocabulary_size(vocabulary.tokenizer)
    encoder = Encoder(vocabulary.tokenizer.to_str(), vocabulary.end_id, size, dtype_of(size), 0.0)
    counts = sources.Counts()
    records = sources.documents([data], counts=counts)
    try:
        while batch := list(islice(records, 64)):
            for record, document in zip(batch, encoder(list(enumerate(batch))), strict=True):
                mask = None
                if record.learned is not None:
                    mask = np.zeros(len(document.tokens), bool)
                    # Runs of learned tokens: first token, length, first token, length, …
                    for begin, count in zip(document.learned[::2], document.learned[1::2], strict=True):
                        mask[begin : begin + count] = True
                yield _Piece(document.tokens.astype(np.int64), document.source, document.utf8_bytes, mask)
    finally:
        if counts.invalid_utf8:
            errors.print(line((f"{data}:", "yellow"), f" {SKIPPED['invalid_utf8']}: {counts.invalid_utf8:,}"))


def _joined(documents: Iterator[_Piece], vocabulary: Vocabulary, limit: int | None) -> Text | None:
    """Joins ``documents`` into a text of at most ``limit`` tokens; returns ``None`` if they have no tokens."""
    pieces: list[_Piece] = []
    predictions = 0
    for piece in documents:
        pieces.append(piece)
        predictions += len(piece.tokens)
        if limit is not None and predictions >= limit:
            break
    if predictions == 0:
        return None
    learned = None
    if any(piece.learned is not None for piece in pieces):
        masks = (np.ones(len(tokens), bool) if mask is None else mask for tokens, _, _, mask in pieces)
        learned = np.concatenate(list(masks))
    lengths = np.array([len(piece.tokens) for piece in pieces])
    text = Text(
        stream=np.concatenate([np.array([vocabulary.end_id], np.int64), *(piece.tokens for piece in pieces)]),
        starts=np.cumsum(lengths) - lengths,
        sources=tuple(piece.source for piece in pieces),
        utf8_bytes=np.array([piece.utf8_bytes for piece in pieces], np.int64),
        vocabulary=vocabulary,
        learned=learned,
    )
    return text if limit is None else text.first(limit)


class WindowBatch(NamedTuple):
    """A batch of windows of equal length; all fields are ``[windows, length]``.

    ``index`` is the index of each prediction in the text; ``fresh`` is true for predictions that no earlier window
    contains; ``documents`` is the document index of each prediction, or ``None`` if attention crosses documents.
    """

    index: np.ndarray
    input_ids: Tensor
    targets: Tensor
    fresh: np.ndarray
    documents: Tensor | None


@dataclass(frozen=True)
class Windows:
    """Disjoint windows of ``length`` predictions, or windows that advance by ``stride`` and score only new predictions.

    ``across_documents``: whether a token may attend to earlier documents, as in packed training. Only windows
    ``offset``, ``offset + every``, ``offset + 2 every``, … are scored.
    """

    length: int
    stride: int | None = None
    across_documents: bool = True
    every: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"--window {self.length} must be at least 1")
        if self.stride is not None and not 1 <= self.stride <= self.length:
            raise InputError(f"--stride {self.stride} must be from 1 to {self.length}, the window")
        if not 0 <= self.offset < self.every:
            raise InputError(f"offset={self.offset} must be from 0 to every - 1 = {self.every - 1}")

    def __str__(self) -> str:
        kind = "disjoint" if self.stride in (None, self.length) else f"sliding by {self.stride:,}"
        return f"{kind} windows of {self.length:,}" + ("" if self.across_documents else ", each document alone")

    def starts(self, predictions: int) -> np.ndarray:
        """Returns the first prediction of every window, also of those not scored.

        The last sliding window is moved back so that it is full.
        """
        step = self.stride or self.length
        if predictions <= self.length or step == self.length:
            return np.arange(0, predictions, self.length)
        count = -(-(predictions - self.length) // step) + 1
        return np.minimum(np.arange(count) * step, predictions - self.length)

    def scored(self, predictions: int) -> np.ndarray:
        """Returns ``bool[predictions]``: true in scored windows, each ``every``-th one from ``offset`` on."""
        starts, lengths, fresh = self._cut(predictions)
        bounds = np.zeros(predictions + 1, np.int64)
        np.add.at(bounds, fresh, 1)
        np.add.at(bounds, starts + lengths, -1)
        return np.cumsum(bounds[:-1]) > 0

    def _cut(self, predictions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns three arrays with an entry per scored window.

        The arrays are the window's first prediction, its length, and its first prediction that no earlier window
        contains.
        """
        starts = self.starts(predictions)
        lengths = np.minimum(self.length, predictions - starts)
        fresh = np.concatenate([[0], starts[:-1] + lengths[:-1]])
        selected = slice(self.offset, None, self.every)
        return starts[selected], lengths[selected], fresh[selected]

    def batches(self, text: Text, size: int) -> Iterator[WindowBatch]:
        """Yields batches of up to ``size`` windows; a shorter last window is a separate batch, so nothing is padded."""
        starts, lengths, fresh = self._cut(text.predictions)
        full = int((lengths == self.length).sum())
        groups = [slice(begin, min(begin + size, full)) for begin in range(0, full, size)]
        for group in [*groups, *([slice(full, None)] if full < len(starts) else [])]:
            index = starts[group, None] + np.arange(lengths[group][0] + 1)
            tokens = torch.from_numpy(text.stream[index])
            index, documents = index[:, :-1], None
            if not self.across_documents:
                documents = torch.from_numpy(np.searchsorted(text.starts, index, "right") - 1)
            yield WindowBatch(index, tokens[:, :-1], tokens[:, 1:], index >= fresh[group, None], documents)
