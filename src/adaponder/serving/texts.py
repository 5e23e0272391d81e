"""A request on its way: engine events become text in the event loop's thread, beside the model and not in its way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaponder.errors import AdaPonderError, EvaluationError
from adaponder.inference.outputs import Event
from adaponder.inference.request import Request
from adaponder.serving.errors import ApiError, refused
from adaponder.serving.metrics import Metrics
from adaponder.serving.settings import Limits
from adaponder.serving.worker import UnavailableError, Worker
from adaponder.text import Writing, Writings


@dataclass
class Choice:
    """One completion: its number in the answer, its text, and how much of it has been passed on.

    Attributes:
        sent: tokens that have been passed on, each with all its text.
    """

    index: int
    writing: Writing
    sent: int = 0


class Grown:
    """What one step has added to a choice: text, tokens whose text is whole, and whether it has ended."""

    __slots__ = ("choice", "done", "first", "last", "text")

    def __init__(self, choice: Choice, text: str, first: int, last: int, done: bool):
        self.choice, self.text, self.first, self.last, self.done = choice, text, first, last, done


def admit(worker: Worker, limits: Limits, lanes: int, sequences: int) -> None:
    """Raises 503 while the server starts or ends, and 429 where so many more sequences would have to wait too long."""
    refuse_unready(worker, limits)
    if worker.sequences + sequences > lanes + limits.waiting:
        raise ApiError(
            429,
            f"{worker.sequences} completions are under way or waiting, which is as many as the server takes; try again",
            code="queue_full",
            headers={"retry-after": str(limits.retry_seconds)},
        )


def refuse_unready(worker: Worker, limits: Limits) -> None:
    """Raises 503 unless the engine takes requests."""
    if worker.state != "ready":
        raise ApiError(
            503,
            f"the server is {worker.state}; try again",
            code=worker.state,
            headers={"retry-after": str(limits.retry_seconds)},
        )


class Run:
    """One HTTP request's prompts in the worker, each a request of the engine.

    Args:
        worker: has the engine.
        requests: one for each prompt.
        stops: strings that end a completion.
        on_growth: called with what each step has added, of one request of the engine at a time; in the event loop.
    """

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[Request],
        *,
        stops: Sequence[str],
        metrics: Metrics,
        on_growth: Callable[[list[Grown]], None] | None = None,
    ):
        self.worker, self.metrics, self.on_growth = worker, metrics, on_growth
        self.began = time.monotonic()
        self.first_token: float | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.choices: list[Choice] = []
        self._open = len(requests)
        self._tickets: list[int] = []
        self._finished: set[tuple[int, int]] = set()
        self._last: float | None = None
        served = worker.served
        for request in requests:
            writings = Writings(served.tokenizer, request, stops=stops, eos_ids=served.eos_ids)
            own = [Choice(len(self.choices) + sample, one) for sample, one in enumerate(writings.samples)]
            self.choices += own
            self._submit(request, writings, own)

    def _submit(self, request: Request, writings: Writings, own: list[Choice]) -> None:
        def sink(events: list[Event] | Exception) -> None:
            if isinstance(events, Exception):
                self._fail(events)
            else:
                self._take(ticket, writings, own, events)

        ticket = self.worker.submit(request, sink)
        self._tickets.append(ticket)

    def _take(self, ticket: int, writings: Writings, own: list[Choice], events: list[Event]) -> None:
        self._time(events)
        texts: dict[int, list[str]] = {}
        ended: set[int] = set()
        for event in events:
            told = writings.add(event)
            if told is None:
                continue
            texts.setdefault(event.sample, []).extend(piece.text for piece in told.pieces)
            if told.done:
                ended.add(event.sample)
            elif told.writing.stream.stop is not None and (ticket, event.sample) not in self._finished:
                self._finished.add((ticket, event.sample))
                self.worker.finish(ticket, event.sample)
        if writings.over:
            self._open -= 1
        problem = next((own[sample].writing.error for sample in ended if own[sample].writing.error), None)
        if problem is not None:
            self._fail(ApiError(500, problem, code="generation_failed"))
            return
        if self.on_growth is not None:
            grown = [_grown(own[sample], "".join(parts), sample in ended) for sample, parts in texts.items()]
            self.on_growth(grown)
        if not self._open and not self.done.done():
            self.done.set_result(None)

    def _time(self, events: list[Event]) -> None:
        if events[0].token is None:  # tokens come before their end
            return
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = now
            self.metrics.first_token.observe(now - self.began)
        elif self._last is not None:
            self.metrics.between_tokens.observe(now - self._last)
        self._last = now

    def _fail(self, problem: Exception) -> None:
        self.cancel()
        if not self.done.done():
            self.done.set_exception(problem)

    def cancel(self) -> None:
        """Ends what is not finished; nothing more is told."""
        for ticket in self._tickets:
            self.worker.cancel(ticket)


def _grown(choice: Choice, text: str, done: bool) -> Grown:
    writing = choice.writing
    settled = len(writing.tokens) if done else min(writing.stream.settled, len(writing.tokens))
    first, choice.sent = choice.sent, settled
    return Grown(choice, text, first, settled, done)


def as_api_error(problem: BaseException) -> ApiError:
    """What a request is answered whose completion failed in this way."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, UnavailableError):
        return ApiError(503, str(problem), code="unavailable")
    if isinstance(problem, EvaluationError):
        return ApiError(500, str(problem), code="generation_failed")
    if isinstance(problem, AdaPonderError):
        return refused(problem)
    return ApiError(500, "the server failed to make this answer; its log says why", code="internal")
