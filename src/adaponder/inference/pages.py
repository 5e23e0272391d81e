"""Who holds which rows of the pools: pages of rows, counted, and streams of rows taken from them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Pages:
    """Hands out pages of ``size`` rows and takes them back when their last holder lets go.

    Page 0 is nobody's: rows that only fill up a batch write there.
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._free = list(range(count - 1, 0, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.count - 1 - self.free

    def take(self, count: int) -> list[int] | None:
        """So many pages with one holder each; ``None`` if there are not as many."""
        if count > self.free:
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder of each of these pages."""
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is free: nobody can begin to share it")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less of each; a page that nobody holds is free."""
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is released more often than it was taken")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def free_all(self) -> None:
        """Nobody holds anything."""
        self._free = list(range(self.count - 1, 0, -1))
        self._holders = [0] * self.count


class RowStream:
    """Rows one after the other from pages of one's own."""

    def __init__(self, size: int):
        self.size, self.used = size, 0
        self.pages: list[int] = []

    @property
    def room(self) -> int:
        """Rows left on the pages there are."""
        return len(self.pages) * self.size - self.used

    def pages_for(self, rows: int) -> int:
        """How many more pages so many more rows take."""
        return max(0, -(-(rows - self.room) // self.size))

    def take(self, rows: int) -> list[int]:
        """The next rows; there must be room."""
        if rows > self.room:
            raise RuntimeError(f"{rows} rows are wanted, there is room for {self.room}")
        places = np.arange(self.used, self.used + rows)
        self.used += rows
        return (np.array(self.pages)[places // self.size] * self.size + places % self.size).tolist()
