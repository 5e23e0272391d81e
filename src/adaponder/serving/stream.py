"""Runs the completions of one HTTP request, and sends them to the client whole or as server-sent events.

Text is made from the engine's events in the event loop's thread. What waits for a client is bounded, and a client that
leaves or does not read is disconnected and its completions cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from json import dumps
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adaponder.errors import AdaPonderError, EvaluationError
from adaponder.inference.outputs import Event
from adaponder.inference.request import Request
from adaponder.serving.metrics import Metrics
from adaponder.serving.protocol import ApiError, refused
from adaponder.serving.settings import Limits
from adaponder.serving.worker import UnavailableError, Worker
from adaponder.text import Writing, Writings

# Status of an answer whose client has left; it shows in the metrics only.
CLIENT_LEFT = 499


class Growth(NamedTuple):
    """What one step has added to a completion: its new text, and the span of tokens whose text is now final."""

    index: int
    writing: Writing
    text: str
    first: int
    last: int
    done: bool


class Run:
    """The completions of one HTTP request in the worker.

    Args:
        worker: the worker with the engine.
        requests: one request of the engine for each prompt.
        stops: strings that end a completion.
        on_growth: called in the event loop with what each step has added to the completions of one prompt.

    Attributes:
        choices: all completions, those of the first prompt first.
        done: resolves when every completion has ended, or raises what failed.
    """

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[Request],
        *,
        stops: Sequence[str],
        metrics: Metrics,
        on_growth: Callable[[list[Growth]], None] | None = None,
    ):
        self.worker, self.metrics, self.on_growth = worker, metrics, on_growth
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.choices: list[Writing] = []
        self._sent: list[int] = []  # tokens of each choice that have been passed on
        self._open = len(requests)
        self._tickets: list[int] = []
        self._began, self._last_token = time.monotonic(), None
        for request in requests:
            first, served = len(self.choices), worker.served
            writings = Writings(served.tokenizer, request, stops=stops, eos_ids=served.eos_ids)
            self.choices += writings.samples
            self._sent += [0] * request.samples
            self._submit(request, writings, first)

    def _submit(self, request: Request, writings: Writings, first: int) -> None:
        finished: set[int] = set()

        def take(events: list[Event] | Exception) -> None:
            if isinstance(events, Exception):
                self._fail(events)
                return
            self._measure(events)
            texts: dict[int, str] = {}
            ended: set[int] = set()
            for event in events:
                text_event = writings.add(event)
                if text_event is None:
                    continue
                new_text = "".join(piece.text for piece in text_event.pieces)
                texts[event.sample] = texts.get(event.sample, "") + new_text
                if text_event.done:
                    ended.add(event.sample)
                elif text_event.writing.stream.stop is not None and event.sample not in finished:
                    finished.add(event.sample)
                    self.worker.finish(ticket, event.sample)
            self._pass_on(writings, first, texts, ended)

        ticket = self.worker.submit(request, take)
        self._tickets.append(ticket)

    def _pass_on(self, writings: Writings, first: int, texts: dict[int, str], ended: set[int]) -> None:
        if writings.over:
            self._open -= 1
        error = next((writings.samples[sample].error for sample in ended if writings.samples[sample].error), None)
        if error is not None:
            self._fail(ApiError(500, error, code="generation_failed"))
            return
        if self.on_growth is not None:
            self.on_growth([self._growth(first + sample, text, sample in ended) for sample, text in texts.items()])
        if not self._open and not self.done.done():
            self.done.set_result(None)

    def _growth(self, index: int, text: str, done: bool) -> Growth:
        writing, first = self.choices[index], self._sent[index]
        final = len(writing.tokens) if done else min(writing.stream.settled, len(writing.tokens))
        self._sent[index] = final
        return Growth(index, writing, text, first, final, done)

    def _measure(self, events: list[Event]) -> None:
        if events[0].token is None:  # a completion's tokens come before its end
            return
        now = time.monotonic()
        if self._last_token is None:
            self.metrics.first_token.observe(now - self._began)
        else:
            self.metrics.between_tokens.observe(now - self._last_token)
        self._last_token = now

    def _fail(self, problem: Exception) -> None:
        self.cancel()
        if not self.done.done():
            self.done.set_exception(problem)

    def cancel(self) -> None:
        """Cancels what is unfinished; no further events are passed on."""
        for ticket in self._tickets:
            self.worker.cancel(ticket)


class Outbox:
    """Bytes on their way to a client; those that wait are sent together.

    Attributes:
        gave_up: ``left``, ``stalled`` or ``overflow`` if the client was given up.
        problem: the error that ended the stream.
        on_give_up: called when the client is given up.
    """

    def __init__(self, most_bytes: int):
        self.gave_up: str | None = None
        self.problem: ApiError | None = None
        self.on_give_up: Callable[[], object] = lambda: None
        self._most, self._waiting, self._ended = most_bytes, bytearray(), False
        self._changed = asyncio.Event()

    def add(self, content: bytes) -> None:
        if content and self.gave_up is None:
            self._waiting += content
            if len(self._waiting) > self._most:
                self.give_up("overflow")
            self._changed.set()

    def end(self, problem: ApiError | None = None) -> None:
        """Ends the stream, with the error as its last event if there is one."""
        self._ended, self.problem = True, problem
        self._changed.set()

    def give_up(self, reason: str) -> None:
        self.gave_up = self.gave_up or reason
        self._changed.set()
        self.on_give_up()

    async def take(self) -> tuple[bytes, bool]:
        """Waits for content and returns all of it, and whether nothing follows."""
        while not (self._waiting or self._ended or self.gave_up):
            self._changed.clear()
            await self._changed.wait()
        content, self._waiting = bytes(self._waiting), bytearray()
        return content, self._ended or self.gave_up is not None


class EventStream(Response):
    """Sends the events of a run. The status waits for the first event, so a run that fails at once has its own status.

    Args:
        run: cancelled when the client is given up.
        outbox: what is sent; filled and ended by the caller.
    """

    media_type = "text/event-stream"

    def __init__(self, run: Run, outbox: Outbox, limits: Limits, metrics: Metrics):
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._run, self._outbox, self._metrics = run, outbox, metrics
        self._stall_seconds = limits.stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox, begun, over = self._outbox, False, False
        watcher = asyncio.ensure_future(_on_disconnect(receive, lambda: outbox.give_up("left")))
        try:
            while not over and outbox.gave_up is None:
                content, over = await outbox.take()
                if not begun and outbox.problem is not None and not content:
                    await outbox.problem.response()(scope, receive, send)
                    return
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                if over and outbox.problem is not None:
                    content += event(outbox.problem.body(), compact=True)
                more = not over or outbox.gave_up is not None
                await self._send(send, {"type": "http.response.body", "body": content, "more_body": more})
        finally:
            watcher.cancel()
            if outbox.gave_up is not None or not self._run.done.done():
                self._run.cancel()
            if outbox.gave_up is not None:
                self._metrics.disconnects.labels(outbox.gave_up).inc()
                _hang_up(receive)

    async def _send(self, send: Send, message: Any) -> None:
        """Sends a message; gives the client up if that takes too long, and stops waiting once it is given up."""
        outbox = self._outbox
        try:
            async with asyncio.timeout(self._stall_seconds) as limit:
                outbox.on_give_up = lambda: limit.expired() or limit.reschedule(0)
                await send(message)
        except TimeoutError:
            outbox.gave_up = outbox.gave_up or "stalled"
        finally:
            outbox.on_give_up = lambda: None


async def finished_unless_left(
    request: HttpRequest, done: asyncio.Future[Any], cancel: Callable[[], object], metrics: Metrics
) -> bool:
    """Waits for ``done`` and returns true; calls ``cancel`` and returns false if the client leaves first.

    Raises the exception of ``done`` as an :class:`ApiError`.
    """
    gone: asyncio.Future[None] = asyncio.ensure_future(_on_disconnect(request.receive, lambda: None))
    try:
        await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        left = not done.done()
        if left:
            cancel()
            metrics.disconnects.labels("left").inc()
    if left:
        return False
    try:
        done.result()
    except Exception as problem:
        raise as_api_error(problem) from problem
    return True


async def _on_disconnect(receive: Receive, then: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


def _hang_up(receive: Receive) -> None:
    """Aborts the connection: uvicorn 0.54 would close it only once a client that does not read has read its buffer."""
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    if transport is not None:
        with suppress(Exception):  # it may be closed already
            transport.abort()


def event(content: dict[str, Any], *, compact: bool = False) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + dumps(content, separators=(",", ":") if compact else None).encode() + b"\n\n"


def as_api_error(problem: BaseException) -> ApiError:
    """Returns the error that is sent for a completion or a score that failed in this way."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, UnavailableError):
        return ApiError(503, str(problem), code="unavailable")
    if isinstance(problem, EvaluationError):
        return ApiError(500, str(problem), code="generation_failed")
    if isinstance(problem, AdaPonderError):
        return refused(problem)
    return ApiError(500, "the server failed to answer; see its log", code="internal")
