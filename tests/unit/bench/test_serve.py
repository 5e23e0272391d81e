"""A load is honest: requests come when they are due, each token counts once, what failed is not answered."""

import asyncio
import statistics
import threading

import pytest
from typer.testing import CliRunner

from adaponder.bench.serve import Load, all_at_once, at_rates, client_limit, overhead, wait_until_ready
from adaponder.bench.serve_client import Client, Target
from adaponder.bench.serve_load import (
    Answer,
    Ask,
    check_rates,
    percentile,
    poisson_times,
    steady_rate,
    summary,
)
from adaponder.bench.serve_process import started
from adaponder.bench.serve_standin import SleepingEngine, engine_rate, stand_in_model
from adaponder.cli import app
from adaponder.commands.options.bench import read_stand_in
from adaponder.errors import EvaluationError, InputError
from adaponder.inference import Engine, Request

ASK = Ask("echo", 50, context=3, new=8)


@pytest.fixture(scope="module")
def echo():
    with started(["-m", "adaponder.bench.serve_echo", "0", "0.004"]) as server:
        yield server.url


def answers_of(script: bytes, *, count: int = 1, timeout: float = 5.0) -> list[Answer]:
    """What the client makes of a server that says exactly this and hangs up."""

    async def run() -> list[Answer]:
        async def say(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for part in script.split(b"|"):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.close()

        server = await asyncio.start_server(say, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            client = Client(Target.of(f"http://127.0.0.1:{port}"))
            return await client.run([ASK.body(seed) for seed in range(count)], [0.0] * count, timeout=timeout)

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


def test_rates_rise_or_are_refused():
    assert check_rates("--rates", [1, 2]) == [1, 2]
    for wrong in ([2, 1], [1, 1], [0], [float("nan")], [float("inf")], [-1]):
        with pytest.raises(InputError, match="--rates"):
            check_rates("--rates", wrong)


def test_prompts_differ_and_are_the_seed_s():
    bodies = [Load(ASK).bodies(4, part=part) for part in (0, 1)]
    prompts = [tuple(body["prompt"]) for part in bodies for body in part]
    assert len(set(prompts)) == 8
    assert Load(ASK).bodies(4, part=0) == bodies[0]


def test_percentiles_are_values_that_were_measured():
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile(range(1, 101), 0.99) == 99


def test_streams_of_a_real_server_are_counted_to_the_token(echo):
    burst = all_at_once(echo, Load(ASK, streams=5), key=None, repeats=1)
    assert burst.last["tokens"] == 40
    assert burst.last["mean_depth"] == 2.5
    assert 0 < burst.rate < 1.2 * 5 / 0.004


def test_requests_come_when_they_are_due_whether_or_not_earlier_ones_are_answered(echo):
    load = Load(Ask("echo", 50, context=1, new=100), seconds=0.4)
    row = next(at_rates(echo, load, [50.0], key=None))
    assert row["answered"] == row["requests"] == len(poisson_times(50.0, 0.4, seed=0))
    assert row["client_late"] < 0.3
    # Each answer takes the whole 0.4 s: had they waited for each other, the second would not have begun by then.
    assert row["tokens_per_second"] > 1.5 * 100 / 0.4


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
        (HEAD + framed(TOKEN), "closed before"),
        (HEAD + framed(TOKEN) + b"0\r\n\r\n", "without usage"),
        (HEAD + framed('{"error": {"message": "boom"}}') + b"0\r\n\r\n", "boom"),
        (HEAD + b"zz\r\n", "not an answer"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\nno", "status 500: no"),
        (b"HTTP/1.1 banana\r\n\r\n", "not an answer"),
        (b"", "closed before"),
    ],
)
def test_what_is_no_complete_answer_has_failed(script, why):
    one = answers_of(script)[0]
    assert not one.works
    assert why in one.error
    assert summary([one], 1.0)["failed"] == 1


def test_a_full_queue_is_no_failure():
    one = answers_of(b"HTTP/1.1 429 Full\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}")[0]
    found = summary([one], 1.0)
    assert (found["refused"], found["failed"], found["answered"]) == (1, 0, 0)


def test_a_server_that_says_nothing_fails_in_time():
    async def run() -> list[Answer]:
        server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(9), "127.0.0.1", 0)
        client = Client(Target.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        return await client.run([ASK.body(0)], [0.0], timeout=0.2)

    assert asyncio.run(run())[0].error == "no answer within 0.2 s"


def test_nobody_there_is_said():
    load = Load(ASK, streams=1)
    with pytest.raises(EvaluationError, match="no connection"):
        all_at_once("http://127.0.0.1:9", load, key=None, repeats=1)


def test_tokens_that_come_together_share_the_time_before_them():
    one = Answer(due=0.0, status=200, arrivals=[(1.0, 1), (3.0, 2), (4.0, 1)], tokens=4)
    assert one.gaps() == pytest.approx([1.0, 1.0, 1.0])
    other = Answer(due=0.0, status=200, arrivals=[(2.0, 1), (3.0, 1)], tokens=4)
    assert other.gaps() == pytest.approx([0.5, 0.5])
    assert steady_rate([one]) == pytest.approx(1.0)
    assert summary([one], 3.5)["tokens_per_second"] == pytest.approx(2 / 1.75)
    assert overhead(95.0, 100.0) == pytest.approx(0.05)


def test_urls_and_stand_ins_are_read_or_refused_by_name():
    assert Target.of("https://host/base/").prefix == "/base"
    assert b"Bearer k\r\n" in Target.of("http://[::1]:80", "k").request("GET", "/")
    for wrong in ("host:80", "ftp://host", "http://", "http://host:99999", "http://u:p@host"):
        with pytest.raises(InputError, match="--url"):
            Target.of(wrong)
    assert read_stand_in("--stand-in", "64,8") == (64, 8.0)
    for wrong in ("64", "x,8", "0,8", "64,0", "64,8,8"):
        with pytest.raises(InputError, match="--stand-in"):
            read_stand_in("--stand-in", wrong)
    for arguments in ([], ["runs/x", "--url", "http://127.0.0.1:1"]):
        answer = CliRunner().invoke(app, ["bench", "serve", *arguments])
        assert isinstance(answer.exception, InputError), answer.output


@pytest.mark.parametrize("kind", [SleepingEngine, Engine])
def test_the_stand_in_has_the_engine_s_interface(kind):
    model = stand_in_model()
    engine = kind(model, lanes=4, **({"tick": 0.0005} if kind is SleepingEngine else {}))
    seen = []
    number = engine.submit(Request(prompt=[1, 2], max_new_tokens=3, samples=2, ignore_eos=True), seen.append)
    gone = engine.submit(Request(prompt=[1], max_new_tokens=100, ignore_eos=True))
    engine.step()
    engine.cancel(gone)
    told = []
    while engine.busy:
        told += engine.step()
    assert {event.request for event in seen} == {number}
    done = {(event.request, event.sample): event.completion for event in told if event.completion is not None}
    assert {key: one.finish_reason for key, one in done.items()} == {
        (number, 0): "length",
        (number, 1): "length",
        (gone, 0): "cancelled",
    }
    assert [len(done[number, sample].tokens) for sample in (0, 1)] == [3, 3]
    assert len(done[number, 0].depths) == 2 + 2
    assert engine.statistics.keys() == Engine(model, lanes=1).statistics.keys()
    assert (engine.statistics["waiting"], engine.statistics["resident"]) == (0, 0)
    assert {"tokens", "iterations", "eos_ids", "config", "model"} <= set(dir(engine))
    with pytest.raises(InputError, match="prompt"):
        engine.submit(Request(prompt=[]))
    refused = []
    with engine._alone():
        thread = threading.Thread(target=lambda: refused.append(_refusal(engine)))
        thread.start()
        thread.join()
    assert "another thread" in refused[0]


def _refusal(engine) -> str:
    try:
        engine.step()
    except EvaluationError as problem:
        return str(problem)
    return ""


def test_the_stand_in_makes_its_lanes_tokens_per_tick():
    engine = SleepingEngine(stand_in_model(), lanes=8, tick=0.005)
    asked = [Request(prompt=[seed + 1], max_new_tokens=20, ignore_eos=True) for seed in range(8)]
    assert 0.3 * 8 / 0.005 < engine_rate(engine, asked) < 8 / 0.005


def test_the_client_is_faster_than_what_it_measures(monkeypatch):
    monkeypatch.setattr("adaponder.bench.serve._CLIENT_TOKENS", 200)
    assert client_limit() > 8000


def test_a_server_that_is_starting_is_waited_for(monkeypatch):
    statuses = [503, 503, 200]
    monkeypatch.setattr("adaponder.bench.serve._get", lambda url, path, key, timeout: (statuses.pop(0), b""))
    wait_until_ready("http://127.0.0.1:1", None, patience=10)
    assert statuses == []
    statuses = [503] * 10
    with pytest.raises(EvaluationError, match="/ready: status 503"):
        wait_until_ready("http://127.0.0.1:1", None, patience=0)
