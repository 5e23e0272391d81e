"""Prompts that begin alike are read once: spans of the index that several sequences share."""

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
        columns: their part of the index, int32 ``[iterations, slots]``.
        depths: how often each token was read.
        pages: the pages on which their rows lie; who keeps the span holds them.
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
    """Blocks of ``size`` tokens by what comes before them, the oldest unused ones dropped when pages are wanted.

    A block is found by the block before it and its own tokens, compared as they are: no hash decides. The first block
    of a prompt is found by ``root``, which says whose decisions are equal.
    """

    def __init__(self, pages: Pages, size: int):
        self.pages, self.size = pages, size
        self._blocks: OrderedDict[tuple[Hashable, tuple[int, ...]], _Block] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, root: Hashable, tokens: Sequence[int]) -> list[Span]:
        """The spans of as many leading blocks of ``tokens`` as are known; each is held for the caller."""
        found, parent = [], root
        for start in range(0, len(tokens) - self.size + 1, self.size):
            block = self._blocks.get((parent, tuple(tokens[start : start + self.size])))
            if block is None:
                break
            found.append(block)
            parent = block.number
        for block in reversed(found):  # a block is never dropped before those that follow it
            self._blocks.move_to_end(block.key)
        spans = [block.span for block in found]
        for span in spans:
            self.pages.hold(span.pages)
        return spans

    def keep(self, root: Hashable, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        """Remembers the blocks of ``tokens``, one span each, unless they are known."""
        parent, entered = root, []
        for number, span in enumerate(spans):
            key = (parent, tuple(tokens[number * self.size : (number + 1) * self.size]))
            block = self._blocks.get(key)
            if block is None:
                self._numbers += 1
                block = self._blocks[key] = _Block(span, key, self._numbers)
                self.pages.hold(span.pages)
            entered.append(block)
            parent = block.number
        for block in reversed(entered):
            self._blocks.move_to_end(block.key)

    def make_room(self, pages: int) -> bool:
        """Drops blocks, those unused for longest first, until so many pages are free; false if that cannot be."""
        while self.pages.free < pages and self._blocks:
            _, block = self._blocks.popitem(last=False)
            self.pages.release(block.span.pages)
        return self.pages.free >= pages

    def forget(self) -> None:
        """As :meth:`clear`, but releases nothing: the pages are freed by the caller."""
        self._blocks.clear()

    def clear(self) -> None:
        self.make_room(self.pages.count)
