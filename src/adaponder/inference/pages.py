"""Allocates rows of the KV pools: reference-counted pages, and streams of rows within a sequence's pages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Pages:
    """Allocates pages of ``size`` rows; a page is free once its last holder releases it.

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
        """Allocates ``count`` pages with one holder each; ``None`` if fewer are free."""
        if count > self.free:
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to each of these pages."""
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes a holder from each of these pages and frees those without one."""
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
    """Consecutive rows of one sequence on its own pages."""

    def __init__(self, size: int):
        self.size, self.used = size, 0
        self.pages: list[int] = []

    @property
    def room(self) -> int:
        """The number of unused rows on its pages."""
        return len(self.pages) * self.size - self.used

    def pages_for(self, rows: int) -> int:
        """Returns how many more pages ``rows`` more rows need."""
        return max(0, -(-(rows - self.room) // self.size))

    def take(self, rows: int) -> list[int]:
        """Returns the next ``rows`` pool rows, for which there must be room."""
        if rows > self.room:
            raise RuntimeError(f"{rows} rows requested, {self.room} available")
        offsets = np.arange(self.used, self.used + rows)
        self.used += rows
        return (np.array(self.pages)[offsets // self.size] * self.size + offsets % self.size).tolist()
