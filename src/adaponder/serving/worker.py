"""One thread owns engine and model: requests go in by a queue, and each step's events come out in one call.

The event loop never waits for the model, and the model's thread never makes text. Between two steps the thread runs at
most one part of one job (a text to be scored), so neither starves the other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from adaponder.errors import AdaPonderError, EvaluationError, in_one_line
from adaponder.inference.outputs import Event
from adaponder.inference.request import Request
from adaponder.serving.served import Served

_log = logging.getLogger("adaponder.serving")
_Result = TypeVar("_Result")
# Steps whose events the event loop has not taken yet: then the model waits for it.
_STEPS_AHEAD = 4
# Jobs that take turns; the others wait until one of them is done.
_JOBS_AT_ONCE = 4
# Steps in a row that may break off before the engine is given up.
_MOST_BROKEN = 3


class Steps(Protocol):
    """What a worker uses of an engine."""

    @property
    def busy(self) -> bool: ...

    @property
    def longest_request(self) -> int: ...

    @property
    def statistics(self) -> Mapping[str, int]: ...

    def submit(self, request: Request) -> int: ...

    def cancel(self, number: int, sample: int | None = None) -> None: ...

    def step(self) -> Iterable[Event]: ...


class UnavailableError(EvaluationError):
    """There is no engine to do it, or not for long enough."""


# Called in the event loop's thread with what one step says of a request, or with why there will be nothing more.
Sink = Callable[[list[Event] | Exception], None]


@dataclass
class _Ticket:
    """A request as the event loop knows it."""

    number: int
    request: Request
    sink: Sink
    left: int


@dataclass
class _Job:
    """Something to be done between two steps, part by part."""

    parts: Generator[None, None, Any]
    done: asyncio.Future[Any]
    cancelled: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Runs an engine in a thread of its own.

    All methods but those with a leading underscore that say otherwise belong to the event loop's thread.

    Args:
        engine: the engine, or a function that makes it, which is called in the worker's thread.
        served: the model and its words.

    Attributes:
        state: ``starting``, ``ready``, ``draining``, ``stopped``, or ``broken`` once the engine has failed for good.
        sequences: completions that are under way, those that wait for a lane included.
        jobs: jobs that wait or run.
        longest_request: tokens of a prompt and its completion together, at most; what the engine says once it is open.
    """

    def __init__(self, engine: Steps | Callable[[], Steps], served: Served):
        self.served = served
        self.state = "starting"
        self.problem: str | None = None
        self.sequences = self.jobs = 0
        self.longest_request = served.tokens + 1  # as far as positions reach
        self.counts: Mapping[str, int] = {}
        self._make: Callable[[], Steps] = engine if callable(engine) else lambda: engine
        self._commands: queue.SimpleQueue[Callable[[Steps], None] | None] = queue.SimpleQueue()
        self._waiting_jobs: deque[_Job] = deque()
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)
        self._room = threading.Semaphore(_STEPS_AHEAD)
        self._idle = asyncio.Event()
        self._idle.set()
        # Of the worker's thread alone: the engine's number of each ticket, and by it the ticket and its samples left.
        self._numbers_of: dict[int, int] = {}
        self._running: dict[int, list[int]] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- the event loop's side ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins; to be called in the event loop that will be told everything."""
        if self._thread is not None:
            raise RuntimeError("a worker is started once")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="adaponder-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and its engine has not failed for good."""
        return self._thread is not None and self._thread.is_alive() and self.state != "broken"

    def submit(self, request: Request, sink: Sink) -> int:
        """Gives a request to the engine; ``sink`` gets its events, or one exception and then nothing more."""
        if self.state in ("broken", "stopped"):
            raise UnavailableError(f"engine: it is not running ({self.problem or self.state})")
        number = next(self._numbers)
        self._tickets[number] = _Ticket(number, request, sink, request.samples)
        self.sequences += request.samples
        self._idle.clear()
        self._commands.put(lambda engine: self._begin(engine, number, request))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request: what it holds is freed at the next step, and its sink is told no more."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.sink = _ignore
            self._commands.put(lambda engine: self._end(engine, number))

    def finish(self, number: int, sample: int) -> None:
        """Ends a sample whose text is complete; its sink is told the end."""
        self._commands.put(lambda engine: self._end(engine, number, sample))

    def job(self, parts: Generator[None, None, _Result]) -> asyncio.Future[_Result]:
        """What a generator will return that the model's thread runs; others go first where it yields.

        Once the future is cancelled, the part that runs is its last.
        """
        if self.state in ("broken", "stopped"):
            raise UnavailableError(f"engine: it is not running ({self.problem or self.state})")
        job = _Job(parts, asyncio.get_running_loop().create_future())
        job.done.add_done_callback(lambda _: self._end_job(job))
        self.jobs += 1
        self._idle.clear()
        self._commands.put(lambda _: self._waiting_jobs.append(job))
        return job.done

    def _end_job(self, job: _Job) -> None:
        job.cancelled.set()
        self.jobs -= 1
        self._note_idle()

    async def drained(self, seconds: float) -> bool:
        """Waits until nothing is under way, so long at most; whether that is so."""
        if self.state in ("starting", "ready"):
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ends what is under way and the thread."""
        for number in list(self._tickets):
            self._tell(number, UnavailableError("engine: the server is stopping"))
            self._commands.put(lambda engine, number=number: self._end(engine, number))
        self._commands.put(None)
        self._room.release(1000)
        self.state = "stopped"
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, 10.0)

    def _note_idle(self) -> None:
        if not self._tickets and not self.jobs:
            self._idle.set()

    def _take(self, told: dict[int, list[Event]], counts: Mapping[str, int]) -> None:
        """One step's events arrive."""
        self._room.release()
        self.counts = counts
        for number, events in told.items():
            self._tell(number, events)

    def _tell(self, number: int, events: list[Event] | Exception) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            return
        ended = ticket.left
        if not isinstance(events, Exception):
            ended = sum(event.completion is not None for event in events)
        ticket.left -= ended
        self.sequences -= ended
        if not ticket.left:
            del self._tickets[number]
            self._note_idle()
        try:
            ticket.sink(events)
        except Exception as problem:  # it is this request's fault and no other's
            _log.exception("a request's events could not be passed on")
            sink = ticket.sink
            self.cancel(number)
            try:
                sink(problem)
            except Exception:  # its client is gone or broken; the others must go on
                _log.exception("a request could not be told of its failure")

    def _set_ready(self, longest_request: int) -> None:
        self.longest_request = longest_request
        self._set_state("ready")

    def _set_state(self, state: str, problem: str | None = None) -> None:
        if self.state != "stopped" and not (state == "ready" and self.state != "starting"):
            self.state, self.problem = state, problem
        if state == "broken":
            for number in list(self._tickets):
                self._tell(number, UnavailableError(f"engine: {problem}"))

    # --- the worker's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._make()
            self._post(self._set_ready, engine.longest_request)
        except Exception as problem:
            _log.exception("the engine could not be opened")
            self._post(self._set_state, "broken", f"it could not be opened: {in_one_line(problem)}")
            self._refuse_all()
            return
        broken = 0
        while self._obey(engine):
            self._do_a_part()
            if not engine.busy:
                continue
            self._room.acquire()
            try:
                self._pass_on(engine.step(), engine)
                broken = 0
            except Exception as problem:
                _log.exception("a step of the engine was broken off")
                self._room.release()
                broken += 1
                if broken == _MOST_BROKEN:
                    self._post(self._set_state, "broken", f"step after step breaks off: {in_one_line(problem)}")
                    self._refuse_all()
                    return
        self._refuse_jobs("the server is stopping")

    def _obey(self, engine: Steps) -> bool:
        """Does what the queue says, waiting for something to do; false at the end."""
        while True:
            try:
                command = self._commands.get(block=not engine.busy and not self._waiting_jobs)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _begin(self, engine: Steps, ticket: int, request: Request) -> None:
        try:
            number = engine.submit(request)
        except Exception as problem:
            if not isinstance(problem, AdaPonderError):
                _log.exception("the engine failed to take a request in")
            self._post(self._tell, ticket, problem)
            return
        self._numbers_of[ticket] = number
        self._running[number] = [ticket, request.samples]

    def _end(self, engine: Steps, ticket: int, sample: int | None = None) -> None:
        number = self._numbers_of.get(ticket)
        if number is not None:
            engine.cancel(number, sample)

    def _pass_on(self, events: Iterable[Event], engine: Steps) -> None:
        told: dict[int, list[Event]] = {}
        for event in events:
            running = self._running.get(event.request)
            if running is None:
                continue
            ticket = running[0]
            told.setdefault(ticket, []).append(event)
            if event.completion is not None:
                running[1] -= 1
                if not running[1]:
                    del self._running[event.request], self._numbers_of[ticket]
        if told:
            self._post(self._take, told, dict(engine.statistics))
        else:
            self._room.release()

    def _do_a_part(self) -> None:
        if not self._waiting_jobs:
            return
        job = self._waiting_jobs.popleft()
        if job.cancelled.is_set():
            job.parts.close()
            return
        try:
            next(job.parts)
        except StopIteration as end:
            self._post(_finish, job.done, end.value)
        except Exception as problem:
            self._post(_fail, job.done, problem)
        else:
            self._waiting_jobs.insert(_JOBS_AT_ONCE - 1, job)

    def _refuse_all(self) -> None:
        """Nobody is left waiting for a thread that is gone."""
        while True:
            self._refuse_jobs("it is not running")  # first of all those that waited for the engine that is gone
            command = self._commands.get()
            if command is None:
                return
            command(_Gone())

    def _refuse_jobs(self, why: str) -> None:
        while self._waiting_jobs:
            job = self._waiting_jobs.popleft()
            job.parts.close()
            self._post(_fail, job.done, UnavailableError(f"engine: {why}"))

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the event loop's thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(function, *arguments)


class _Gone:
    """Stands for an engine that failed: takes nothing in."""

    busy = False
    longest_request = 0

    @property
    def statistics(self) -> Mapping[str, int]:
        return {}

    def submit(self, request: Request) -> int:
        raise UnavailableError("engine: it is not running")

    def cancel(self, number: int, sample: int | None = None) -> None:
        """There is nothing left to cancel."""

    def step(self) -> Iterable[Event]:
        return ()


def _ignore(events: list[Event] | Exception) -> None:
    """The sink of a request that nobody waits for."""


def _finish(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)
