"""The long checks of a running server, for seconds; ``make`` has targets that run them whole."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest
from fuzz import attack, broken
from harness_check import compare, records
from schema_check import run_cases
from soak import hang_up, same_as_alone

from adaponder.serving.served import Served
from adaponder.serving.settings import Settings
from harness_support import reader, words, write_records
from serving_support import Running, serving
from soak_support import NAME, at_rest, wait_for, write_checkpoint


@pytest.fixture(scope="module")
def server():
    with serving(Served(reader(), words(), name=NAME), Settings(lanes=16)) as running:
        yield running


def test_streams_at_once_say_what_they_say_alone_and_leave_no_row(server: Running):
    assert same_as_alone(server.address, 24, seed=3)["equal_to_solo"] == 24


def test_clients_that_hang_up_leave_nothing(server: Running):
    hang_up(server.address, 40, seed=4, at_once=20)


def test_bytes_that_are_no_requests_harm_nobody(server: Running):
    found = attack(server.address, requests=80, idlers=4, seed=5, good=8, seconds=1.0)
    assert sum(found["answers_by_status"].values()) >= 80


def test_cases_made_from_the_document_are_answered_without_an_error_of_the_server(server: Running):
    told = run_cases(server.address, 40, number=6)
    assert set(told) >= {"POST /v1/completions", "POST /v1/chat/completions", "POST /score", "GET /v1/models"}
    assert sum(sum(counts.values()) for counts in told.values()) >= 40
    wait_for(lambda: not server.worker.sequences and not server.worker.jobs, "nothing is under way")


@pytest.mark.every
def test_lm_eval_s_client_gets_the_scores_of_eval(server: Running, tmp_path: Path):
    folder = write_checkpoint(tmp_path / "model")
    data = write_records(tmp_path / "records", {"arc_easy": records()["arc_easy"]})
    compared = compare(server.address, folder, data, ("arc_easy",))
    assert {"arc_easy acc", "arc_easy acc_norm"} <= set(compared)


def test_a_prefix_that_is_kept_is_freed_when_asked(server: Running):
    """Rows that stay in use after long prompts are kept prefixes and nothing else."""
    body = {"model": NAME, "prompt": list(range(1, 40)), "max_tokens": 4}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.settled()["pages_held"] > 0
    server.engine.prefixes.clear()
    assert server.engine.statistics["pages_held"] == 0


def test_the_checks_can_fail(server: Running, monkeypatch: pytest.MonkeyPatch):
    """A server that gives one token of another depth, or keeps a row, is found out."""
    monkeypatch.setattr("soak.solo", lambda engine, body: ([], []))
    with pytest.raises(AssertionError):
        same_as_alone(server.address, 1, seed=7)
    monkeypatch.setattr("soak_support.ready", lambda url, key=None: dict.fromkeys(_COUNTS, 1))
    assert not at_rest(server.address)
    draw = random.Random(0)
    place = server.address.removeprefix("http://")
    assert len({broken(draw, place) for _ in range(50)}) > 45


_COUNTS = ("lanes_in_use", "waiting", "rows_in_use", "requests")


def test_a_full_queue_is_429_and_everybody_accepted_is_answered():
    """Line 28 of the list of failures: none that was let in is lost when others are turned away."""
    from adaponder.serving.settings import Limits
    from benchmarks.serve_client import ServerLoad, run_client, summary
    from benchmarks.stand_in import SleepingEngine

    model = reader()
    settings = Settings(lanes=2, limits=Limits(waiting=4))
    with serving(
        Served(model, words(), name=NAME), settings, engine=lambda: SleepingEngine(model, lanes=2, tick=0.01)
    ) as server:
        load = ServerLoad(NAME, 300, context=2, new=20, settings={"adaponder": {"ignore_eos": True}})
        answers = run_client(server.address, load.bodies(30, part=0), [0.0] * 30, key=None, timeout=30)
        found = summary(answers, 1.0)
        assert found["failed"] == 0
        assert found["refused"] > 0
        assert found["answered"] + found["refused"] == 30
        assert {one.tokens for one in answers if one.works} == {20}
        assert server.settled()["resident"] == 0


def test_no_port_is_left_open():
    with serving(Served(reader(), words(), name=NAME)) as server:
        host, _, port = server.address.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0
