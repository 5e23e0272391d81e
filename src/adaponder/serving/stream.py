"""Runs the completions of one HTTP request, decodes their text in the event loop's thread, and streams the response.

The bytes that wait for a client are bounded, and a request whose client disconnects is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adaponder.errors import EvaluationError
from adaponder.inference.outputs import Event
from adaponder.inference.request import Request
from adaponder.serving.metrics import Metrics
from adaponder.serving.protocol import ApiError, as_api_error
from adaponder.serving.settings import Limits
from adaponder.serving.worker import Ticket, Worker
from adaponder.text import Writing, start_writings

EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"


class Run:
    """Submits the engine requests of one HTTP request and collects their completions; callbacks run in the event loop.

    Args:
        requests: one engine request for each prompt.
        on_text: called as ``on_text(index, writing, text)`` after each step for every completion that has new tokens
            or has ended; ``index`` is the completion's number among those of all prompts.
        on_end: called once: with ``None`` when every completion has ended, or with the first exception.

    Attributes:
        samples: the completions of each prompt.
    """

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[Request],
        *,
        stops: Sequence[str],
        metrics: Metrics,
        on_text: Callable[[int, Writing, str], None],
        on_end: Callable[[Exception | None], None],
    ):
        self.worker, self.metrics, self._on_text, self._on_end = worker, metrics, on_text, on_end
        served = worker.served
        options = {"stops": stops, "eos_ids": served.eos_ids}
        self.samples = [start_writings(served.tokenizer, request, **options) for request in requests]
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
                if (new := writings[event.sample].take(event)) is None:
                    continue
                texts[event.sample] = texts.get(event.sample, "") + "".join(piece.text for piece in new.pieces)
                if new.writing.stream.stop is not None and not new.done:
                    self.worker.finish(ticket, event.sample)
            if error := next((writings[sample].error for sample in texts if writings[sample].error), None):
                self._fail(EvaluationError(error))
                return
            for sample, text in texts.items():
                self._on_text(first + sample, writings[sample], text)
            if all(writing.finish_reason is not None for group in self.samples for writing in group):
                self._on_end(None)

        ticket = self.worker.submit(request, take)
        self._tickets.append(ticket)

    def _measure(self, events: list[Event]) -> None:
        if events[0].token is None:  # only final events, which follow the tokens of a step
            return
        now = time.monotonic()
        if self._last_token is None:
            self.metrics.first_token.observe(now - self._began)
        else:
            self.metrics.between_tokens.observe(now - self._last_token)
        self._last_token = now

    def _fail(self, problem: Exception) -> None:
        self.cancel()
        self._on_end(problem)

    def cancel(self) -> None:
        """Cancels unfinished completions; no further events arrive."""
        for ticket in self._tickets:
            self.worker.cancel(ticket)


class Answer(Response):
    """A response that is sent while it is generated; content queued while a chunk is sent becomes the next chunk.

    The status is sent with the first content, so a request that fails earlier has the status of its error.

    Attributes:
        cancel: called when the response ends, to cancel unfinished work.
    """

    def __init__(self, limits: Limits, metrics: Metrics, media_type: str = "application/json"):
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        if media_type == EVENTS:
            self.headers["x-accel-buffering"] = "no"
        self.cancel: Callable[[], object] = lambda: None
        self._limits, self._metrics = limits, metrics
        self._waiting, self._left, self._ended = bytearray(), False, False
        self._problem: ApiError | None = None
        self._changed = asyncio.Event()

    def add(self, content: bytes) -> None:
        """Queues content for the client; ends the stream if the client leaves more than ``buffer_bytes`` unread."""
        if not content or self._ended:
            return
        self._waiting += content
        self._changed.set()
        if self.media_type == EVENTS and len(self._waiting) > self._limits.buffer_bytes:
            self._metrics.disconnects.labels("overflow").inc()
            self._waiting.clear()
            self.end(ApiError(408, "the stream was cut, as its client reads too slowly; read it faster"))
            self.cancel()

    def end(self, problem: BaseException | None = None) -> None:
        """Ends the response.

        An error sets the response's status or, if part of the stream was already sent, is its last event.
        """
        if not self._ended:
            self._ended, self._problem = True, None if problem is None else as_api_error(problem)
            self._changed.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, over = False, False
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            while not over:
                await self._changed.wait()
                self._changed.clear()
                if self._left:
                    self._metrics.disconnects.labels("left").inc()
                    return
                content, self._waiting, over = bytes(self._waiting), bytearray(), self._ended
                if self._problem is not None and not begun:
                    await self._problem.response()(scope, receive, send)
                    return
                if self._problem is not None:
                    content += b"data: " + self._problem.response().body + b"\n\n"
                if not begun:
                    if over:
                        self.headers["content-length"] = str(len(content))
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                await send({"type": "http.response.body", "body": content, "more_body": not over})
        finally:
            watcher.cancel()
            self.cancel()

    async def _watch(self, receive: Receive) -> None:
        """Waits until the client disconnects, and sets ``_left``."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._changed.set()
