"""Commands that train: what has a record is skipped, what cannot finish is not started, records name their run."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from adaponder.errors import InputError
from adaponder.files import lock
from experiments import runner
from experiments.__main__ import app
from experiments.measures import MEASURES
from experiments.queue import Corpus, read_queue
from experiments.runner import read_records, record_of
from queue_support import written


def command(*words: object, **options: object) -> SimpleNamespace:
    """Runs ``python -m experiments`` in this process."""
    typed = [f"--{name}={value}" for name, value in options.items() if value is not None]
    result = CliRunner().invoke(app, [*map(str, words), *typed], catch_exceptions=False)
    return SimpleNamespace(code=result.exit_code, output=" ".join(result.output.split()))


@pytest.fixture
def place(tmp_path, shards):
    """Returns the options of a command on a queue with these runs of ``tiny.yaml``."""

    def options(*runs: dict) -> dict:
        entries = [{"claim": "lr", "recipe": str(tmp_path / "tiny.yaml")} | run for run in runs]
        path = written(tmp_path, **({"runs": entries} if runs else {}))
        folders = {name: tmp_path / name for name in ("records", "runs")}
        return {"queue": path, "data": shards, "commit": "abc", **folders}

    return options


@pytest.fixture
def started(monkeypatch):
    """Replaces the processes of runs by nothing; returns the (experiment, beside) that were started."""
    calls = []

    def start(experiment, setup, *, beside):
        calls.append((experiment, beside))
        return SimpleNamespace(experiment=experiment, process=SimpleNamespace(poll=lambda: 0, returncode=0), log=None)

    monkeypatch.setattr(runner, "start", start)
    return calls


def test_runs_leave_one_record_each_and_are_never_repeated(tmp_path, place, monkeypatch):
    """Children run in this process here: what they are is the same command."""
    options, labels = place(), []

    def start(experiment, setup, *, beside):
        labels.append(experiment.label)
        label, *words = setup.command(experiment, beside)[4:]
        typed = dict(word.removeprefix("--").split("=", 1) for word in words)
        assert (label, typed["seeds"], typed["beside"]) == (experiment.label, str(experiment.seed), "1")
        assert command("run", label, seeds=experiment.seed, beside=beside, **options).code == 0
        return SimpleNamespace(experiment=experiment, process=SimpleNamespace(poll=lambda: 0, returncode=0), log=None)

    monkeypatch.setattr(runner, "start", start)
    assert command("claim", "lr", jobs=2, **options).code == 0
    again = command("claim", "lr", jobs=2, **options)
    assert (again.code, len(labels)) == (0, 2)
    assert "2 have a record, 0 to do" in again.output
    records = read_records(tmp_path / "records")
    facts = {(each["commit"], each["shared_device_with"], each["embedding_scale"]) for each in records}
    assert facts == {("abc", 1, 4.0)}
    assert all(each["validation"][-1]["validation_loss"] > 0 for each in records)
    for weights in (records[0]["final"], records[0]["averaged"]):
        hashes = records[0]["final"]["documents"]["hash"]
        rows = list(zip(hashes, weights["documents"]["nats"], weights["documents"]["tokens"], strict=True))
        for half, odd in {"choose": "02468ace", "report": "13579bdf"}.items():
            chosen = [(nats, tokens) for name, nats, tokens in rows if name[-1] in odd]
            loss = sum(nats for nats, _ in chosen) / sum(tokens for _, tokens in chosen) if chosen else None
            assert weights[half] == (loss if loss is None else pytest.approx(loss, abs=1e-3)), "by the last bit"
    assert records[0]["averaged"]["steps"] == 1, "the last tenth of two steps"
    listing = {name: options[name] for name in ("queue", "data", "records")}
    for given, state in (({}, "done"), ({"data": None}, "waiting")):  # the queue's own data is not this
        output = command("list", "lr", **listing | given).output
        assert output.count(state) == 2
        assert all(label in output for label in labels)
    assert command("list", "lr", seeds="0,7", queue=options["queue"]).output.count("waiting") == 4


def test_a_run_that_continues_another_trains_it_first(tmp_path, place):
    source = {"recipe": str(tmp_path / "tiny.yaml"), "set": {"model.method": "ponder"}}
    options = place({"from": source, "set": {"train.lr": 1e-4}, "seeds": [3]})
    (experiment,) = read_queue(options["queue"]).experiments
    assert experiment.label == "tiny-lr-0.0001-from-tiny-method-ponder-seed-3"
    assert command("run", experiment.label, **options).code == 0
    (record,) = read_records(tmp_path / "records")
    assert record["recipe"]["model"]["backbone"] == "from tiny-method-ponder-seed-3"
    assert record["embedding_scale"] == 4.0, "the source's own"
    assert (tmp_path / "runs" / "tiny-method-ponder-seed-3" / "final").is_dir()
    here = Corpus("", None, record["data"], "")
    assert record_of(experiment, [record], here) is not None
    assert record_of(experiment.with_seed(4), [record], here) is None


def test_a_record_counts_for_a_claim_if_it_has_its_measurements(tmp_path, place):
    """One run measures for all claims; a run that is repeated for a measurement leaves the first record alone."""
    options = place({}, {"claim": "table1", "measure": ["steps", "reuse"]})
    queue = read_queue(options["queue"])
    plain, measured = queue.experiments
    assert plain.label == measured.label
    assert queue.measures_of(plain) == ("steps", "reuse")
    assert command("run", plain.label, **options).code == 0
    (record,) = read_records(tmp_path / "records")
    here = Corpus("", None, record["data"], "")
    assert record_of(plain, [record], here) is record_of(measured, [record], here) is record
    assert sum(record["measured"]["steps"]["tokens"]) > 0
    assert (record["measured"]["reuse"]["trained"], record["measured"]["reuse"]["gap"]) == ("state", 0)
    bare = record | {"measured": {}}
    assert record_of(plain, [bare], here) is bare
    assert record_of(measured, [bare], here) is None
    assert command("run", plain.label, **options).code == 0
    records = sorted(read_records(tmp_path / "records"), key=lambda each: each["file"])
    assert [each["file"].endswith("-again-1.json") for each in records] == [True, False]
    twice = dataclasses.replace(plain, again=1)
    assert record_of(twice, [record], here) is None
    assert (record_of(twice, records, here) or {})["again"] == 1


def test_a_run_that_is_cut_while_it_is_measured_keeps_what_it_has(tmp_path, monkeypatch, place):
    def cut(*_):
        raise KeyboardInterrupt

    options = place({"claim": "table1", "measure": ["steps", "reuse"]})
    monkeypatch.setitem(MEASURES, "reuse", cut)
    assert command("run", "tiny-seed-0", **options).code == 130
    (record,) = read_records(tmp_path / "records")
    assert list(record["measured"]) == ["steps"]
    assert record["validation"][-1]["validation_loss"] > 0


def test_a_run_that_serves_two_claims_is_trained_once(place, started):
    command("next", jobs=2, **place({}, {"claim": "table1"}))
    assert [experiment.label for experiment, _ in started] == ["tiny-seed-0"]


def test_runs_that_time_the_device_do_not_share_it(place, started):
    options = place({}, {"claim": "table1", "measure": ["speed"], "seeds": [1]})
    assert "start them with --jobs 1" in command("next", jobs=2, **options).output
    command("next", **options)
    assert [(experiment.seed, beside) for experiment, beside in started] == [(0, 1), (0, 0), (1, 0)]


@pytest.fixture
def endless(tmp_path, monkeypatch):
    """Replaces the processes of runs by ones that never end, after some logged ``steps``; returns those processes."""
    processes, steps = [], [0]

    def start(experiment, setup, *, beside):
        metrics = setup.metrics(experiment)
        metrics.parent.mkdir(parents=True)
        metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(steps[0])))
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return runner.Running(experiment, processes[-1], tmp_path / "log")

    monkeypatch.setattr(runner, "start", start)
    return SimpleNamespace(processes=processes, steps=steps)


@pytest.mark.parametrize(("steps", "count"), [(0, 2), (1, 3)])
def test_as_many_runs_start_as_all_end_in_time(monkeypatch, place, endless, steps, count):
    """Runs of 100 seconds each and 10 to start: two of them end within 250, and three if each has half behind it."""

    def interrupt(*_):
        raise KeyboardInterrupt

    endless.steps[0] = steps
    monkeypatch.setattr(runner, "seconds_alone", lambda setup, waiting, known: dict.fromkeys(waiting, 100.0))
    monkeypatch.setattr(runner, "_PROGRESS", 0.0)
    monkeypatch.setattr(runner, "_progress", interrupt)
    assert command("claim", "lr", jobs=3, minutes=250 / 60, **place({"seeds": [0, 1, 2, 3]})).code == 130
    assert len(endless.processes) == count


def test_a_run_that_is_cut_leaves_no_record_and_its_process_ends(tmp_path, monkeypatch, place, endless):
    monkeypatch.setattr(runner, "seconds_alone", lambda setup, waiting, known: dict.fromkeys(waiting, 0.0))
    options = place()
    options["queue"].write_text(options["queue"].read_text().replace("start: 10", "start: 0"))
    cut = command("claim", "lr", jobs=2, minutes=0.02, **options)
    assert cut.code == 1
    assert "2 runs are stopped" in cut.output
    assert [process.returncode is not None for process in endless.processes] == [True, True]
    assert not (tmp_path / "records").exists()


def test_a_run_that_is_repeated_begins_with_no_step_taken(tmp_path, monkeypatch):
    queue = read_queue(written(tmp_path))
    experiment = queue.of_claim("lr")[0]
    setup = runner.Setup(tmp_path / "queue.yaml", queue, tmp_path, tmp_path, "cpu", "abc")
    metrics = setup.metrics(experiment)
    metrics.parent.mkdir()
    metrics.write_text('{"step": 0}\n')
    assert runner.undone(experiment, setup) == 0.5
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *_, **__: None)
    runner.start(experiment, setup, beside=0)
    assert runner.undone(experiment, setup) == 1


def test_wrong_use_starts_nothing(tmp_path, monkeypatch, place):
    monkeypatch.setattr(runner, "start", lambda *_, **__: pytest.fail("started"))
    options = place()
    for words, more, message in (
        (("next",), {"minutes": 5}, "no run of this kind has been timed on cpu"),
        (("claim", "lr"), {"data": tmp_path / "nothing"}, "prepare it with: adaponder prepare TEXT"),
        (("claim", "lr"), {"seeds": "1,x"}, "--seeds"),
        (("run", "mini-nothing"), {}, "no such run"),
    ):
        with pytest.raises(InputError, match=message):
            command(*words, **options | more)
    with pytest.raises(InputError, match="--seeds needs a claim"):
        command("list", seeds=3, queue=options["queue"])


def test_two_runs_that_end_together_do_not_take_one_record_name(tmp_path, monkeypatch, place):
    """While a record gets its name, another process cannot lock the folder."""
    locked = []

    def write(path, record):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            locked.append(not lock(descriptor))
        finally:
            os.close(descriptor)

    monkeypatch.setattr(runner, "_write", write)
    assert command("run", "tiny-seed-0", **place({})).code == 0
    assert locked == [True]


@pytest.mark.parametrize("name", ["list", "next", "claim", "run", "corpus"])
def test_help_names_the_values_of_options(name):
    options = [line for line in CliRunner().invoke(app, [name, "--help"]).output.splitlines() if " --" in line]
    assert len(options) > 1
    assert not [line for line in options if "<" in line.replace("<=", "")]
