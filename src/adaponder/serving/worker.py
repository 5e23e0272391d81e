"""Runs the engine in one thread: requests go in through a queue, and each step's events come out in one call.

The event loop never waits for the model, and the engine's thread never decodes text. A job (a text to be scored) is a
generator; between two steps the thread runs one job up to its next ``yield``, so steps and jobs take turns.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from adaponder.errors import AdaPonderError, in_one_line
from adaponder.inference.engine import Engine
from adaponder.inference.outputs import Event
from adaponder.inference.request import Request
from adaponder.serving.fairness import Places, TextPool, Turns, UnavailableError
from adaponder.serving.served import Served

_log = logging.getLogger("adaponder.serving")
_Result = TypeVar("_Result")
# Maximum number of steps whose events the event loop has not handled yet; beyond it the engine waits.
_STEPS_AHEAD = 4
# Number of jobs of one client that take turns; its other jobs wait until one of these is done.
_JOBS_AT_ONCE = 4
# Number of consecutive failed steps after which the engine is stopped for good.
_MOST_FAILURES = 3


# Called in the event loop's thread with the events of one step, or with the exception that ends the request.
Sink = Callable[[list[Event] | Exception], None]


@dataclass(eq=False)
class Ticket:
    """A submitted request.

    Attributes:
        client: name of the client that sent the request.
        sink: called with the events of the request.
        left: number of samples whose final event the event loop has not handled yet.
        running: number of unfinished samples in the engine; used by the engine's thread only, like ``number``.
        number: the engine's id of the request; ``None`` until it is submitted to the engine.
    """

    client: str
    sink: Sink
    left: int
    running: int
    number: int | None = None


class Worker:
    """Runs an engine in a thread of its own; public methods must be called in the event loop's thread.

    ``make_engine`` is called in the engine's thread and returns an :class:`Engine`, or an object with its methods.

    Attributes:
        state: ``starting``, ``ready``, ``draining``, ``stopped``, or ``broken`` once the engine has failed for good.
        problem: why the engine is broken; ``None`` if it is not.
        completions: counts the unfinished completions of each client, including those that wait for a lane.
        scores: counts the unfinished jobs of each client.
        texts: the threads that tokenise and decode long texts.
        longest_request: maximum tokens of prompt plus completion; until the engine has started, the model's limit.
        counts: the engine's statistics after the last step.
        clients: numbers of (waiting, running) sequences of each client after the last step.
    """

    def __init__(self, make_engine: Callable[[], Any], served: Served):
        self.served = served
        self.state = "starting"
        self.problem: str | None = None
        self.completions, self.scores, self.texts = Places(), Places(), TextPool()
        self.longest_request = served.tokens + 1  # until the engine is open: as far as positions reach
        self.counts: Mapping[str, int] = {}
        self.clients: Mapping[str, tuple[int, int]] = {}
        self._make_engine = make_engine
        # Commands for the engine's thread; the engine is None once it has failed for good.
        self._commands: queue.SimpleQueue[Callable[[Engine | None], None] | None] = queue.SimpleQueue()
        self._tickets: set[Ticket] = set()
        self._room = threading.Semaphore(_STEPS_AHEAD)
        # Used by the engine's thread only: the queue of jobs, and tickets by ``number``.
        self._waiting_jobs: Turns[tuple[Generator[None, None, Any], Future[Any]]] = Turns()
        self._running: dict[int, Ticket] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the thread; must be called once, in the event loop that will get the events."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="adaponder-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Returns whether the thread runs and its engine has not failed for good."""
        return self._thread is not None and self._thread.is_alive() and self.state != "broken"

    @property
    def sequences(self) -> int:
        return self.completions.total

    @property
    def jobs(self) -> int:
        return self.scores.total

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Submits a request and returns its ticket; raises :class:`UnavailableError` if the engine does not run.

        ``sink`` is called with the events of each step. If the request fails, the last call passes the exception.
        """
        self._refuse_if_gone()
        ticket = Ticket(request.client, sink, request.samples, request.samples)
        self._tickets.add(ticket)
        self.completions.take(ticket.client, request.samples)
        self._commands.put(lambda engine: self._begin(engine, ticket, request))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancels a request: its rows are freed before the next step, and its sink is not called again."""
        if ticket in self._tickets:
            ticket.sink = lambda events: None
            self._commands.put(lambda engine: self._end(engine, ticket))

    def finish(self, ticket: Ticket, sample: int) -> None:
        """Cancels a sample whose text is complete; the sink still gets its completion event."""
        self._commands.put(lambda engine: self._end(engine, ticket, sample))

    def job(self, parts: Generator[None, None, _Result], client: str = "") -> asyncio.Future[_Result]:
        """Schedules a generator on the engine's thread and returns a future for its result.

        At each ``yield``, engine steps and other jobs may run; a job whose future is cancelled ends there. Raises
        :class:`UnavailableError` if the engine does not run.
        """
        self._refuse_if_gone()
        done: Future[_Result] = Future()
        self.scores.take(client)
        self._commands.put(lambda _: self._waiting_jobs.put(client, (parts, done)))
        result = asyncio.wrap_future(done)
        result.add_done_callback(lambda _: self.scores.give_back(client))
        return result

    @property
    def _busy(self) -> bool:
        return bool(self._tickets or self.jobs or self.texts.places.total)

    async def drained(self, seconds: float) -> bool:
        """Waits up to ``seconds`` for all requests, jobs and texts to finish; returns whether they have.

        Sets the state to ``draining``, in which the routes refuse new requests.
        """
        if self.state in ("starting", "ready"):
            self.state = "draining"
        deadline = time.monotonic() + seconds
        while (busy := self._busy) and self.state != "stopped" and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return not busy

    async def stop(self) -> None:
        """Fails unfinished requests, jobs and conversions of text, and ends the thread."""
        self.texts.close()
        for ticket in list(self._tickets):
            self._deliver(ticket, UnavailableError("engine: the server is stopping"))
            self._commands.put(lambda engine, ticket=ticket: self._end(engine, ticket))
        self._commands.put(None)
        self._room.release(1000)
        self.state = "stopped"
        deadline = time.monotonic() + 10.0
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    def _refuse_if_gone(self) -> None:
        if self.state in ("broken", "stopped"):
            raise UnavailableError(f"engine: it is not running ({self.problem or self.state})")

    def _take(
        self, step: dict[Ticket, list[Event]], counts: Mapping[str, int], clients: Mapping[str, tuple[int, int]]
    ) -> None:
        """Calls the sinks with one step's events and updates the statistics; runs in the event loop."""
        self._room.release()
        self.counts, self.clients = counts, clients
        for ticket, events in step.items():
            self._deliver(ticket, events)

    def _deliver(self, ticket: Ticket, events: list[Event] | Exception) -> None:
        if ticket not in self._tickets:
            return
        ended = ticket.left if isinstance(events, Exception) else sum(event.completion is not None for event in events)
        ticket.left -= ended
        self.completions.give_back(ticket.client, ended)
        if not ticket.left:
            self._tickets.remove(ticket)
        sink = ticket.sink
        try:
            sink(events)
        except Exception as problem:  # only this request fails
            _log.exception("the events of a request could not be handled")
            self.cancel(ticket)
            with suppress(Exception):
                sink(problem)

    def _set_ready(self, longest_request: int) -> None:
        self.longest_request = longest_request
        if self.state == "starting":
            self.state = "ready"

    def _set_broken(self, problem: str) -> None:
        if self.state != "stopped":
            self.state, self.problem = "broken", problem
        for ticket in list(self._tickets):
            self._deliver(ticket, UnavailableError(f"engine: {problem}"))

    def _run(self) -> None:
        try:
            engine: Engine = self._make_engine()
            self._post(self._set_ready, engine.longest_request)
        except Exception as problem:
            _log.exception("the engine could not be opened")
            self._give_up(f"it could not be opened: {in_one_line(problem)}")
            return
        failures = 0
        while self._run_commands(engine):
            self._run_job_part()
            if not engine.busy:
                continue
            self._room.acquire()
            try:
                self._pass_on(engine.step(), engine)
                failures = 0
            except Exception as problem:
                _log.exception("a step of the engine failed")
                self._room.release()
                failures += 1
                if failures == _MOST_FAILURES:
                    self._give_up(f"{failures} steps in a row failed: {in_one_line(problem)}")
                    return
        self._fail_jobs("the server is stopping")

    def _run_commands(self, engine: Engine) -> bool:
        """Runs queued commands, waiting for one if there is no other work; returns ``False`` if the thread must end."""
        while True:
            try:
                command = self._commands.get(block=not engine.busy and not self._waiting_jobs)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _begin(self, engine: Engine | None, ticket: Ticket, request: Request) -> None:
        try:
            if engine is None:
                raise UnavailableError("engine: it is not running")
            ticket.number = engine.submit(request)
            self._running[ticket.number] = ticket
        except Exception as problem:
            if not isinstance(problem, AdaPonderError):
                _log.exception("the engine failed on a new request")
            self._post(self._deliver, ticket, problem)

    def _end(self, engine: Engine | None, ticket: Ticket, sample: int | None = None) -> None:
        if engine is not None and ticket.number is not None and ticket.running:
            engine.cancel(ticket.number, sample)

    def _pass_on(self, events: Iterable[Event], engine: Engine) -> None:
        """Groups the events of a step by ticket and posts them to the event loop."""
        step: dict[Ticket, list[Event]] = {}
        for event in events:
            if (ticket := self._running.get(event.request)) is None:
                continue
            step.setdefault(ticket, []).append(event)
            if event.completion is not None:
                ticket.running -= 1
                if not ticket.running:
                    del self._running[event.request]
        if step:
            self._post(self._take, step, dict(engine.statistics), engine.clients)
        else:
            self._room.release()

    def _run_job_part(self) -> None:
        if (turn := self._waiting_jobs.take()) is None:
            return
        client, (parts, done) = turn
        if done.cancelled():
            parts.close()
            return
        with suppress(InvalidStateError):  # cancelled meanwhile
            try:
                next(parts)
                self._waiting_jobs.put(client, (parts, done), _JOBS_AT_ONCE - 1)
            except StopIteration as end:
                done.set_result(end.value)
            except Exception as problem:
                done.set_exception(problem)

    def _give_up(self, problem: str) -> None:
        """Marks the engine as broken and fails all present and future requests and jobs until the worker is stopped."""
        self._post(self._set_broken, problem)
        while True:
            self._fail_jobs("it is not running")  # the queued ones first, then those that commands add
            command = self._commands.get()
            if command is None:
                return
            command(None)

    def _fail_jobs(self, reason: str) -> None:
        while turn := self._waiting_jobs.take():
            parts, done = turn[1]
            parts.close()
            with suppress(InvalidStateError):  # cancelled
                done.set_exception(UnavailableError(f"engine: {reason}"))

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedules a call of a function in the event loop's thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)
