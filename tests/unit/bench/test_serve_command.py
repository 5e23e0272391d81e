"""``adaponder bench serve`` against a real server: every row has its figures, the record its conditions, and a plot."""

from __future__ import annotations

import json

import pytest

from adaponder.analysis.serve_figure import draw
from adaponder.bench import serve as bench
from adaponder.bench.serve_standin import SleepingEngine, stand_in_model
from adaponder.bench.serve_standin_server import stand_in_worker
from adaponder.commands import bench_serve
from adaponder.commands.options import ServeBenchOptions
from adaponder.errors import EvaluationError
from adaponder.serving.settings import Access, Key, Settings
from serving_support import serving

KEY = "a-key-of-these-tests-0123456789"


@pytest.fixture(scope="module")
def server():
    served = stand_in_worker(4, 0.005).served
    settings = Settings(lanes=4, access=Access(keys=(Key.of(KEY),)))
    model = stand_in_model()
    with serving(served, settings, engine=lambda: SleepingEngine(model, lanes=4, tick=0.005)) as running:
        yield running


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bench, "client_limit", lambda: 50_000.0)
    monkeypatch.setattr(bench_serve, "conditions", lambda device, commit: {"hardware": {}, "versions": {}})


def test_a_running_server_is_loaded_at_rates_that_rise(server, quick, monkeypatch, tmp_path):
    monkeypatch.setenv("ADAPONDER_API_KEY", KEY)
    options = ServeBenchOptions(
        url=server.address,
        rates=(5.0, 20.0),
        seconds=0.8,
        context=3,
        new=10,
        streams=4,
        repeats=1,
        policy="fixed:2",
        record=False,
        commit="this",
        json=tmp_path / "out.json",
    )
    record = bench_serve.run(options)
    assert json.loads((tmp_path / "out.json").read_text())["metrics"] == json.loads(json.dumps(record["metrics"]))
    (burst,) = record["metrics"]["all_at_once"]
    assert 0 < burst["server_tokens_per_second"] <= 4 / 0.005
    assert burst["overhead"] is None
    rows = record["metrics"]["rates"]
    assert [row["rate"] for row in rows] == [5.0, 20.0]
    assert all(row["failed"] == 0 and row["answered"] + row["refused"] == row["requests"] for row in rows)
    assert rows[1]["answered"] > rows[0]["answered"]
    assert rows[1]["mean_depth"] > 1
    assert record["settings"]["policy"] == "fixed:2"
    written = draw(rows, tmp_path / "figure", "a machine", most=burst["server_tokens_per_second"])
    assert all(path.stat().st_size > 5000 for path in written)


def test_the_key_is_asked_for_by_name(server, quick, monkeypatch):
    monkeypatch.delenv("ADAPONDER_API_KEY", raising=False)
    with pytest.raises(EvaluationError, match="ADAPONDER_API_KEY"):
        bench_serve.run(ServeBenchOptions(url=server.address, record=False, commit="this"))


@pytest.mark.every
def test_the_server_s_overhead_is_told_beside_the_stand_in_alone(quick):
    """Everything for real but short: the server in its own process, the client in another."""
    options = ServeBenchOptions(
        stand_in=((4, 10.0),), rates=(5.0,), seconds=0.5, context=3, new=20, repeats=1, record=False, commit="this"
    )
    record = bench_serve.run(options)
    (row,) = record["metrics"]["all_at_once"]
    assert (row["lanes"], row["tick_ms"], row["streams"]) == (4, 10.0, 4)
    assert 0 < row["engine_tokens_per_second"] < 4 / 0.010
    assert row["overhead"] == pytest.approx(1 - row["server_tokens_per_second"] / row["engine_tokens_per_second"])
    assert row["cpu_us_per_token"] > 0
    assert len(record["metrics"]["rates"]) == 1
