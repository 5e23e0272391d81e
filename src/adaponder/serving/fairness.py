"""Shares queue capacity, turns and threads fairly between clients, so that no client keeps the others waiting.

A client is a hashed API key or, without keys, a hashed address: :class:`adaponder.serving.settings.Client`.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from adaponder.errors import EvaluationError, in_one_line

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
# A client with items in a queue must leave one place free for every eight items that it would then have.
_SHARE = 8
# Number of the latest freed places from which the rate of freeing is estimated.
_MEASURED = 64
# Number of threads of a text pool.
THREADS = 4


class UnavailableError(EvaluationError):
    """Raised if the engine is not running, or the server stops before the work is done."""


class Places:
    """Counts how much of a limited capacity each client uses.

    One place is the capacity for one item: a completion, a score, a text to convert, or a connection.

    Attributes:
        held: number of places that each client holds; a client without places has no entry, so that the dictionary
            cannot grow forever.
        total: number of places that all clients hold together.
    """

    def __init__(self):
        self.held: Counter[str] = Counter()
        self.total = 0
        self._freed: deque[float] = deque(maxlen=_MEASURED)

    def take(self, client: str, count: int = 1) -> None:
        if not self.total:
            self._freed.clear()
            self._freed.append(time.monotonic())
        self.total += count
        self.held[client] += count

    def give_back(self, client: str, count: int = 1) -> None:
        self._freed.extend([time.monotonic()] * count)
        self.total -= count
        self.held[client] -= count
        if not self.held[client]:
            del self.held[client]

    def missing(self, client: str, count: int, *, room: int, at_once: int) -> int:
        """Returns how many places must become free before the client may take ``count`` places; 0 if it may now.

        ``room`` is the number of all places. Any client may take places until all clients together hold ``at_once``.
        Beyond that, a client that holds none may take any free places; every other client must leave one place free for
        each eight that it would then hold. So a single client gets at most eight ninths of the capacity, and several
        clients get equal shares.
        """
        free = room - self.total - count
        if room - free <= at_once:
            return 0
        if not self.held[client]:
            return max(0, -free)
        excess = self.held[client] + count - _SHARE * free
        return max(0, -free, math.ceil(excess / (_SHARE + 1)))

    def seconds(self, count: int) -> float:
        """Estimates the seconds until ``count`` places become free, from the recent rate; 0 if nothing is known yet."""
        if not self._freed:
            return 0.0
        return count * (time.monotonic() - self._freed[0]) / max(1, len(self._freed) - 1)


class Turns(Generic[_Item]):
    """A queue that returns the items of its clients round-robin: one item of each client in turn."""

    def __init__(self):
        self._items: dict[str, deque[_Item]] = {}  # the client whose turn is next comes first

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, client: str, item: _Item, index: int | None = None) -> None:
        """Adds an item behind the client's other items, or at ``index`` among them."""
        items = self._items.setdefault(client, deque())
        items.insert(len(items) if index is None else index, item)

    def take(self, skipped: Collection[str] = ()) -> tuple[str, _Item] | None:
        """Removes and returns the next (client, item) of a client not in ``skipped``; ``None`` if there is none."""
        if (client := next((client for client in self._items if client not in skipped), None)) is None:
            return None
        items = self._items.pop(client)
        item = items.popleft()
        if items:
            self._items[client] = items
        return client, item


class TextPool:
    """Tokenises, decodes and renders texts in at most :data:`THREADS` threads, round-robin over clients.

    Each client has at most one thread at a time.

    The threads are daemons, so a conversion that does not end cannot keep the process alive.

    Attributes:
        places: counts the unfinished conversions of each client.
        running: the futures of the conversions that have a thread, by client.
        finished, seconds: number of finished conversions, and the sum of their times in seconds.
    """

    def __init__(self):
        self.places = Places()
        self.running: dict[str, asyncio.Future[Any]] = {}
        self.finished, self.seconds = 0, 0.0
        self._turns: Turns[tuple[asyncio.Future[Any], Callable[[], Any]]] = Turns()
        self._closed = False

    async def run(self, client: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls ``function`` in a thread and returns its result; raises :class:`UnavailableError` after ``close``."""
        if self._closed:
            raise UnavailableError("text: the server is stopping")
        result = asyncio.get_running_loop().create_future()
        self.places.take(client)
        self._turns.put(client, (result, partial(function, *arguments)))
        self._begin()
        return await result

    def close(self) -> None:
        """Fails all unfinished conversions; threads that still run are abandoned."""
        self._closed = True
        waiting = []
        while turn := self._turns.take():
            waiting.append(turn[1][0])
            self.places.give_back(turn[0])
        for result in (*waiting, *self.running.values()):
            if not result.done():
                result.set_exception(UnavailableError("text: the server is stopping"))

    def _begin(self) -> None:
        while len(self.running) < THREADS and (turn := self._turns.take(self.running)):
            client, (result, call) = turn
            self.running[client] = result
            threading.Thread(target=self._run, args=(client, result, call), name="adaponder-text", daemon=True).start()

    def _run(self, client: str, result: asyncio.Future[Any], call: Callable[[], Any]) -> None:
        began, value, problem = time.monotonic(), None, None
        try:
            value = None if result.cancelled() else call()
        except Exception as error:
            problem = error
        except BaseException as error:  # a panic of a native tokenizer
            problem = EvaluationError(f"text: the tokenizer failed: {in_one_line(error)}")
        seconds = time.monotonic() - began
        with suppress(RuntimeError):  # the loop is closed
            result.get_loop().call_soon_threadsafe(self._end, client, result, value, problem, seconds)

    def _end(
        self, client: str, result: asyncio.Future[Any], value: Any, problem: Exception | None, seconds: float
    ) -> None:
        del self.running[client]
        self.places.give_back(client)
        self.finished, self.seconds = self.finished + 1, self.seconds + seconds
        if not result.done():
            result.set_result(value) if problem is None else result.set_exception(problem)
        self._begin()
