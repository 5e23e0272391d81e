"""Allocates the rows of the KV pools: reference-counted pages, the rows of each sequence, and the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


class Pages:
    """Allocates reference-counted pages of ``size`` rows; a page is free while its count is 0.

    Page 0 is never allocated: padding rows write there.
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.free_all()

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def held(self) -> int:
        """The number of allocated pages."""
        return self.count - 1 - self.free

    def take(self, count: int) -> list[int] | None:
        """Allocates ``count`` pages with a reference count of 1, or returns ``None`` if fewer are free."""
        if count > self.free:
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Increments the reference count of each of these pages."""
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Decrements the reference count of each of these pages and frees those that reach 0."""
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is already free")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def free_all(self) -> None:
        """Frees every page."""
        self._free = list(range(self.count - 1, 0, -1))
        self._holders = [0] * self.count


class RowStream:
    """Allocates the pool rows that one sequence writes, in order, on pages to which no other sequence writes."""

    def __init__(self, size: int):
        self.size, self.used = size, 0
        self.pages: list[int] = []

    @property
    def room(self) -> int:
        """The number of unused rows on the stream's pages."""
        return len(self.pages) * self.size - self.used

    def pages_for(self, rows: int) -> int:
        """Returns how many pages must be added before ``rows`` more rows fit."""
        return max(0, -(-(rows - self.room) // self.size))

    def take(self, rows: int) -> list[int]:
        """Allocates and returns the next ``rows`` pool rows; raises if there is no room."""
        if rows > self.room:
            raise RuntimeError(f"{rows} rows requested, {self.room} available")
        offsets = np.arange(self.used, self.used + rows)
        self.used += rows
        return (np.array(self.pages)[offsets // self.size] * self.size + offsets % self.size).tolist()


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens whose pool rows several sequences can share.

    Attributes:
        columns: int32 ``[iterations, slots]``, the pool row that each iteration reads for each slot of these tokens.
        depths: the depth of each token.
        pages: the pages with these pool rows.
    """

    columns: Tensor
    depths: list[int]
    pages: frozenset[int]


class KVRows:
    """The pool rows of a sequence's keys and values: rows shared with other sequences, and rows on its own pages.

    Attributes:
        shared: parts of the prompt whose rows come from the prefix cache or from another sample.
        prefill, decode: the rows on the sequence's own pages, of prefilled tokens and of decoded tokens.
        in_flight: the number of decode rows (with drafting: decoded tokens) that launched ticks may add. The host has
            not processed these ticks, so ``decode.used`` does not include the rows.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.shared: list[Span] = []
        self.prefill, self.decode = RowStream(page_size), RowStream(page_size)
        self.in_flight = 0
        self._written: list[tuple[list[int], list[int]]] = []  # tokens and rows of each prefill pass

    @property
    def num_cached(self) -> int:
        """The number of prompt tokens whose rows come from the prefix cache or another sample."""
        return sum(len(span.depths) for span in self.shared)

    @property
    def held_rows(self) -> int:
        """The number of rows on the sequence's own pages, used or not."""
        return (len(self.prefill.pages) + len(self.decode.pages)) * self.page_size

    def pages(self) -> list[int]:
        """Lists the page references that the sequence holds; a page may occur several times."""
        return [page for span in self.shared for page in span.pages] + self.prefill.pages + self.decode.pages

    def take_prefill(self, tokens: list[int], rows: int) -> list[int]:
        """Allocates ``rows`` prefill rows for one iteration of these tokens; each token gets equally many."""
        pool_rows = self.prefill.take(rows)
        self._written.append((tokens, pool_rows))
        return pool_rows

    def pages_by_block(self, size: int) -> dict[int, frozenset[int]]:
        """Maps the index of each block of ``size`` tokens to the pages with the block's prefill rows."""
        pages: dict[int, list[int]] = {}
        for tokens, rows in self._written:
            block = np.repeat(np.array(tokens) // size, len(rows) // len(tokens))
            for number, page in np.unique(np.stack([block, np.array(rows) // self.page_size]), axis=1).T.tolist():
                pages.setdefault(number, []).append(page)
        return {number: frozenset(block_pages) for number, block_pages in pages.items()}


# The number of the preceding block (for a prompt's first block, the namespace) and the block's tokens.
BlockKey = tuple[Hashable, tuple[int, ...]]


@dataclass(eq=False)
class _Block:
    span: Span
    key: BlockKey
    number: int


class PrefixCache:
    """Caches blocks of ``size`` prompt tokens; the least recently used are evicted when pages run short.

    Blocks are compared by their tokens, not only by a hash. A ``namespace`` separates requests whose equal prefixes may
    have different depths.
    """

    def __init__(self, pages: Pages, size: int):
        self.pages, self.size = pages, size
        self._blocks: OrderedDict[BlockKey, _Block] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, namespace: Hashable, tokens: Sequence[int]) -> list[Span]:
        """Returns the spans of the longest cached prefix of ``tokens``; increments their pages' reference counts."""
        blocks, parent = [], namespace
        for start in range(0, len(tokens) - self.size + 1, self.size):
            block = self._blocks.get((parent, tuple(tokens[start : start + self.size])))
            if block is None:
                break
            self.pages.hold(block.span.pages)
            blocks.append(block)
            parent = block.number
        self._touch(blocks)
        return [block.span for block in blocks]

    def add(self, namespace: Hashable, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        """Caches the first ``len(spans)`` blocks of ``tokens`` unless cached already; ``spans[i]`` is block ``i``."""
        parent, blocks = namespace, []
        for number, span in enumerate(spans):
            key = (parent, tuple(tokens[number * self.size : (number + 1) * self.size]))
            block = self._blocks.get(key)
            if block is None:
                self._numbers += 1
                block = self._blocks[key] = _Block(span, key, self._numbers)
                self.pages.hold(span.pages)
            blocks.append(block)
            parent = block.number
        self._touch(blocks)

    def _touch(self, blocks: Sequence[_Block]) -> None:
        """Marks blocks as recently used, last block first, so that later blocks of a prefix are evicted first."""
        for block in reversed(blocks):
            self._blocks.move_to_end(block.key)

    def make_room(self, pages: int) -> bool:
        """Evicts least recently used blocks until ``pages`` pages are free; returns False if it cannot free enough."""
        while self.pages.free < pages and self._blocks:
            _, block = self._blocks.popitem(last=False)
            self.pages.release(block.span.pages)
        return self.pages.free >= pages

    def forget(self) -> None:
        """Empties the cache without releasing pages, which the caller frees."""
        self._blocks.clear()

    def clear(self) -> None:
        """Empties the cache and releases its pages."""
        self.make_room(self.pages.count)
