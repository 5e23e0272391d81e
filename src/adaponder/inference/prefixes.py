"""Implements the prefix cache: blocks of prompt tokens whose rows several sequences share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from adaponder.inference.pages import Pages


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens whose rows are in the pools.

    Attributes:
        columns: their columns of the index, int32 ``[iterations, slots]``.
        depths: the depth of each token.
        pages: the pages of their rows, held as long as the span is.
    """

    columns: Tensor
    depths: list[int]
    pages: frozenset[int]


@dataclass(eq=False)
class _Block:
    span: Span
    key: tuple[Hashable, tuple[int, ...]]
    number: int


class Prefixes:
    """Caches blocks of ``size`` tokens; the least recently used are evicted when pages run short.

    A block is looked up by the block before it and its own tokens, compared exactly: no hash decides. The first block
    of a prompt is looked up by ``namespace``, which is equal only for sequences whose depths are decided alike.
    """

    def __init__(self, pages: Pages, size: int):
        self.pages, self.size = pages, size
        self._blocks: OrderedDict[tuple[Hashable, tuple[int, ...]], _Block] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, namespace: Hashable, tokens: Sequence[int]) -> list[Span]:
        """Returns the spans of the longest cached prefix of ``tokens``, their pages held for the caller."""
        blocks, parent = [], namespace
        for start in range(0, len(tokens) - self.size + 1, self.size):
            block = self._blocks.get((parent, tuple(tokens[start : start + self.size])))
            if block is None:
                break
            blocks.append(block)
            parent = block.number
        self._touch(blocks)
        for block in blocks:
            self.pages.hold(block.span.pages)
        return [block.span for block in blocks]

    def add(self, namespace: Hashable, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        """Caches the blocks of ``tokens``, one span each, unless they are cached already."""
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
        """Marks blocks as recently used, so that a block is never evicted before those that follow it."""
        for block in reversed(blocks):
            self._blocks.move_to_end(block.key)

    def make_room(self, pages: int) -> bool:
        """Evicts least recently used blocks until ``pages`` pages are free; False if that is impossible."""
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
