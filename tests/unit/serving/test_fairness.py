"""No client starves another: places, turns and threads are shared, and Retry-After says when a place is free."""

import asyncio
import socket
import threading
import time
from contextlib import ExitStack, suppress
from itertools import cycle

import httpx
import pytest

from adaponder import Engine
from adaponder.errors import EvaluationError, InputError
from adaponder.serving import fairness, routes
from adaponder.serving.fairness import Places, TextPool, Turns, UnavailableError
from adaponder.serving.settings import Access, Limits, Settings
from serving_support import connect, request_bytes, serving
from support import tiny


def fill(places: Places, clients: list[str], *, room: int, at_once: int) -> None:
    """Lets the clients in turn take single places until none of them may take another."""
    refused: set[str] = set()
    for client in cycle(clients):
        if places.missing(client, 1, room=room, at_once=at_once):
            refused.add(client)
        else:
            places.take(client)
        if len(refused) == len(clients):
            return


@pytest.mark.parametrize("room", [8, 12, 72, 576])
@pytest.mark.parametrize("greedy", [1, 2, 7])
def test_greedy_clients_share_equally_and_leave_a_place(room, greedy):
    places, names = Places(), [str(number) for number in range(greedy)]
    fill(places, names, room=room, at_once=1)
    shares = [places.held[name] for name in names]
    assert max(shares) - min(shares) <= 1
    assert places.total >= min(room - 1, room * 8 * greedy // (8 * greedy + 1) - greedy)
    assert places.missing("another", 1, room=room, at_once=1) == 0


def test_a_client_alone_may_take_every_lane_and_any_request_that_fits():
    places = Places()
    fill(places, ["a"], room=4, at_once=4)
    assert places.total == 4
    assert Places().missing("a", 576, room=576, at_once=64) == 0
    assert Places().missing("a", 577, room=576, at_once=64) == 1


def test_as_many_places_are_missing_as_must_be_given_back():
    places = Places()
    fill(places, ["a", "b"], room=90, at_once=1)
    for client, count in (("a", 1), ("a", 7), ("new", 20)):
        missing = places.missing(client, count, room=90, at_once=1)
        assert missing > 0
        holder = "a" if client == "a" else "b"
        places.give_back(holder, missing - 1)
        assert places.missing(client, count, room=90, at_once=1) > 0
        places.give_back(holder, 1)
        assert places.missing(client, count, room=90, at_once=1) == 0
        places.take(holder, missing)


def test_only_clients_that_hold_places_are_listed():
    places = Places()
    for number in range(1000):
        assert not places.missing(str(number), 1, room=9, at_once=1)
        places.take(str(number))
        places.give_back(str(number))
    assert (dict(places.held), places.total) == ({}, 0)


def test_the_time_until_a_place_is_free_is_measured(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(fairness.time, "monotonic", lambda: now[0])
    places = Places()
    assert places.seconds(3) == 0
    places.take("a", 200)
    now[0] += 5
    assert places.seconds(1) == 5, "nothing has been given back yet"
    for _ in range(100):
        now[0] += 0.5
        places.give_back("a")
    assert places.seconds(10) == pytest.approx(5.0)
    places.give_back("a", 100)
    now[0] += 1000
    places.take("b", 2)
    assert places.seconds(1) == 0, "the time without work does not count"


def test_clients_take_turns():
    turns: Turns[int] = Turns()
    for client, item in (("a", 1), ("a", 2), ("b", 3), ("a", 4), ("c", 5), ("b", 6)):
        turns.put(client, item)
    order = []
    while turn := turns.take():
        order.append(turn)
    assert order == [("a", 1), ("b", 3), ("c", 5), ("a", 2), ("b", 6), ("a", 4)]
    turns.put("a", 1)
    assert turns.take({"a"}) is None
    assert turns


def test_a_client_has_one_thread_and_delays_no_other():
    running, most = {"slow": 0}, []

    def slow():
        running["slow"] += 1
        most.append(running["slow"])
        time.sleep(0.02)
        running["slow"] -= 1

    async def main():
        pool = TextPool()
        hog = [asyncio.ensure_future(pool.run("slow", slow)) for _ in range(10)]
        await asyncio.sleep(0)
        assert await pool.run("other", threading.current_thread) is not threading.current_thread()
        assert sum(task.done() for task in hog) <= 2
        _, unfinished = await asyncio.wait(hog, timeout=10)
        assert not unfinished
        assert (pool.places.total, pool.finished, max(most)) == (0, 11, 1)
        assert pool.seconds > 0.2

    asyncio.run(main())


def test_conversions_that_do_not_end_are_abandoned():
    class Panic(BaseException):
        """Stands for a panic of a native library."""

    def panics():
        raise Panic("index out of bounds")

    async def main():
        pool, forever = TextPool(), threading.Event()
        for problem, function in ((EvaluationError, panics), (InputError, lambda: Access(hosts=("/",)))):
            with pytest.raises(problem):
                await pool.run("a", function)
        tasks = [asyncio.ensure_future(pool.run("a", forever.wait)) for _ in range(3)]
        await asyncio.sleep(0.01)
        pool.close()
        for task in (*tasks, pool.run("a", int)):
            with pytest.raises(UnavailableError):
                await task
        assert pool.places.total == 1
        forever.set()

    asyncio.run(main())


def test_idle_connections_of_one_client_leave_room_for_others():
    limits, health = Limits(connections=18, header_seconds=60), b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(settings=Settings(limits=limits)) as server, ExitStack() as stack:

        def answer(connection: socket.socket, *parts: bytes) -> bytes:
            try:
                for part in parts or (health,):
                    connection.sendall(part)
                return connection.recv(12)
            except OSError as error:
                return str(error).encode()

        idle = [stack.enter_context(connect(server)) for _ in range(16)]  # eight ninths
        assert answer(idle[-1]) == b"HTTP/1.1 200"
        assert answer(stack.enter_context(connect(server))) == b"HTTP/1.1 429"
        with connect(server) as refused:  # a client that sends on reads its answer all the same
            time.sleep(0.1)
            head = health[:-2] + b"Content-Length: 200000\r\n\r\n"
            assert answer(refused, head, *20 * [b"a" * 10_000]) == b"HTTP/1.1 429"
        with connect(server, source="127.0.0.2") as other:
            assert answer(other) == b"HTTP/1.1 200"
        idle[0].close()
        for _ in range(500):  # until the server has noticed
            if (latest := answer(stack.enter_context(connect(server)))) == b"HTTP/1.1 200":
                break
        assert latest == b"HTTP/1.1 200"


def test_requests_are_answered_while_all_connections_are_open():
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(settings=Settings(limits=Limits(connections=2))) as server, ExitStack() as stack:
        clients = [stack.enter_context(connect(server, source=f"127.0.0.{number}")) for number in (1, 2)]
        for client in clients:
            client.sendall(head)
        assert [client.recv(12) for client in clients] == 2 * [b"HTTP/1.1 200"]


def test_clients_without_keys_are_told_apart_by_address():
    access = Access(proxies=("10.0.0.1", "10.1.0.0/16"))

    def name(address: str, *forwarded: str) -> str:
        return access.client_of(address, forwarded).name

    assert name("1.2.3.4") == name("::ffff:1.2.3.4") != name("1.2.3.5")
    assert name("2001:db8::1") == name("2001:db8:0:0:ffff::2") != name("2001:db8:0:1::1")
    assert name("1.2.3.4", "5.6.7.8") == name("1.2.3.4"), "anybody can send the header"
    assert name("10.0.0.1", "9.9.9.9, 5.6.7.8") == name("5.6.7.8")
    assert name("10.0.0.1", "9.9.9.9", "5.6.7.8, 10.1.2.3") == name("5.6.7.8")
    assert name("10.0.0.1", "9.9.9.9, unknown") == name("10.0.0.1") == name("10.0.0.1", "")
    assert len(name("fe80::1%eth0")) == 12
    assert access.holder_of("10.1.2.3") is None, "a proxy's connections are its clients'"
    assert access.holder_of("1.2.3.4") == name("1.2.3.4")
    with pytest.raises(InputError, match="trusted-proxy"):
        Access(proxies=("proxy.example.org",))


@pytest.fixture
def server():
    """Serves clients that are told apart by a header."""
    limits = Limits(texts=4, waiting=60)
    settings = Settings(lanes=2, limits=limits, access=Access(proxies=("127.0.0.1",)))
    with serving(settings=settings) as running:
        yield running


def test_long_texts_of_one_client_delay_no_other(server, monkeypatch):
    """Promise 40: beyond its share a client gets 429, and another client's text is converted at once."""
    free, statuses = threading.Event(), []

    def tokens_of(text, served, special):
        return [len(text)] if text[0] == "b" else free.wait(20) and [1]

    def tokenize(client: str, text: str):
        with server.client() as http:
            return http.post("/tokenize", json={"prompt": text * 2000}, headers={"x-forwarded-for": client})

    monkeypatch.setattr(routes, "tokens_of", tokens_of)
    monkeypatch.setattr(routes, "pieces", lambda tokenizer, ids: [""] * len(ids))
    greedy = [threading.Thread(target=lambda: statuses.append(tokenize("1.1.1.1", "a"))) for _ in range(12)]
    for thread in greedy:
        thread.start()
    while len(statuses) < 12 - 7:  # of the eight places one stays free
        time.sleep(0.001)
    assert {response.status_code for response in statuses} == {429}
    assert all(1 <= int(response.headers["retry-after"]) < 60 for response in statuses)
    metrics = server.metrics()
    assert (metrics["adaponder_texts",], metrics["adaponder_texts_running",]) == (7, 1)
    began = time.monotonic()
    assert tokenize("2.2.2.2", "b").json()["count"] == 1
    assert time.monotonic() - began < 1
    free.set()
    for thread in greedy:
        thread.join(20)
    assert sorted(response.status_code for response in statuses) == [200] * 7 + [429] * 5
    assert server.metrics()["adaponder_texts_converted_total",] == 8


class Slow(Engine):
    """Sleeps for 20 ms in each step."""

    def step(self):
        time.sleep(0.02)
        return super().step()


def test_a_greedy_client_starves_no_other():
    """Promise 39: beside a full queue of another client, a short request takes at most three times as long as alone."""
    settings = Settings(lanes=2, limits=Limits(waiting=60), access=Access(proxies=("127.0.0.1",)))
    body = {"model": "tiny", "prompt": "ab", "adaponder": {"ignore_eos": True}}
    greedy = body | {"n": 16, "max_tokens": 60}

    def seconds() -> float:
        began, client = time.monotonic(), {"x-forwarded-for": "2.2.2.2"}
        with suppress(httpx.TimeoutException):
            response = server.post("/v1/completions", body | {"max_tokens": 4}, headers=client, timeout=10)
            assert response.status_code == 200
        return time.monotonic() - began

    with serving(settings=settings, engine=lambda: Slow(tiny(), lanes=2)) as server, ExitStack() as connections:
        alone = min(seconds() for _ in range(3))
        for _ in range(3):
            connection = connections.enter_context(connect(server))
            connection.sendall(request_bytes(greedy, client="1.1.1.1"))
        while server.worker.sequences < 48:
            time.sleep(0.01)
        refused = server.post("/v1/completions", greedy, headers={"x-forwarded-for": "1.1.1.1"})
        assert refused.status_code == 429
        assert max(seconds() for _ in range(4)) < 3 * alone
        metrics = server.metrics()
        assert sum(metrics[name] for name in metrics if name[0] == "adaponder_client_sequences") == 48
