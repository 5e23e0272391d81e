"""Runs the completions of one HTTP request, and sends them to the client whole or as server-sent events.

Text is made from the engine's events in the event loop's thread. The bytes that wait for a client are bounded, and a
client that leaves or does not read is disconnected and its completions cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adaponder.inference.outputs import Event
from adaponder.inference.request import Request
from adaponder.serving.metrics import Metrics
from adaponder.serving.protocol import ApiError
from adaponder.serving.settings import Limits
from adaponder.serving.worker import Ticket, Worker
from adaponder.text import Writing, start_writings

# Status of an answer whose client has left; it shows in the metrics only.
CLIENT_LEFT = 499
DONE = b"data: [DONE]\n\n"


class Run:
    """The completions of one HTTP request in the worker.

    Args:
        worker: the worker with the engine.
        requests: one request of the engine for each prompt.
        stops: strings that end a completion.
        on_text: called in the event loop for each completion that a step has extended, with its index among all
            completions of the run, the completion and its new text.

    Attributes:
        samples: the completions of each prompt.
        done: resolves when every completion has ended, or raises what failed.
    """

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[Request],
        *,
        stops: Sequence[str],
        metrics: Metrics,
        on_text: Callable[[int, Writing, str], None] = lambda index, writing, text: None,
    ):
        self.worker, self.metrics, self.on_text = worker, metrics, on_text
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        served = worker.served
        self.samples = [
            start_writings(served.tokenizer, request, stops=stops, eos_ids=served.eos_ids) for request in requests
        ]
        self._began, self._last_token = time.monotonic(), None
        self._tickets: list[Ticket] = []
        first = 0
        for request, writings in zip(requests, self.samples, strict=True):
            self._submit(request, writings, first)
            first += len(writings)

    def _submit(self, request: Request, writings: list[Writing], first: int) -> None:
        def take(events: list[Event] | Exception) -> None:
            if isinstance(events, Exception):
                self._fail(events)
                return
            self._measure(events)
            texts: dict[int, str] = {}
            for event in events:
                new = writings[event.sample].take(event)
                if new is None:
                    continue
                texts[event.sample] = texts.get(event.sample, "") + "".join(piece.text for piece in new.pieces)
                if new.writing.stream.stop is not None and not new.done:
                    self.worker.finish(ticket, event.sample)
            error = next((writings[sample].error for sample in texts if writings[sample].error), None)
            if error is not None:
                self._fail(ApiError(500, error, code="generation_failed"))
                return
            for sample, text in texts.items():
                self.on_text(first + sample, writings[sample], text)
            if all(writing.finish_reason is not None for group in self.samples for writing in group):
                self.done.set_result(None)

        ticket = self.worker.submit(request, take)
        self._tickets.append(ticket)

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
        """Cancels unfinished completions; no further events arrive."""
        for ticket in self._tickets:
            self.worker.cancel(ticket)


class EventStream(Response):
    """Sends server-sent events; those that wait are sent together.

    The status waits for the first event, so a run that fails at once is answered with the status of its error.

    Attributes:
        gave_up: why the client was disconnected: ``left``, ``stalled`` or ``overflow``.
        cancel: called at the end, to free what an unfinished run holds.
    """

    media_type = "text/event-stream"

    def __init__(self, limits: Limits, metrics: Metrics):
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.gave_up: str | None = None
        self.cancel: Callable[[], object] = lambda: None
        self._limits, self._metrics = limits, metrics
        self._waiting, self._ended, self._problem = bytearray(), False, None
        self._changed = asyncio.Event()
        self._sending: asyncio.Timeout | None = None

    def add(self, content: bytes) -> None:
        """Queues bytes for the client."""
        if content and self.gave_up is None:
            self._waiting += content
            if len(self._waiting) > self._limits.buffer_bytes:
                self._give_up("overflow")
            self._changed.set()

    def end(self, problem: ApiError | None = None) -> None:
        """Ends the stream, with the error as its last event if there is one."""
        self._ended, self._problem = True, problem
        self._changed.set()

    def _give_up(self, reason: str) -> None:
        self.gave_up = self.gave_up or reason
        self._changed.set()
        if self._sending is not None and not self._sending.expired():
            self._sending.reschedule(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, over = False, False
        watcher = asyncio.ensure_future(_on_disconnect(receive, lambda: self._give_up("left")))
        try:
            while not over and self.gave_up is None:
                content, over = await self._take()
                if not begun and self._problem is not None and not content:
                    await self._problem.response()(scope, receive, send)
                    return
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                if over and self._problem is not None:
                    content += b"data: " + self._problem.response().body + b"\n\n"
                more = not over or self.gave_up is not None
                await self._send(send, {"type": "http.response.body", "body": content, "more_body": more})
        finally:
            watcher.cancel()
            self.cancel()
            if self.gave_up is not None:
                self._metrics.disconnects.labels(self.gave_up).inc()
                _hang_up(receive)

    async def _take(self) -> tuple[bytes, bool]:
        """Waits for content and returns all of it, and whether nothing follows."""
        while not (self._waiting or self._ended or self.gave_up):
            self._changed.clear()
            await self._changed.wait()
        content, self._waiting = bytes(self._waiting), bytearray()
        return content, self._ended or self.gave_up is not None

    async def _send(self, send: Send, message: Any) -> None:
        """Sends a message; disconnects a client that takes too long to read it."""
        try:
            async with asyncio.timeout(self._limits.stall_seconds) as self._sending:
                await send(message)
        except TimeoutError:
            self.gave_up = self.gave_up or "stalled"
        finally:
            self._sending = None


async def finished_unless_left(
    request: HttpRequest, done: asyncio.Future[Any], cancel: Callable[[], object], metrics: Metrics
) -> bool:
    """Waits for ``done`` and returns true; calls ``cancel`` and returns false if the client leaves first.

    Raises the exception of ``done``.
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
    if not left:
        done.result()
    return not left


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
