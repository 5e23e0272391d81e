"""Encodes documents into tokens, in this process or in worker processes; the result does not depend on which."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import resource_tracker
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from adaponder.data.chat import ConversationEncoder
from adaponder.data.manifest import DataError
from adaponder.data.readers import Document
from adaponder.data.tokenizers import PIECE, encoding, pieces
from adaponder.errors import InputError

# Maximum characters of all submitted chunks; each character takes about ten bytes of memory.
_MOST_PENDING = 2**27


Numbered = tuple[int, Document]  # number among all input documents, document


class EncodedDocument(NamedTuple):
    """One encoded document; ``index`` is its number among all input documents."""

    index: int
    validation: bool
    tokens: np.ndarray
    source: str
    utf8_bytes: int
    hash: int
    learned: list[int]  # first token and length of each learned span; empty if every token is learned


@dataclass
class Encoder:
    """Encodes chunks of numbered documents; can be pickled.

    A share ``validation`` of the documents, selected by hash, goes to the validation split. ``done`` has one number for
    train and one for validation: documents of the split with a lower number are already in complete shards.
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

    def __call__(self, chunk: Sequence[Numbered]) -> list[EncodedDocument]:
        encoded: list[EncodedDocument] = []
        parts: list[list[np.ndarray]] = []  # for each document, the token arrays of its pieces
        group: list[tuple[int, str]] = []  # (index of the document, text) of the pieces to encode next
        group_size = 0
        for number, document in chunk:
            digest, size = hash_and_size(document.content)
            validation = digest / 2**64 < self.validation
            if number < self.done[validation]:
                continue
            learned: list[int] = []
            parts.append([])
            if document.tokens is not None:
                parts[-1].append(self._accepted(document.tokens, document.origin).astype(self.dtype))
                with encoding():
                    size = len(self.tokenizer.decode(document.tokens.tolist()).encode())
            elif document.learned is not None:
                ids, learned = self.conversations(document.text, document.learned)
                parts[-1].append(ids[:-1].astype(self.dtype))
            else:
                for piece in pieces(document.text):
                    group.append((len(parts) - 1, piece))
                    group_size += len(piece)
                    # The library takes up to 200 bytes for a token: a long document is encoded in pieces.
                    if group_size >= PIECE:
                        self._encode(group, parts)
                        group, group_size = [], 0
            no_tokens = np.empty(0, self.dtype)  # replaced once all documents are encoded
            encoded.append(EncodedDocument(number, validation, no_tokens, document.source, size, digest, learned))
        self._encode(group, parts)
        end = np.array([self.end_id], self.dtype)
        return [
            document._replace(tokens=np.concatenate([*arrays, end]))
            for document, arrays in zip(encoded, parts, strict=True)
        ]

    def _encode(self, group: list[tuple[int, str]], parts: list[list[np.ndarray]]) -> None:
        """Encodes each (index, text) of ``group`` and appends the array of its tokens to the list ``parts[index]``."""
        with encoding():
            encoded = self.tokenizer.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
        for (index, _), piece in zip(group, encoded, strict=True):
            parts[index].append(np.array(piece.ids, self.dtype))

    def _accepted(self, tokens: np.ndarray, origin: str) -> np.ndarray:
        """Returns a document's tokens without their end token, if any; raises for ids outside the vocabulary."""
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


def hash_and_size(content: str | np.ndarray) -> tuple[int, int]:
    """Returns the hash of a document's UTF-8 text or little-endian uint32 tokens, and the number of bytes hashed.

    The hash is the first 8 bytes, big-endian, of the SHA-256. Hashing in pieces avoids a UTF-8 copy of all text.
    """
    digest, size = hashlib.sha256(), 0
    for start in range(0, len(content), PIECE):
        piece = content[start : start + PIECE]
        data = piece.encode() if isinstance(piece, str) else piece.astype("<u4").tobytes()
        digest.update(data)
        size += len(data)
    return int.from_bytes(digest.digest()[:8], "big"), size


def encode_in_order(
    encoder: Encoder, chunks: Iterable[list[Numbered]], *, workers: int
) -> Generator[list[EncodedDocument]]:
    """Yields ``map(encoder, chunks)``, computed by ``workers`` processes, or by this one if ``workers`` is 1."""
    if workers == 1:
        yield from map(encoder, chunks)
        return
    with _interrupts_deferred():
        # Spawned, not forked: a fork would inherit threads and GPU state.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder,))
    futures: deque[tuple[Future[list[EncodedDocument]], int]] = deque()
    try:
        for chunk in chunks:
            size = sum(len(document.content) for _, document in chunk)
            while futures and (
                futures[0][0].done()
                or len(futures) >= 4 * workers
                or size + sum(pending for _, pending in futures) > _MOST_PENDING
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
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Context manager that defers Ctrl-C until the block ends; processes started in it inherit the blocked signal."""
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


_encoder: Encoder | None = None  # set in worker processes only


def _start_worker(encoder: Encoder) -> None:
    """Initializes a worker process: it ignores SIGINT, tokenizes in one thread, and exits when its parent ends."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: list[Numbered]) -> list[EncodedDocument]:
    assert _encoder is not None
    return _encoder(chunk)
