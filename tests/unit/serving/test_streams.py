"""What waits for a client is joined and bounded; one that reads nothing is cut off and its run cancelled."""

from __future__ import annotations

import asyncio

import pytest

from adaponder.serving.errors import ApiError
from adaponder.serving.settings import Limits
from adaponder.serving.streams import EventStream, Outbox


class Run:
    """A run that is never done; knows whether it was cancelled."""

    def __init__(self):
        self.done = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def cancel(self):
        self.cancelled = True


class Figures:
    def __init__(self):
        self.why = []

    @property
    def disconnects(self):
        return self

    def labels(self, why):
        self.why.append(why)
        return self

    def inc(self):
        pass


class Client:
    """The server's side of a connection: what was sent, a client that may leave or stop reading."""

    def __init__(self, *, reads: int = 10**9):
        self.sent, self.reads, self.left = [], reads, asyncio.Event()
        self.transport, self.aborted = self, False

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if len(self.sent) > self.reads:
            await asyncio.Event().wait()

    def abort(self):
        self.aborted = True

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def streamed(act, *, limits=None, **client):
    """Streams while ``act(outbox, client)`` goes on; returns the run, the client and the figures."""

    async def main():
        bounds = limits or Limits(stall_seconds=0.05)
        outbox, run, figures, other = Outbox(bounds.buffer_bytes), Run(), Figures(), Client(**client)
        stream = EventStream(run, outbox, bounds, figures)
        task = asyncio.ensure_future(stream({"type": "http", "method": "POST"}, other.receive, other.send))
        await act(outbox, other)
        await asyncio.wait_for(task, 5)
        return run, other, figures

    return asyncio.run(main())


def test_what_waits_is_sent_together():
    async def act(outbox, client):
        for part in (b"a", b"b", b"c"):
            outbox.add(part)
        await asyncio.sleep(0.01)
        outbox.add(b"d")
        outbox.end()

    _, client, figures = streamed(act)
    assert [message.get("body") for message in client.sent] == [None, b"abc", b"d"]
    assert client.sent[0]["status"] == 200
    assert [message.get("more_body") for message in client.sent[1:]] == [True, False]
    assert not figures.why


def test_one_that_reads_nothing_is_cut_off():
    async def act(outbox, client):
        outbox.add(b"a")
        await asyncio.sleep(0.02)
        outbox.add(b"b")

    run, client, figures = streamed(act, reads=2)
    assert figures.why == ["stalled"]
    assert run.cancelled
    assert client.aborted


def test_one_that_lets_too_much_wait_is_cut_off():
    async def act(outbox, client):
        outbox.add(b"a")
        await asyncio.sleep(0.01)
        for _ in range(20):
            outbox.add(b"x" * 100)

    run, client, figures = streamed(act, limits=Limits(stall_seconds=1, buffer_bytes=1000), reads=1)
    assert figures.why == ["overflow"]
    assert run.cancelled
    assert client.aborted


@pytest.mark.parametrize("begun", [True, False])
def test_one_that_leaves_is_noticed_before_and_after_the_first_text(begun):
    async def act(outbox, client):
        if begun:
            outbox.add(b"a")
        await asyncio.sleep(0.01)
        client.left.set()

    run, _, figures = streamed(act)
    assert figures.why == ["left"]
    assert run.cancelled


def test_a_failure_before_any_text_has_its_status_and_one_after_it_is_an_event():
    async def at_once(outbox, client):
        outbox.end(ApiError(400, "rows: too few", headers={"retry-after": "1"}))

    _, client, _ = streamed(at_once)
    assert client.sent[0]["status"] == 400
    assert b"rows: too few" in client.body

    async def later(outbox, client):
        outbox.add(b"data: 1\n\n")
        await asyncio.sleep(0.01)
        outbox.end(ApiError(500, "broken"))

    _, client, _ = streamed(later)
    assert client.sent[0]["status"] == 200
    assert client.body.startswith(b'data: 1\n\ndata: {"error":{"message":"broken"')
