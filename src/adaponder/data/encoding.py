"""Encodes documents into tokens, in this process or in several; the result and its order are the same."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from adaponder.data.manifest import DataError
from adaponder.data.tokenizers import PIECE, encoding, pieces
from adaponder.data.turns import ConversationEncoder
from adaponder.errors import AdaPonderError, InputError

# At most so many characters are being encoded at a time: each takes some ten bytes of memory in all.
_UNDER_WAY = 2**27


class Item(NamedTuple):
    """One document to encode: text, or tokens made elsewhere (``origin`` names their file, for errors).

    ``learned`` of a conversation are (first, last + 1) of the characters that are learned; of other text ``None``.
    """

    index: int
    content: str | np.ndarray
    source: str
    origin: str = ""
    learned: tuple[tuple[int, int], ...] | None = None


class Encoded(NamedTuple):
    """The encoded documents of one chunk, without those that ``Encoder.done`` skips; their tokens stand end to end."""

    tokens: np.ndarray
    lengths: list[int]
    indices: list[int]
    validation: list[bool]
    sources: list[str]
    utf8_bytes: list[int]
    hashes: list[int]
    learned: list[list[int]]


@dataclass
class Encoder:
    """Callable: a chunk (list) of items to :class:`Encoded`. Can be pickled and sent to other processes.

    Attributes:
        validation: share of documents, by hash, that go to validation.
        done: for train and for validation, the index below which items are done already and skipped.
    """

    tokenizer_json: str
    end_id: int
    vocab_size: int
    dtype: str
    validation: float
    done: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._tokenizer: Tokenizer | None = None
        self._turns: ConversationEncoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokenizer": None, "_turns": None}

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_str(self.tokenizer_json)
            self._tokenizer.encode_special_tokens = True
        return self._tokenizer

    @property
    def turns(self) -> ConversationEncoder:
        if self._turns is None:
            self._turns = ConversationEncoder(self.tokenizer_json, self.end_id)
        return self._turns

    def __call__(self, chunk: list[Item]) -> Encoded:
        kept: list[tuple[Item, _Measure, bool]] = []
        for item in chunk:
            measure = _measured(item.content)
            validates = measure.hash / 2**64 < self.validation
            if item.index >= self.done[validates]:
                kept.append((item, measure, validates))
        learned: list[list[int]] = [[] for _ in kept]
        tokens = self._encode([item for item, _, _ in kept], learned)
        return Encoded(
            tokens=np.concatenate([np.empty(0, self.dtype), *tokens], dtype=self.dtype),
            lengths=[len(part) for part in tokens],
            indices=[item.index for item, _, _ in kept],
            validation=[validates for _, _, validates in kept],
            sources=[item.source for item, _, _ in kept],
            utf8_bytes=[
                measure.size if isinstance(item.content, str) else self._spelled_bytes(item.content)
                for item, measure, _ in kept
            ],
            hashes=[measure.hash for _, measure, _ in kept],
            learned=learned,
        )

    def _encode(self, items: list[Item], learned: list[list[int]]) -> list[np.ndarray]:
        """Each item's tokens with exactly one end token after them; writes what of it is ``learned``."""
        parts: list[list[np.ndarray]] = [[] for _ in items]
        group: list[tuple[int, str]] = []
        size = 0
        for number, item in enumerate(items):
            if isinstance(item.content, str) and item.learned is not None:
                ids, learned[number] = self.turns(item.content, item.learned)
                parts[number].append(ids[:-1].astype(self.dtype))
                continue
            if not isinstance(item.content, str):
                parts[number].append(self._accepted(item.content, item.origin).astype(self.dtype))
                continue
            for piece in pieces(item.content):
                group.append((number, piece))
                size += len(piece)
                if size >= PIECE:
                    # The library takes up to 200 bytes for a token: it is never given a long document at once.
                    self._encode_group(group, parts)
                    group, size = [], 0
        self._encode_group(group, parts)
        end = np.array([self.end_id], self.dtype)
        return [np.concatenate([*part, end]) for part in parts]

    def _encode_group(self, group: list[tuple[int, str]], parts: list[list[np.ndarray]]) -> None:
        """Appends the tokens of each (item number, piece) to ``parts[number]``."""
        with encoding():
            encoded = self.tokenizer.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
        for (number, _), one in zip(group, encoded, strict=True):
            parts[number].append(np.array(one.ids, self.dtype))

    def _accepted(self, tokens: np.ndarray, origin: str) -> np.ndarray:
        """Tokens made elsewhere, without a final end token; raises where this tokenizer cannot have made them."""
        if self.vocab_size > 2 ** (8 * tokens.itemsize):
            raise InputError(
                f"{origin}: {tokens.dtype.name} cannot hold the {self.vocab_size} ids of the tokenizer: "
                "the data was made with another one; name that with --tokenizer"
            )
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if wrong.any():
            raise InputError(
                f"{origin}: token id {tokens[np.argmax(wrong)]} at {np.argmax(wrong)} lies outside the tokenizer's "
                f"vocabulary of {self.vocab_size}: the data was made with another one; name that with --tokenizer"
            )
        return tokens[:-1] if len(tokens) and tokens[-1] == self.end_id else tokens

    def _spelled_bytes(self, tokens: np.ndarray) -> int:
        return len(self.tokenizer.decode(tokens.tolist()).encode())


class _Measure(NamedTuple):
    """A document's hash (see :func:`content_hash`) and the bytes that were hashed."""

    hash: int
    size: int


def _measured(content: str | np.ndarray) -> _Measure:
    """Hashes a document piece by piece: a copy of the whole in UTF-8 is never made."""
    digest, size = hashlib.sha256(), 0
    for start in range(0, len(content), PIECE):
        part = content[start : start + PIECE]
        data = part.encode() if isinstance(part, str) else part.astype("<u4").tobytes()
        digest.update(data)
        size += len(data)
    return _Measure(int.from_bytes(digest.digest()[:8], "big"), size)


def content_hash(content: str | np.ndarray) -> int:
    """First 8 bytes, big-endian, of the SHA-256 of the text in UTF-8 (of tokens: as little-endian uint32)."""
    return _measured(content).hash


def encode_in_order(encoder: Encoder, chunks: Iterable[list[Item]], *, workers: int) -> Generator[Encoded]:
    """Equals ``map(encoder, chunks)``, computed by ``workers`` processes; with one worker, in this process."""
    if workers == 1:
        yield from map(encoder, chunks)
        return
    pool = _start_workers(encoder, workers)
    try:
        yield from _distribute(pool, iter(chunks))
    finally:
        for connection, process in pool.items():
            connection.close()
            process.terminate()  # idle, or at a chunk that is not needed any more
        for process in pool.values():
            process.join(timeout=5)


def _start_workers(encoder: Encoder, workers: int) -> dict[Connection, Any]:
    """Worker processes by the connection to each. If this process is killed, they see their connections closed and end.

    Workers start from a clean server process, so neither threads nor a GPU of this one are forked into them.
    """
    with _interruptions_deferred():
        if "forkserver" in multiprocessing.get_all_start_methods():
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            # Python asks after its server as after a child: a process forked from the one that began it has none.
            with contextlib.suppress(ChildProcessError):
                return dict(_start(context, encoder) for _ in range(workers))
        return dict(_start(multiprocessing.get_context("spawn"), encoder) for _ in range(workers))


@contextlib.contextmanager
def _interruptions_deferred() -> Iterator[None]:
    """A Ctrl-C is answered after the block; processes started inside never see one, not even while they start."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # the start of this one would end the deferral
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(context: Any, encoder: Encoder) -> tuple[Connection, Any]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, encoder), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _distribute(pool: dict[Connection, Any], chunks: Iterator[list[Item]]) -> Iterator[Encoded]:
    """Sends each chunk to a free worker and yields the results in order; how far work runs ahead is bounded."""
    idle, busy, ready = list(pool), {}, {}
    under_way: dict[int, int] = {}  # characters of each chunk that was sent and whose result was not yet yielded
    sent = turn = 0
    more, chunk = True, None
    while more or busy:
        while more and idle and sent - turn < 4 * len(pool):
            chunk = chunk or next(chunks, None)
            if chunk is None:
                more = False
                break
            size = sum(len(item.content) for item in chunk)
            if under_way and sum(under_way.values()) + size > _UNDER_WAY:
                break  # long documents: as many at a time as memory allows, one at least
            worker = idle.pop()
            _exchange(lambda worker=worker, chunk=chunk: worker.send(chunk))
            busy[worker], under_way[sent], chunk = sent, size, None
            sent += 1
        # No worker may be busy: the last results can have come before the chunks were known to be over.
        for worker in cast("list[Connection]", wait(list(busy)) if busy else []):
            ready[busy.pop(worker)] = result = _exchange(worker.recv)
            idle.append(worker)
            if isinstance(result, AdaPonderError):
                raise result
        while turn in ready:
            del under_way[turn]
            yield ready.pop(turn)
            turn += 1


def _exchange(action: Any) -> Any:
    """``action()``, a send or receive; raises where the worker has died."""
    try:
        return action()
    except (EOFError, ConnectionError):
        raise DataError(
            "a tokenising process died, most likely for want of memory: run the same command again with fewer --workers"
        ) from None


def _work(connection: Connection, encoder: Encoder) -> None:
    """Runs in a worker process: encodes chunks in one thread until the connection closes; SIGINT is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        while True:
            chunk = connection.recv()
            try:
                result: Encoded | AdaPonderError = encoder(chunk)
            except AdaPonderError as error:
                result = error
            connection.send(result)
    except (EOFError, ConnectionError):
        return
