"""Server-sent events to one client: what waits for it is bounded, and one that leaves or does not read is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from adaponder.serving.errors import ApiError
from adaponder.serving.metrics import Metrics
from adaponder.serving.settings import Limits
from adaponder.serving.texts import Run, as_api_error

DONE = b"data: [DONE]\n\n"
# Status of an answer that nobody waits for; seen in the figures alone.
CLIENT_LEFT = 499


class Outbox:
    """Bytes on their way to a client; those that wait are sent together.

    Attributes:
        why: ``left``, ``stalled`` or ``overflow`` where the client got no end; ``None`` otherwise.
        on_give_up: called when there is such a reason.
    """

    def __init__(self, most: int):
        self.why: str | None = None
        self.problem: ApiError | None = None
        self.on_give_up: Callable[[], None] = lambda: None
        self._most, self._parts, self._size, self._ended = most, [], 0, False
        self._something = asyncio.Event()

    def add(self, part: bytes) -> None:
        if part and self.why is None:
            self._parts.append(part)
            self._size += len(part)
            if self._size > self._most:
                self.give_up("overflow")
            self._something.set()

    def end(self, problem: ApiError | None = None) -> None:
        """Nothing follows; with a problem, its text is the last event."""
        self._ended, self.problem = True, problem
        self._something.set()

    def give_up(self, why: str) -> None:
        self.why = self.why or why
        self._something.set()
        self.on_give_up()

    async def take(self) -> tuple[bytes, bool]:
        """All that waits, and whether nothing follows; waits for something."""
        while not (self._parts or self._ended or self.why):
            self._something.clear()
            await self._something.wait()
        together = b"".join(self._parts)
        self._parts, self._size = [], 0
        return together, self._ended or self.why is not None


class EventStream(Response):
    """The events of a run. Its status waits for the first of them, so a run that fails at once gets an error's status.

    Args:
        run: is cancelled when the client goes.
        outbox: what is sent; whoever made the run fills and ends it.
    """

    media_type = "text/event-stream"

    def __init__(self, run: Run, outbox: Outbox, limits: Limits, metrics: Metrics):
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._run, self._outbox, self._limits, self._metrics = run, outbox, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = self._outbox
        watcher = asyncio.ensure_future(_left(receive, lambda: outbox.give_up("left")))
        stalls = _Stalls(self._limits.stall_seconds, outbox)
        begun = False
        try:
            over = False
            while not over and outbox.why is None:
                part, over = await outbox.take()
                if not begun and outbox.problem is not None and not part:
                    await error_response(outbox.problem)(scope, receive, send)
                    return
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                if over and outbox.problem is not None:
                    part += _error_event(outbox.problem)
                stalls.since = stalls.loop.time()
                await send({"type": "http.response.body", "body": part, "more_body": not (over and outbox.why is None)})
                stalls.since = None
        except asyncio.CancelledError:
            if not stalls.ended:
                raise
            stalls.task.uncancel()
        finally:
            watcher.cancel()
            stalls.stop()
            if outbox.why is not None or not self._run.done.done():
                self._run.cancel()
            if outbox.why is not None:
                self._metrics.disconnects.labels(outbox.why).inc()
                hang_up(receive)


class _Stalls:
    """Looks now and then whether the current task waits for a client too long, and ends it: one timer for a stream.

    Attributes:
        since: when the task began to send; ``None`` while it does not.
        ended: whether the task was ended from here.
    """

    def __init__(self, seconds: float, outbox: Outbox):
        task = asyncio.current_task()
        assert task is not None
        self.task, self.loop = task, asyncio.get_running_loop()
        self.since: float | None = None
        self.ended = False
        outbox.on_give_up = self.end
        self._seconds, self._outbox = seconds, outbox
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        waited = 0.0 if self.since is None else self.loop.time() - self.since
        if waited < self._seconds:
            self._timer = self.loop.call_later(max(0.01, self._seconds - waited), self._look)
            return
        self._outbox.give_up("stalled")

    def end(self) -> None:
        """The client is given up: a task that waits for it waits no more."""
        if self.since is not None and not self.ended:
            self.ended = True
            self.task.cancel()

    def stop(self) -> None:
        self._timer.cancel()


async def _left(receive: Receive, then: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


async def unless_left(
    request: HttpRequest, done: asyncio.Future[Any], cancel: Callable[[], object], metrics: Metrics
) -> bool:
    """Waits for an answer that is not streamed; false, and ``cancel`` called, if its client leaves first.

    Raises what ``done`` ends with.
    """
    gone: asyncio.Future[None] = asyncio.ensure_future(_left(request.receive, lambda: None))
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


def hang_up(receive: Receive) -> None:
    """Drops the connection without waiting for a client that does not read; where the server lets us."""
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    if transport is not None:
        with suppress(Exception):  # it may be gone already
            transport.abort()


def error_response(problem: ApiError) -> JSONResponse:
    return JSONResponse(problem.body(), status_code=problem.status, headers=problem.headers)


def _error_event(problem: ApiError) -> bytes:
    return b"data: " + bytes(JSONResponse(problem.body()).body) + b"\n\n"
