"""Encodes documents into tokens, in this process or in several; the result and its order are the same."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import forkserver, resource_tracker
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from adaponder.data.chat import ConversationEncoder
from adaponder.data.manifest import DataError
from adaponder.data.tokenizers import PIECE, encoding, pieces
from adaponder.errors import InputError

# Maximum characters that are being encoded at a time: each takes some ten bytes of memory in all.
_UNDER_WAY = 2**27


class Item(NamedTuple):
    """One document to encode: text, or tokens made elsewhere (``origin`` names their file, for errors).

    ``learned`` are (first, last + 1) of the learned characters of a conversation; ``None`` for other text.
    """

    index: int
    content: str | np.ndarray
    source: str
    origin: str = ""
    learned: tuple[tuple[int, int], ...] | None = None


class EncodedDocument(NamedTuple):
    """One encoded document; ``learned`` are (first token, tokens) of each learned span of a conversation, flattened."""

    index: int
    validation: bool
    tokens: np.ndarray
    source: str
    utf8_bytes: int
    hash: int
    learned: list[int]


@dataclass
class Encoder:
    """Encodes a chunk of items, without those that were written before. It can be pickled.

    Attributes:
        validation: share of documents, by hash, that go to validation.
        done: for train and for validation, the index below which items are skipped.
    """

    tokenizer_json: str
    end_id: int
    vocab_size: int
    dtype: str
    validation: float
    done: tuple[int, int] = (0, 0)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def conversations(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokenizer_json, self.end_id)

    def __call__(self, chunk: list[Item]) -> list[EncodedDocument]:
        selected: list[tuple[Item, bool, int, int]] = []
        for item in chunk:
            content_hash, size = _hash_and_size(item.content)
            validation = content_hash / 2**64 < self.validation
            if item.index >= self.done[validation]:
                selected.append((item, validation, content_hash, size))
        learned: list[list[int]] = [[] for _ in selected]
        tokens = self._encode([entry[0] for entry in selected], learned)
        return [
            EncodedDocument(item.index, validation, ids, item.source, self._utf8_bytes(item, size), content_hash, spans)
            for (item, validation, content_hash, size), ids, spans in zip(selected, tokens, learned, strict=True)
        ]

    def _encode(self, items: list[Item], learned: list[list[int]]) -> list[np.ndarray]:
        """Returns each item's tokens with exactly one end token after them; fills ``learned`` for conversations."""
        parts: list[list[np.ndarray]] = [[] for _ in items]
        group: list[tuple[int, str]] = []
        size = 0
        for number, item in enumerate(items):
            if isinstance(item.content, str) and item.learned is not None:
                ids, learned[number] = self.conversations(item.content, item.learned)
                parts[number].append(ids[:-1].astype(self.dtype))
                continue
            if not isinstance(item.content, str):
                parts[number].append(self._accepted(item.content, item.origin).astype(self.dtype))
                continue
            for piece in pieces(item.content):
                group.append((number, piece))
                size += len(piece)
                if size >= PIECE:
                    # The library takes up to 200 bytes for a token: a long document is encoded in pieces.
                    self._encode_group(group, parts)
                    group, size = [], 0
        self._encode_group(group, parts)
        end = np.array([self.end_id], self.dtype)
        return [np.concatenate([*part, end]) for part in parts]

    def _encode_group(self, group: list[tuple[int, str]], parts: list[list[np.ndarray]]) -> None:
        """Encodes each (item number, piece) and appends its tokens to ``parts[number]``."""
        with encoding():
            encoded = self.tokenizer.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
        for (number, _), piece in zip(group, encoded, strict=True):
            parts[number].append(np.array(piece.ids, self.dtype))

    def _accepted(self, tokens: np.ndarray, origin: str) -> np.ndarray:
        """Returns tokens made elsewhere, without a final end token; raises if this tokenizer cannot have made them."""
        if self.vocab_size > 2 ** (8 * tokens.itemsize):
            raise InputError(
                f"{origin}: {tokens.dtype.name} cannot hold the {self.vocab_size} ids of the tokenizer: "
                "the data was made with another tokenizer; name that one with --tokenizer"
            )
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if wrong.any():
            raise InputError(
                f"{origin}: token id {tokens[np.argmax(wrong)]} at {np.argmax(wrong)} is outside the vocabulary of "
                f"{self.vocab_size}: the data was made with another tokenizer; name that one with --tokenizer"
            )
        return tokens[:-1] if len(tokens) and tokens[-1] == self.end_id else tokens

    def _utf8_bytes(self, item: Item, size: int) -> int:
        """Returns the bytes of the item's text; tokens are decoded for it."""
        return size if isinstance(item.content, str) else len(self.tokenizer.decode(item.content.tolist()).encode())


def _hash_and_size(content: str | np.ndarray) -> tuple[int, int]:
    """Returns (:func:`content_hash`, bytes hashed); reads piece by piece, without a copy of the whole in UTF-8."""
    digest, size = hashlib.sha256(), 0
    for start in range(0, len(content), PIECE):
        piece = content[start : start + PIECE]
        data = piece.encode() if isinstance(piece, str) else piece.astype("<u4").tobytes()
        digest.update(data)
        size += len(data)
    return int.from_bytes(digest.digest()[:8], "big"), size


def content_hash(content: str | np.ndarray) -> int:
    """Returns the first 8 bytes, big-endian, of the SHA-256 of the UTF-8 text (of tokens: as little-endian uint32)."""
    return _hash_and_size(content)[0]


def encode_in_order(
    encoder: Encoder, chunks: Iterable[list[Item]], *, workers: int
) -> Generator[list[EncodedDocument]]:
    """Equals ``map(encoder, chunks)``, computed by ``workers`` processes; with one worker, in this process."""
    if workers == 1:
        yield from map(encoder, chunks)
        return
    # Workers end when this pipe closes: at the end of the work, or with this process if it is killed.
    reading, writing = multiprocessing.Pipe(duplex=False)
    with _interrupts_deferred():
        context = _start_method()
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder, reading))
    futures: deque[tuple[Future[list[EncodedDocument]], int]] = deque()
    try:
        for chunk in chunks:
            size = sum(len(item.content) for item in chunk)
            while futures and (
                futures[0][0].done()
                or len(futures) >= 4 * workers
                or size + sum(waiting for _, waiting in futures) > _UNDER_WAY
            ):
                yield futures.popleft()[0].result()
            with _interrupts_deferred():  # the first chunks start the processes
                futures.append((pool.submit(_encode_in_worker, chunk), size))
        while futures:
            yield futures.popleft()[0].result()
    except BrokenProcessPool:
        raise DataError(
            "a tokenizing process died, probably out of memory: run the same command again with fewer --workers"
        ) from None
    finally:
        writing.close()
        pool.shutdown(cancel_futures=True)


def _start_method() -> Any:
    """Returns the context of a clean server process, from which neither threads nor a GPU are forked into workers."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        # Raised in a process that was forked from the one whose child the server is.
        with contextlib.suppress(ChildProcessError):
            forkserver.ensure_running()
            return context
    return multiprocessing.get_context("spawn")


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delays Ctrl-C until the block ends; processes started inside never receive it, not even while they start."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_encoder: Encoder | None = None  # of a worker process


def _start_worker(encoder: Encoder, parent: Any) -> None:
    """Prepares a worker process: one thread encodes, another waits for the end of the parent; it ignores SIGINT."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    with contextlib.suppress(EOFError, OSError):
        parent.recv_bytes()
    os._exit(1)


def _encode_in_worker(chunk: list[Item]) -> list[EncodedDocument]:
    assert _encoder is not None
    return _encoder(chunk)
