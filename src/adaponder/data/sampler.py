"""Draws batches from seed and step alone: no state is saved, and any number of processes gives the same order."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from adaponder.data.manifest import DataError
from adaponder.data.shards import Shards
from adaponder.errors import InputError

_ROUNDS = 8


class Batch(NamedTuple):
    """A batch of n windows; the inputs are ``tokens[:, :-1]``, the targets ``tokens[:, 1:]``.

    Attributes:
        tokens: token ids, ``[n, sequence + 1]``.
        documents: for each token, the number of its document in the split, ``[n, sequence + 1]``.
        windows: the number of each window, ``[n]``.
        learned: whether each token counts as a target, ``[n, sequence + 1]``; ``None`` if all count.
    """

    tokens: np.ndarray
    documents: np.ndarray
    windows: np.ndarray
    learned: np.ndarray | None = None


def read_windows(shards: Shards, windows: np.ndarray, *, sequence: int, stride: int | None = None) -> Batch:
    """Reads ``windows`` by number: window n starts at token ``n * stride``; without ``stride`` windows are disjoint."""
    starts = windows * (stride or sequence + 1)
    tokens = shards.read_blocks(starts, sequence + 1)
    documents = shards.number_blocks(starts, sequence + 1)
    return Batch(tokens, documents, windows, shards.learned_blocks(starts, sequence + 1))


class Sampler:
    """Draws the windows of each training step.

    Row n of step s is window ``permute(i % windows)`` of epoch ``i // windows``, where ``i = s * global_batch + n``.
    Each epoch visits every window once, in a different order; a batch may span two epochs.

    Attributes:
        windows: number of windows in an epoch: the disjoint blocks of ``sequence + 1`` tokens. Tokens after the last
            block are never read.
    """

    def __init__(self, shards: Shards, *, sequence: int, global_batch: int, seed: int):
        for name, value in (("sequence", sequence), ("global_batch", global_batch)):
            if value < 1:
                raise InputError(f"{name}={value} must be at least 1")
        self.shards, self.sequence, self.global_batch, self.seed = shards, sequence, global_batch, seed
        self.windows = shards.tokens // (sequence + 1)
        if not self.windows:
            raise DataError(
                f"{shards.folder}/{shards.split} has {shards.tokens} tokens, but one window takes "
                f"sequence + 1 = {sequence + 1}: prepare more text or shorten the sequence"
            )
        if self.windows < global_batch:
            raise DataError(
                f"{shards.folder}/{shards.split} has {self.windows} windows of {sequence + 1} tokens, "
                f"global_batch={global_batch} would repeat some within a step: "
                f"lower global_batch to {self.windows} or less, shorten the sequence, or prepare more text"
            )

    def batch(self, step: int) -> Batch:
        """Returns all windows of a step."""
        return self.part(step, 0, self.global_batch)

    def part(self, step: int, first: int, count: int) -> Batch:
        """Returns windows ``first … first + count - 1`` of ``batch(step)``, without reading the others."""
        if step < 0 or first < 0 or count < 0 or first + count > self.global_batch:
            last = self.global_batch - 1
            raise InputError(f"step {step}: {count} windows from {first} on; a step has windows 0 … {last}")
        return read_windows(self.shards, self._windows(step, first, count), sequence=self.sequence)

    def _windows(self, step: int, first: int, count: int) -> np.ndarray:
        index = step * self.global_batch + first + np.arange(count, dtype=np.int64)
        epochs, positions = np.divmod(index, self.windows)
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            windows[in_epoch] = permute(positions[in_epoch], self.windows, keys=round_keys(self.seed, epoch))
        return windows


@lru_cache(maxsize=4)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Returns eight 64-bit keys derived from seed and epoch."""
    digest = hashlib.shake_256(f"adaponder sampler {seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[start : start + 8], "little") for start in range(0, len(digest), 8))


def permute(values: np.ndarray, size: int, *, keys: tuple[int, ...]) -> np.ndarray:
    """Applies to ``values`` a bijection of ``[0, size)`` selected by ``keys``, without an array of length ``size``.

    A Feistel network permutes the larger range ``[0, root ** 2)``. A value that lands outside ``[0, size)`` is permuted
    again until it is inside; this ends, because the value's cycle started inside.
    """
    root = max(2, math.isqrt(size - 1) + 1)
    permuted = _feistel(values.astype(np.uint64), np.uint64(root), keys)
    while (outside := permuted >= size).any():
        permuted[outside] = _feistel(permuted[outside], np.uint64(root), keys)
    return permuted.astype(np.int64)


def _feistel(values: np.ndarray, root: np.uint64, keys: tuple[int, ...]) -> np.ndarray:
    """Permutes values as two digits in base ``root``: each round adds a keyed hash of one digit to the other."""
    left, right = np.divmod(values, root)
    for key in keys:
        left, right = right, (left + _mix(right ^ np.uint64(key)) % root) % root
    return left * root + right


def _mix(bits: np.ndarray) -> np.ndarray:
    """Applies the finaliser of splitmix64: each bit of the result depends on each bit of the input."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
