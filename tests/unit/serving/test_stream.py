"""A client that reads slowly, leaves or fails is disconnected and affects no other; what it held is freed."""

import asyncio
import socket
import threading
import time

import pytest
import torch

from adaponder import Engine
from adaponder.serving.answers import ScoreWriter
from adaponder.serving.protocol import ApiError
from adaponder.serving.settings import Access, Limits, Settings
from adaponder.serving.stream import EVENTS, Answer
from serving_support import connect, request_bytes, serving, tiny_served
from support import tiny

BODY = {"model": "tiny", "prompt": "ab", "max_tokens": 40}


def check_idle(server) -> None:
    """Waits until nothing runs, and checks that no page is held."""
    counts = server.settled()
    assert counts["resident"] == counts["waiting"] == counts["pages_held"] == 0


@pytest.fixture(scope="module")
def server():
    limits = Limits(waiting=64, stall_seconds=0.3, drain_seconds=5)
    with serving(settings=Settings(lanes=4, limits=limits), share_prefixes=False) as running:
        yield running


def test_disconnecting_cancels_scoring(server, monkeypatch):
    begun = threading.Event()

    def endless(self, *text, **options):
        while True:
            begun.set()
            yield

    monkeypatch.setattr(ScoreWriter, "__call__", endless)
    connection = connect(server)
    connection.sendall(request_bytes({"prompt": "ab"}, "/score"))
    assert begun.wait(5)
    connection.close()
    server.settled()


def test_pipelined_requests_end_with_their_connection(server):
    connection = connect(server)
    connection.sendall(b"".join(request_bytes(BODY | {"stream": True, "n": 4}) for _ in range(3)))
    connection.recv(100)
    connection.close()
    check_idle(server)
    assert 'adaponder_disconnects_total{why="left"} ' in server.get("/metrics").text


class Stuck(Engine):
    """An engine that accepts requests and generates nothing until ``held`` is false."""

    held = True

    def step(self):
        return time.sleep(0.001) or [] if self.held else super().step()


def test_429_when_lanes_and_queue_are_full():
    """A client alone must leave a place for another; that one takes it, and a third finds the queue full."""
    stuck = Stuck(tiny(), lanes=1)
    settings = Settings(lanes=1, limits=Limits(waiting=2, retry_seconds=3), access=Access(proxies=("127.0.0.1",)))
    with serving(settings=settings, engine=lambda: stuck) as server:

        def send(client: str, sequences: int) -> socket.socket:
            connection = connect(server)
            connection.sendall(request_bytes(BODY | {"max_tokens": 3}, client=client))
            while server.worker.sequences < sequences:
                time.sleep(0.001)
            return connection

        def refuse(client: str) -> None:
            response = server.post("/v1/completions", BODY, headers={"x-forwarded-for": client})
            assert (response.status_code, response.headers["retry-after"]) == (429, "3")

        accepted = [send("1.1.1.1", 1), send("1.1.1.1", 2)]
        refuse("1.1.1.1")
        accepted.append(send("2.2.2.2", 3))
        refuse("3.3.3.3")
        assert server.get("/ready").json()["requests"] == 3
        accepted.pop().close()
        stuck.held = False
        for connection in accepted:
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.close()
        assert server.post("/v1/completions", BODY).status_code == 200


def test_nan_logits_fail_their_request_only():
    """The logits are NaN for every request that reads token 9."""
    model = tiny("ouro")
    with torch.no_grad():
        model.get_input_embeddings().weight[9].fill_(float("nan"))
    body = BODY | {"max_tokens": 8, "seed": 1, "logit_bias": {"9": -100}}
    with serving(tiny_served(model), Settings(lanes=4), share_prefixes=False) as server:
        good = server.post("/v1/completions", body).json()
        for stream in (False, True):
            bad = server.post("/v1/completions", BODY | {"prompt": [9, 9], "stream": stream})
            assert bad.status_code == 500
            assert bad.json()["error"]["type"] == "server_error"
            assert "NaN" in bad.json()["error"]["message"]
        assert server.post("/score", {"prompt": [9, 1, 2]}).status_code == 500
        assert server.post("/v1/completions", body).json()["choices"] == good["choices"]
        assert server.get("/ready").status_code == 200
        check_idle(server)


def test_503_without_an_engine():
    def fails():
        raise RuntimeError("no device")

    with serving(engine=fails) as server:
        assert server.post("/v1/completions", BODY).status_code == 503
        assert server.post("/score", {"prompt": "ab"}).status_code == 503
        assert server.get("/ready").status_code == server.get("/health").status_code == 503
        assert "no device" in server.worker.problem


class Client:
    """The server's side of a connection to a client that may leave or stop reading; also stands in for metrics."""

    def __init__(self, *, reads: int = 10**9):
        self.sent, self.reads, self.left = [], reads, asyncio.Event()
        self.disconnects, self.reasons, self.cancelled = self, [], False

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        while len(self.sent) > self.reads and not self.left.is_set():  # a connection that is lost frees its senders
            await asyncio.sleep(0.001)

    def cancel(self):
        self.cancelled = True

    def labels(self, reason):
        self.reasons.append(reason)
        return self

    def inc(self):
        pass

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def streamed(act, kind=EVENTS, **options) -> Client:
    """Answers while ``act(answer, client)`` runs; returns the client."""

    async def main():
        client = Client(**options)
        answer = Answer(Limits(buffer_bytes=1000), client, kind)
        answer.cancel = client.cancel
        task = asyncio.ensure_future(answer({"type": "http", "method": "POST"}, client.receive, client.send))
        await act(answer, client)
        await asyncio.wait_for(task, 5)
        return client

    return asyncio.run(main())


def test_waiting_events_are_sent_together():
    async def act(answer, client):
        for content in (b"a", b"b", b"c"):
            answer.add(content)
        await asyncio.sleep(0.01)
        answer.add(b"d")
        answer.end()

    client = streamed(act)
    assert [message.get("body") for message in client.sent] == [None, b"abc", b"d"]
    assert client.sent[0]["status"] == 200
    assert [message.get("more_body") for message in client.sent[1:]] == [True, False]
    assert not client.reasons


def test_whole_answer_has_its_length():
    async def act(answer, client):
        answer.add(b"x" * 2000)  # more than may wait in a stream
        answer.end()

    client = streamed(act, "application/json")
    assert (b"content-length", b"2000") in client.sent[0]["headers"]
    assert client.body == b"x" * 2000


@pytest.mark.parametrize("content", [b"", b"a"], ids=["before the answer", "during it"])
def test_client_that_leaves_is_cancelled(content):
    async def leave(answer, client):
        answer.add(content)
        await asyncio.sleep(0.01)
        client.left.set()

    client = streamed(leave)
    assert (client.reasons, client.cancelled, client.body) == (["left"], True, content)


def test_stream_that_is_not_read_is_cut_before_it_fills_memory():
    async def overflow(answer, client):
        answer.add(b"a")
        await asyncio.sleep(0.01)
        for _ in range(20):
            answer.add(b"x" * 100)
        assert client.cancelled
        client.reads = 10**9

    client = streamed(overflow, reads=1)
    assert client.reasons == ["overflow"]
    assert client.body.startswith(b'adata: {"error":{"message":"the stream was cut')


@pytest.mark.parametrize("begun", [b"", b"data: 1\n\n"], ids=["before any text", "later"])
def test_error_has_its_status_or_is_the_last_event(begun):
    async def fail(answer, client):
        answer.add(begun)
        await asyncio.sleep(0.01)
        answer.end(ApiError(400, "rows: too few", headers={"retry-after": "1"}))

    client = streamed(fail)
    assert client.sent[0]["status"] == (200 if begun else 400)
    assert client.body.startswith((begun + b"data: " if begun else b"") + b'{"error":{"message":"rows: too few"')
