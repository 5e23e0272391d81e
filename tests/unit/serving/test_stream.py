"""A client that reads slowly, leaves or fails is cut off and harms no other; what it held is freed."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest
import torch

from adaponder import Engine, Request
from adaponder.serving.protocol import ApiError
from adaponder.serving.scores import ScoreWriter
from adaponder.serving.settings import Limits, Settings
from adaponder.serving.stream import EventStream, Outbox
from serving_support import connect, request_bytes, serving, text_of, tiny_served
from support import tiny

BODY = {"model": "tiny", "prompt": "ab", "max_tokens": 40}


def idle(server) -> None:
    """Nothing is under way, and no page is held."""
    counts = server.settled()
    assert counts["resident"] == counts["waiting"] == counts["pages_held"] == 0


@pytest.fixture(scope="module")
def server():
    limits = Limits(waiting=64, stall_seconds=0.3, drain_seconds=5)
    with serving(settings=Settings(lanes=4, limits=limits), share_prefixes=False) as running:
        yield running


@pytest.mark.every
def test_many_at_once_each_say_what_they_say_alone(server):
    engine = Engine(tiny(), lanes=1)
    generator = random.Random(0)
    bodies = []
    for number in range(12):
        prompt = [generator.randrange(1, 27) for _ in range(generator.randrange(1, 20))]
        bodies.append(
            {"model": "tiny", "prompt": prompt, "max_tokens": generator.randrange(1, 30), "seed": number}
            | {"temperature": generator.choice([0.0, 1.0]), "stream": number % 2 == 0}
            | {"adaponder": {"depth": True} | generator.choice([{}, {"tau": 0.3}, {"policy": "fixed:2"}])}
        )

    async def ask(client: httpx.AsyncClient, body: dict) -> tuple[str, list[int]]:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200
        if not body["stream"]:
            parts = [response.json()["choices"][0]]
        else:
            lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
            parts = [json.loads(line)["choices"][0] for line in lines[:-1]]
        tokens = [token for part in parts for token in part["adaponder"]["tokens"]]
        return "".join(part["text"] for part in parts), [token["depth"] for token in tokens]

    async def all_of_them():
        async with httpx.AsyncClient(base_url=server.address, timeout=60, verify=False) as client:
            return await asyncio.gather(*(ask(client, body) for body in bodies))

    for body, (text, depths) in zip(bodies, asyncio.run(all_of_them()), strict=True):
        how = {key: value for key, value in body["adaponder"].items() if key != "depth"}
        forced = {"tau": how.get("tau")}
        if "policy" in how:
            forced = {"depths": [2] * (len(body["prompt"]) + body["max_tokens"] - 1)}
        settings = {"max_new_tokens": body["max_tokens"], "seed": body["seed"], "temperature": body["temperature"]}
        ((alone,),) = engine.generate([Request(body["prompt"], **settings, **forced)])
        assert text == text_of(alone.ids)
        assert depths == [token.depth for token in alone.tokens]
    idle(server)


def test_who_leaves_is_cancelled_whenever_that_is(server):
    generator = random.Random(1)
    for number in range(30):
        connection = connect(server)
        connection.sendall(request_bytes(BODY | {"stream": number % 2 == 0, "n": 2, "seed": number}))
        time.sleep(generator.random() * 0.02)
        if number % 3 == 0:
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.recv(100)
        connection.close()
    idle(server)
    assert server.post("/v1/completions", BODY).status_code == 200
    left = [line for line in server.get("/metrics").text.splitlines() if line.startswith("adaponder_disconnects_total")]
    assert any(float(line.split()[-1]) > 0 for line in left)


def test_who_leaves_has_no_text_scored(server, monkeypatch):
    begun = threading.Event()

    def endless(self, *text, **how):
        while True:
            begun.set()
            yield

    monkeypatch.setattr(ScoreWriter, "__call__", endless)
    connection = connect(server)
    connection.sendall(request_bytes({"prompt": "ab"}, "/score"))
    assert begun.wait(5)
    connection.close()
    until = time.monotonic() + 5
    while server.worker.jobs and time.monotonic() < until:
        time.sleep(0.005)
    assert server.worker.jobs == 0


def test_requests_sent_at_once_on_one_connection_all_end_when_it_does(server):
    connection = connect(server)
    connection.sendall(b"".join(request_bytes(BODY | {"stream": True, "n": 4}) for _ in range(3)))
    connection.recv(100)
    connection.close()
    idle(server)


def test_beside_one_who_does_not_read_others_go_on(server):
    wide = {"depth": True, "gates": True, "iteration_top": 20}
    connection = connect(server)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    body = BODY | {"stream": True, "n": 3, "max_tokens": 60, "logprobs": 20, "adaponder": wide}
    connection.sendall(request_bytes(body))
    for _ in range(3):
        assert server.post("/v1/completions", BODY | {"max_tokens": 4}).status_code == 200
    idle(server)
    connection.close()


class Stuck(Engine):
    """An engine that takes requests and generates nothing until ``held`` is false."""

    held = True

    def step(self):
        if self.held:
            time.sleep(0.001)
            return []
        return super().step()


def test_429_comes_exactly_when_lanes_and_queue_are_full():
    stuck = Stuck(tiny(), lanes=1)
    limits = Limits(waiting=2, retry_seconds=3, jobs=1)
    with serving(settings=Settings(lanes=1, limits=limits), engine=lambda: stuck) as server:
        inside = [connect(server) for _ in range(3)]
        for connection in inside:
            connection.sendall(request_bytes(BODY | {"max_tokens": 3}))
        while server.worker.sequences < 3:
            time.sleep(0.001)
        response = server.post("/v1/completions", BODY)
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert server.get("/ready").json()["requests"] == 3
        inside.pop().close()
        while server.worker.sequences == 3 and stuck.held:
            stuck.held = False
        for connection in inside:
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.close()
        assert server.post("/v1/completions", BODY).status_code == 200


def test_an_exception_in_one_request_fails_that_one_alone():
    """The logits are NaN for whoever reads token 9."""
    model = tiny("ouro")
    with torch.no_grad():
        model.get_input_embeddings().weight[9].fill_(float("nan"))
    with serving(tiny_served(model), Settings(lanes=4), share_prefixes=False) as server:
        good = server.post("/v1/completions", BODY | {"seed": 1, "logit_bias": {"9": -100}}).json()
        for stream in (False, True):
            bad = server.post("/v1/completions", BODY | {"prompt": [9, 9], "stream": stream})
            assert bad.status_code == 500
            assert bad.json()["error"]["type"] == "server_error"
            assert "NaN" in bad.json()["error"]["message"]
        assert server.post("/score", {"prompt": [9, 1, 2]}).status_code == 500
        again = server.post("/v1/completions", BODY | {"seed": 1, "logit_bias": {"9": -100}}).json()
        assert again["choices"] == good["choices"]
        assert server.get("/ready").status_code == 200
        idle(server)


def test_an_engine_that_is_gone_is_told_to_who_asks():
    def fails():
        raise RuntimeError("no device")

    with serving(engine=fails) as server:
        assert server.post("/v1/completions", BODY).status_code == 503
        assert server.post("/score", {"prompt": "ab"}).status_code == 503
        assert server.get("/ready").status_code == server.get("/health").status_code == 503


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
