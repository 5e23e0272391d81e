"""A load is honest: requests come when they are due, each token counts once, what failed is not answered."""

import asyncio
import json
import statistics
from dataclasses import replace

import pytest

from adaponder.errors import EvaluationError, InputError
from adaponder.inference import Engine, Request
from adaponder.serving.settings import Access, Key, Settings
from benchmarks import serve, serve_client
from benchmarks.serve import ServeOptions, all_at_once
from benchmarks.serve_client import Answer, ServerLoad, poisson_times, send_all, started, steady_rate, summary
from benchmarks.stand_in import SleepingEngine, stand_in_model, stand_in_worker
from serving_support import serving

LOAD = ServerLoad("echo", 50, context=3, new=8)
KEY = "a-key-of-these-tests-0123456789"


@pytest.fixture(scope="module")
def echo():
    with started(["-m", "benchmarks.serve_client", "echo", "0.004"]) as server:
        yield server.url


def client(url: str, bodies: list, due: list[float], *, key: str | None = None, timeout: float = 5.0) -> list[Answer]:
    """Sends a load from this process instead of one of its own."""
    return asyncio.run(send_all(url, bodies, due, key=key, timeout=timeout))


def answers_of(script: bytes, *, timeout: float = 5.0) -> list[Answer]:
    """Returns the client's answer from a server that writes exactly this and hangs up."""

    async def run() -> list[Answer]:
        async def say(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for part in script.split(b"|"):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.close()

        server = await asyncio.start_server(say, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            return await send_all(url, LOAD.bodies(1, part=0), [0.0], key=None, timeout=timeout)

    return asyncio.run(run())


def framed(*events: str) -> bytes:
    data = [f"data: {event}\n\n".encode() for event in events]
    return b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = '{"choices": [{"text": "data: \\n\\n"}]}'
USAGE = '{"choices": [], "usage": {"completion_tokens": 2, "adaponder": {"mean_depth": 1.5}}}'


def test_arrivals_are_poisson_and_the_seed_s():
    times = poisson_times(200.0, 50.0, seed=3)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert times == poisson_times(200.0, 50.0, seed=3) != poisson_times(200.0, 50.0, seed=4)
    assert abs(len(times) - 10_000) < 400
    # Independent gaps of a Poisson process: their spread is their mean.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)


def test_requests_come_when_they_are_due_and_are_counted_to_the_token(echo):
    due = poisson_times(50.0, 0.2, seed=0)
    answers = client(echo, ServerLoad("echo", 50, new=100).bodies(len(due), part=0), due)
    assert [answer.due for answer in answers] == due
    assert all(answer.works and answer.sent >= answer.due for answer in answers)
    assert sum(answer.sent < answers[0].ended for answer in answers) > 1, "they do not wait for each other"
    row = summary(answers, 0.2)
    assert (row["answered"], row["tokens"], row["mean_depth"]) == (len(due), 100 * len(due), 2.5)


def test_a_token_that_arrives_in_pieces_counts_once():
    whole = HEAD + framed(TOKEN, TOKEN, USAGE, "[DONE]") + b"0\r\n\r\n"
    assert b"|" not in whole
    for cut in (3, len(HEAD) + 1, len(HEAD) + 20, len(whole) - 3):
        one = answers_of(whole[:cut] + b"|" + whole[cut:])[0]
        assert one.works, one.error
        assert (one.tokens, one.mean_depth, sum(count for _, count in one.arrivals)) == (2, 1.5, 2)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (HEAD + framed(TOKEN), "not a complete answer"),
        (HEAD + framed(TOKEN) + b"0\r\n\r\n", "without usage"),
        (HEAD + framed('{"error": {"message": "boom"}}') + b"0\r\n\r\n", "boom"),
        (HEAD + b"zz\r\n", "not a complete answer"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\nno", "status 500: no"),
        (b"HTTP/1.1 banana\r\n\r\n", "not a complete answer"),
        (b"", "not a complete answer"),
    ],
)
def test_what_is_no_complete_answer_has_failed(script, why):
    one = answers_of(script)[0]
    assert not one.works
    assert why in one.error
    assert summary([one], 1.0)["failed"] == 1


def test_a_full_queue_is_no_failure_and_a_server_that_is_silent_or_absent_is():
    full = summary(answers_of(b"HTTP/1.1 429 Full\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"), 1.0)
    assert (full["refused"], full["failed"], full["answered"]) == (1, 0, 0)
    # The script waits before the next of its parts.
    assert answers_of(b"|" * 100, timeout=0.2)[0].error == "no answer within 0.2 s"
    with pytest.raises(EvaluationError, match="no connection"):
        all_at_once(replace(LOAD, streams=1, url="http://127.0.0.1:9"), repeats=1, what="nobody")


def test_tokens_that_come_together_share_the_time_before_them():
    one = Answer(due=0.0, status=200, arrivals=[(1.0, 1), (3.0, 2), (4.0, 1)], tokens=4)
    assert one.gaps() == pytest.approx([1.0, 1.0, 1.0])
    other = Answer(due=0.0, status=200, arrivals=[(2.0, 1), (3.0, 1)], tokens=4)
    assert other.gaps() == pytest.approx([0.5, 0.5])
    assert one.gaps(since=2.0) == pytest.approx([1.0])
    assert steady_rate([one]) == pytest.approx(1.0)
    assert summary([one], 3.5)["tokens_per_second"] == pytest.approx(2 / 1.75)


@pytest.mark.parametrize("kind", [SleepingEngine, Engine])
def test_the_stand_in_has_the_engine_s_interface(kind):
    model = stand_in_model()
    engine = kind(model, lanes=4, **({"tick": 0.0005} if kind is SleepingEngine else {}))
    seen = []
    number = engine.submit(Request(prompt=[1, 2], max_new_tokens=3, samples=2, ignore_eos=True), seen.append)
    gone = engine.submit(Request(prompt=[1], max_new_tokens=100, ignore_eos=True))
    engine.step()
    engine.cancel(gone)
    events = []
    while engine.busy:
        events += engine.step()
    assert {event.request for event in seen} == {number}
    done = {(event.request, event.sample): event.completion for event in events if event.completion is not None}
    reasons = {(number, 0): "length", (number, 1): "length", (gone, 0): "cancelled"}
    assert {key: completion.finish_reason for key, completion in done.items()} == reasons
    assert [len(done[number, sample].tokens) for sample in (0, 1)] == [3, 3]
    assert len(done[number, 0].depths) == 2 + 2
    assert engine.statistics.keys() == Engine(model, lanes=1).statistics.keys()
    assert (engine.statistics["waiting"], engine.statistics["resident"]) == (0, 0)
    assert {"tokens", "iterations", "eos_ids", "config", "model"} <= set(dir(engine))
    with pytest.raises(InputError, match="prompt"):
        engine.submit(Request(prompt=[]))


@pytest.fixture(scope="module")
def server():
    served = stand_in_worker(4, 0.005).served
    settings = Settings(lanes=4, access=Access(keys=(Key.of(KEY),)))
    model = stand_in_model()
    with serving(served, settings, engine=lambda: SleepingEngine(model, lanes=4, tick=0.005)) as running:
        yield running


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(serve, "client_limit", lambda: 50_000.0)
    monkeypatch.setattr(serve_client, "run_client", client)


def test_a_running_server_is_loaded_at_rates_that_rise(server, quick, monkeypatch, tmp_path):
    monkeypatch.setenv("ADAPONDER_API_KEY", KEY)
    load: dict = {"rates": "5,40", "seconds": 0.4, "context": 3, "new": 10, "streams": 4, "repeats": 1}
    load |= {"policy": "fixed:2", "record": False, "commit": "this", "json": tmp_path / "out.json"}
    record = serve.run(ServeOptions(url=server.address, **load))
    assert json.loads((tmp_path / "out.json").read_text())["metrics"] == json.loads(json.dumps(record["metrics"]))
    (burst,) = record["metrics"]["all_at_once"]
    assert 0 < burst["server_tokens_per_second"] <= 4 / 0.005
    assert burst["overhead"] is None
    rows = record["metrics"]["rates"]
    assert [row["rate"] for row in rows] == [5.0, 40.0]
    assert all(row["failed"] == 0 and row["answered"] + row["refused"] == row["requests"] for row in rows)
    assert rows[1]["answered"] > rows[0]["answered"]
    assert rows[1]["mean_depth"] > 1
    assert record["settings"]["policy"] == "fixed:2"


def test_the_key_is_asked_for_by_name(server, quick, monkeypatch):
    monkeypatch.delenv("ADAPONDER_API_KEY", raising=False)
    with pytest.raises(EvaluationError, match="ADAPONDER_API_KEY"):
        serve.run(ServeOptions(url=server.address, record=False, commit="this"))


@pytest.mark.every
def test_the_server_s_overhead_is_shown_beside_the_stand_in_alone():
    """Everything for real but short: the server in its own process, the client in another."""
    load = {"rates": "5", "seconds": 0.5, "context": 3, "new": 20, "repeats": 1}
    record = serve.run(ServeOptions(stand_in=["4,10"], **load, record=False, commit="this"))
    (row,) = record["metrics"]["all_at_once"]
    assert (row["lanes"], row["tick_ms"], row["streams"]) == (4, 10.0, 4)
    assert 0 < row["engine_tokens_per_second"] < 4 / 0.010
    assert row["overhead"] == pytest.approx(1 - row["server_tokens_per_second"] / row["engine_tokens_per_second"])
    assert row["cpu_us_per_token"] > 0
    assert len(record["metrics"]["rates"]) == 1
    assert record["metrics"]["client_tokens_per_second"] > 0
