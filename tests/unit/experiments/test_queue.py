"""The queue of experiments: what has a record is skipped, what cannot finish is not started, records name their run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from adaponder.errors import InputError
from adaponder.files import lock
from adaponder.methods import method_class
from adaponder.recipes import load_recipe
from adaponder.training.build import config_of
from experiments import runner
from experiments.__main__ import app
from experiments.identity import identity
from experiments.measures import MEASURES
from experiments.queue import Corpus, Experiment, Queue, read_queue
from experiments.records import _locked, read_records, record_of
from experiments.runner import choose, device_seconds, wall_seconds
from training_support import corpus

ROOT = Path(__file__).parents[3]
TINY = """
base: cpu/demo
model:
  backbone: {model_type: gpt_neox, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32}
data: {sequence: 16}
train: {steps: 2, global_batch: 2, ponder_start: 0, ponder_full: 0, eval_tokens: 64, log_every: 1}
"""


def command(*words: object, **options: object) -> int:
    """Runs ``python -m experiments`` in this process; returns the exit code."""
    typed = [f"--{name}={value}" for name, value in options.items() if value is not None]
    result = CliRunner().invoke(app, [*map(str, words), *typed], catch_exceptions=False)
    print(result.output)
    return result.exit_code


@pytest.fixture(scope="module")
def shipped() -> Queue:
    return read_queue(ROOT / "experiments" / "queue.yaml")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return corpus(tmp_path_factory.mktemp("text"))


def written(folder: Path, **changes) -> Path:
    """A queue of two claims on a tiny recipe."""
    tiny = folder / "tiny.yaml"
    tiny.write_text(TINY)
    raw = {
        "data": {"folder": str(folder / "data"), "hash": "0" * 16, "prepare": "adaponder prepare TEXT --out data"},
        "seconds": {"hardware": "NVIDIA H200", "start": 10, "iteration": 30},
        "claims": {"lr": "rates", "table1": "methods"},
        "runs": [
            {"claim": "lr", "recipe": str(tiny), "each": {"train.lr": [0.001, 0.002]}},
            {"claim": "table1", "recipe": str(tiny), "seeds": [0, 1]},
        ],
    }
    path = folder / "queue.yaml"
    path.write_text(yaml.safe_dump(raw | changes))
    return path


def test_the_queue_that_ships_is_whole_and_begins_with_noise_and_the_open_corpus(shipped):
    queue = shipped
    assert list(queue.claims)[:2] == ["noise", "open"]
    assert [each.claim for each in queue.experiments[:8]] == ["noise"] * 8
    runs = {(each.label, identity(each.resolved().as_dict()), each.corpus, each.again) for each in queue.experiments}
    labels, computed = {label for label, *_ in runs}, {tuple(what) for _, *what in runs}
    assert len(runs) == len(labels) == len(computed), "a run has one label, and a label is of one run"
    methods = {each.resolved().model.method for each in queue.of_claim("lr")}
    assert methods == {"vanilla", "ponder", "loop", "adaponder", "mor", "ouro", "pause"}
    for each in queue.experiments:
        trained = [each.resolved(), *([each.source.resolved()] if each.source else [])]
        tokens = sum(one.train.steps * one.train.global_batch * one.data.sequence for one in trained)
        # Puzzles are learned or not: what counts there is the share of right answers; `half` is about shorter runs.
        least = 15_000_000 if each.claim.startswith("hops") else 45_000_000 if each.claim == "half" else 90_000_000
        assert tokens >= least, f"{each.label}: a claim stands on 90M tokens at least, of puzzles 15M"


def test_every_declared_run_builds_a_model_and_measures_what_can_be_measured(shipped):
    """A model on no device: its settings are checked where a run would begin."""
    queue = shipped
    built = set()
    for each in queue.experiments:
        assert set(each.measures) <= set(MEASURES), each.label
        recipe = each.resolved()
        known = json.dumps(recipe.as_dict()["model"], default=str)
        if known in built:
            continue
        built.add(known)
        if (config := config_of(recipe)) is None:
            assert each.source is not None, "a checkpoint that is continued is one that the queue trains"
            assert config_of(each.source.resolved()) is not None
        else:
            assert method_class(config.method).own_parameters(config) >= 0
    assert len(built) > 20


def test_the_claims_of_the_issue_are_there_and_each_has_runs(shipped):
    queue = shipped
    wanted = "lr table1 frontier gates kv-reuse iterations sensitivity schedule table2 nll-by-step policies"
    wanted += " acceleration downstream"
    for claim in wanted.split():
        assert queue.of_claim(claim), claim
    paired = {"mini/vanilla", "mini/ponder-k2", "mini/ponder-k3", "mini/ponder", "mini/adaponder"}
    for recipe in paired:
        seeds = {e.seed for e in queue.of_claim("table1") if (e.recipe, e.changes) == (recipe, ("train.lr=0.004",))}
        assert seeds >= {0, 1, 2}, recipe


def test_records_that_ship_are_of_runs_in_the_queue_and_say_what_they_stand_on(shipped):
    queue = shipped
    records = [each for each in read_records(ROOT / "experiments" / "records") if each["data"] == queue.data_hash]
    assert records
    named = {"date", "commit", "hardware", "versions", "recipe_hash", "seed", "data", "embedding_scale"}
    assert all(named <= record.keys() for record in records)
    done = [each for each in queue.experiments if record_of(each, records, queue.main)]
    fair = {(e.recipe, e.changes) for e in done if e.claim == "lr"}
    assert {("mini/vanilla", (f"train.lr={lr}",)) for lr in (0.002, 0.004, 0.008)} <= fair


def test_the_command_line_shows_a_claim_with_any_seeds(tmp_path):
    listed = CliRunner().invoke(app, ["list", "lr", "--seeds", "0,7", "--queue", str(written(tmp_path))])
    assert listed.exit_code == 0, listed.output
    assert listed.output.count("waiting") == 4


def test_a_claim_with_other_seeds_has_every_setting_once_for_each(tmp_path):
    queue = read_queue(written(tmp_path))
    assert [each.seed for each in queue.of_claim("table1")] == [0, 1]
    chosen = queue.of_claim("lr", seeds=[3, 4])
    assert [(each.changes[-1], each.seed) for each in chosen] == [
        ("train.lr=0.001", 3),
        ("train.lr=0.002", 3),
        ("train.lr=0.001", 4),
        ("train.lr=0.002", 4),
    ]
    with pytest.raises(InputError, match="choose one of lr, table1"):
        queue.of_claim("frontier")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": [{"claim": "lr", "recipe": "cpu/none"}]}, "cpu/none: neither a recipe"),
        ({"runs": [{"claim": "lr", "recipe": "cpu/demo", "set": {"train.stpes": 3}}]}, "train.stpes: no such field"),
        ({"runs": [{"claim": "other", "recipe": "cpu/demo"}]}, "claim other is not among"),
        ({"runs": [{"claim": "lr", "recipe": "cpu/demo", "seed": 3}]}, "seed: no such field of a run"),
        ({"data": {"folder": "x"}}, "hash"),
        ({"seconds": None}, "NoneType"),
        ({"claims": ["lr"]}, "AttributeError"),
        ({"runs": [{"claim": "lr", "recipe": "cpu/demo", "each": [1]}]}, "AttributeError"),
        ({"runs": [{"claim": "lr", "recipe": "cpu/demo", "corpus": "none"}]}, "corpus none is not among"),
        ({"runs": [{"claim": "lr", "recipe": "cpu/demo", "from": {"seed": 1}}]}, "from.seed: no such field"),
        ({"runs": [{"claim": "lr", "recipe": "cpu/demo", "from": {"recipe": "cpu/none"}}]}, "cpu/none: neither"),
    ],
)
def test_a_queue_that_is_wrong_says_where(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        read_queue(written(tmp_path, **changes))


def test_a_run_is_known_by_what_it_computes_alone():
    recipe = load_recipe("mini/ponder").as_dict()
    known = identity(recipe)
    same = [
        load_recipe("mini/ponder", ["data.source=elsewhere", "train.log_every=3", "train.keep_logits=true"]),
        load_recipe("mini/ponder", ["model.embedding_scale=16", "train.gate_lr=null", "train.steps=3000.0"]),
    ]
    assert [identity(each.as_dict()) for each in same] == [known] * 2
    later = json.loads(json.dumps(recipe))
    del later["train"]["target_gain"]  # a record from before the field was there
    assert identity(later) == known
    for change in (
        "train.seed=1",
        "train.lr=2e-3",
        "model.embedding_scale=1",
        "data.sequence=512",
        "model.iterations=2",
        "train.clip=null",
    ):
        assert identity(load_recipe("mini/ponder", [change]).as_dict()) != known, change


def test_seconds_come_from_runs_of_the_same_model_on_the_same_hardware(tmp_path):
    queue = read_queue(written(tmp_path))
    experiment = Experiment("lr", "mini/ponder-k2", ("train.lr=0.002",), 1)
    tokens = 3000 * 32 * 1024
    assert device_seconds(experiment, queue, [], "NVIDIA H200") == 60  # two iterations by the queue's estimate
    assert device_seconds(experiment, queue, [], "another") is None
    timed = {
        "recipe": load_recipe("mini/ponder-k2", ["train.lr=8e-3"]).as_dict(),
        "hardware": "another",
        "tokens_per_second": tokens / 300,
        "shared_device_with": 2,
    }
    assert device_seconds(experiment, queue, [timed], "another") == pytest.approx(100)
    deeper = dataclasses.replace(experiment, recipe="mini/ponder")
    assert device_seconds(deeper, queue, [timed], "another") is None
    assert wall_seconds(150, queue) >= 10 + 150


def test_what_cannot_finish_is_not_started_and_a_shorter_run_may_go_first():
    long, short = (Experiment("lr", "mini/ponder", (), seed) for seed in (0, 1))
    cost = {long: 100.0, short: 40.0}.__getitem__
    assert choose([long, short], cost, left=100) is long
    assert choose([long, short], cost, left=99) is short
    assert choose([long, short], cost, left=39) is None
    assert choose([long, short], cost, left=None) is long


def test_runs_leave_one_record_each_and_are_never_repeated(tmp_path, capsys, monkeypatch, data):
    """Children run in this process here: what they are is the same command."""
    path = written(tmp_path)
    place = {"queue": path, "data": data, "records": tmp_path / "records", "runs": tmp_path / "runs", "commit": "abc"}
    started = []

    def start(experiment, where, *, beside):
        started.append(experiment.label)
        label, *words = where.command(experiment, beside)[4:]
        typed = dict(word.removeprefix("--").split("=", 1) for word in words)
        assert (label, typed["seeds"], typed["beside"]) == (experiment.label, str(experiment.seed), "1")
        assert command("run", experiment.label, seeds=experiment.seed, beside=beside, **place) == 0
        return type("Done", (), {"experiment": experiment, "process": _Ended(), "log": None})()

    monkeypatch.setattr(runner, "start", start)
    assert command("claim", "lr", jobs=2, **place) == 0
    assert len(started) == 2
    assert command("claim", "lr", jobs=2, **place) == 0
    assert len(started) == 2, "both have a record"
    assert "2 have a record, 0 to do" in capsys.readouterr().out
    records = read_records(tmp_path / "records")
    assert {(each["commit"], each["shared_device_with"], each["embedding_scale"]) for each in records} == {
        ("abc", 1, 4.0)
    }
    assert all(each["validation"][-1]["validation_loss"] > 0 for each in records)
    listing = {name: place[name] for name in ("queue", "data", "records")}
    for given, state in (({}, "done"), ({"data": None}, "waiting")):  # the queue's own data is not this
        command("list", "lr", json=tmp_path / "list.json", **listing | given)
        assert {each["state"] for each in json.loads((tmp_path / "list.json").read_text())["runs"]} == {state}


def place_of(tmp_path, data, path) -> dict:
    return {"queue": path, "data": data, "records": tmp_path / "records", "runs": tmp_path / "runs", "commit": "abc"}


def test_a_run_that_continues_another_trains_it_first_and_both_are_known_by_what_they_are(tmp_path, data):
    tiny = written(tmp_path).parent / "tiny.yaml"
    entry = {"claim": "lr", "recipe": str(tiny), "from": {"recipe": str(tiny), "set": {"model.method": "ponder"}}}
    path = written(tmp_path, runs=[entry | {"set": {"train.lr": 1e-4}, "seeds": [3]}])
    (experiment,) = read_queue(path).experiments
    assert experiment.label == "tiny-lr-0.0001-from-tiny-method-ponder-seed-3"
    assert command("run", experiment.label, **place_of(tmp_path, data, path)) == 0
    (record,) = read_records(tmp_path / "records")
    assert record["recipe"]["model"]["backbone"] == "from tiny-method-ponder-seed-3"
    assert record["embedding_scale"] == 4.0, "the source's own"
    assert (tmp_path / "runs" / "tiny-method-ponder-seed-3" / "final").is_dir()
    here = Corpus("", None, record["data"], "")
    assert record_of(experiment, [record], here) is not None
    assert record_of(experiment.with_seed(4), [record], here) is None


def test_a_record_counts_for_a_claim_if_it_measured_what_the_claim_wants(tmp_path, data):
    """One run measures for all claims; a run that is repeated for a measurement leaves the first record alone."""
    tiny = str(written(tmp_path).parent / "tiny.yaml")
    runs = [{"claim": "lr", "recipe": tiny}, {"claim": "table1", "recipe": tiny, "measure": ["steps", "reuse"]}]
    path = written(tmp_path, runs=runs)
    plain, measured = read_queue(path).experiments
    assert plain.label == measured.label
    assert read_queue(path).measures_of(plain) == ("steps", "reuse")
    place = place_of(tmp_path, data, path)
    assert command("run", plain.label, **place) == 0
    (record,) = read_records(tmp_path / "records")
    here = Corpus("", None, record["data"], "")
    assert record_of(plain, [record], here) is record_of(measured, [record], here) is record
    found = record["measured"]
    assert sum(found["steps"]["tokens"]) > 0
    assert found["reuse"]["trained"] == "state"
    assert found["reuse"]["gap"] == 0, "trained as it is evaluated"
    bare = record | {"measured": {}}
    assert record_of(plain, [bare], here) is bare
    assert record_of(measured, [bare], here) is None
    assert command("run", plain.label, **place) == 0
    names = sorted(each["file"] for each in read_records(tmp_path / "records"))
    assert len(names) == 2
    assert names[0].endswith("-again-1.json")
    twice = dataclasses.replace(plain, again=1)
    assert record_of(twice, [record], here) is None
    assert (record_of(twice, read_records(tmp_path / "records"), here) or {})["again"] == 1


def test_a_run_that_is_cut_while_it_is_measured_keeps_what_it_has(tmp_path, monkeypatch, data):
    def cut(*_):
        raise KeyboardInterrupt

    tiny = str(written(tmp_path).parent / "tiny.yaml")
    path = written(tmp_path, runs=[{"claim": "table1", "recipe": tiny, "measure": ["steps", "reuse"]}])
    (experiment,) = read_queue(path).experiments
    place = place_of(tmp_path, data, path)
    monkeypatch.setitem(MEASURES, "reuse", cut)
    assert command("run", experiment.label, **place) == 130
    (record,) = read_records(tmp_path / "records")
    assert list(record["measured"]) == ["steps"]
    assert record["validation"][-1]["validation_loss"] > 0


def test_a_run_that_serves_two_claims_is_trained_once(tmp_path, monkeypatch, data):
    tiny = str(tmp_path / "tiny.yaml")
    path = written(tmp_path, runs=[{"claim": claim, "recipe": tiny} for claim in ("lr", "table1")])
    started = []

    def start(experiment, where, *, beside):
        started.append(experiment.label)
        return type("Done", (), {"experiment": experiment, "process": _Ended(), "log": None})()

    monkeypatch.setattr(runner, "start", start)
    command("next", jobs=2, queue=path, data=data, runs=tmp_path / "runs", commit="abc")
    assert started == ["tiny-seed-0"]


def test_runs_that_time_the_device_do_not_share_it(tmp_path, monkeypatch, capsys, data):
    tiny = str(written(tmp_path).parent / "tiny.yaml")
    runs = [{"claim": "lr", "recipe": tiny}, {"claim": "table1", "recipe": tiny, "measure": ["speed"], "seeds": [1]}]
    started = []

    def start(experiment, where, *, beside):
        started.append((experiment.seed, beside))
        return type("Done", (), {"experiment": experiment, "process": _Ended(), "log": None})()

    monkeypatch.setattr(runner, "start", start)
    place = place_of(tmp_path, data, written(tmp_path, runs=runs))
    command("next", jobs=2, **place)
    assert started == [(0, 1)]
    assert "start them with --jobs 1" in " ".join(capsys.readouterr().out.split())
    command("next", **place)
    assert started[1:] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(("steps", "started"), [(0, 2), (1, 3)])
def test_as_many_runs_start_as_all_end_in_time(tmp_path, monkeypatch, data, steps, started):
    """Runs of 100 seconds each and 10 to start: two of them end within 250, and three if each has half behind it."""
    path = written(tmp_path, runs=[{"claim": "lr", "recipe": str(tmp_path / "tiny.yaml"), "seeds": [0, 1, 2, 3]}])
    begun = []

    def start(experiment, where, *, beside):
        metrics = where.runs / experiment.label / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(steps)))
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return runner.Running(experiment, begun[-1], tmp_path / "log")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr(runner, "seconds_alone", lambda *_, **__: dict.fromkeys(read_queue(path).experiments, 100.0))
    monkeypatch.setattr(runner, "_PROGRESS", 0.0)
    monkeypatch.setattr(runner, "_progress", interrupt)
    place = place_of(tmp_path, data, path)
    assert command("claim", "lr", jobs=3, minutes=250 / 60, **place) == 130
    assert len(begun) == started


def test_a_run_that_is_repeated_begins_with_no_step_taken(tmp_path, monkeypatch, data):
    (experiment, _) = read_queue(written(tmp_path)).of_claim("lr")
    setup = runner.Setup(tmp_path / "queue.yaml", {"": Corpus("", str(data), "", "")}, tmp_path, tmp_path, "cpu", "abc")
    metrics = tmp_path / experiment.label / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 0}\n')
    assert runner.undone(experiment, setup) == 0.5
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *_, **__: None)
    runner.start(experiment, setup, beside=0)
    assert runner.undone(experiment, setup) == 1


class _Ended:
    returncode = 0

    def poll(self) -> int:
        return 0


def test_time_that_nobody_can_estimate_starts_nothing(tmp_path, monkeypatch, data):
    monkeypatch.setattr(runner, "start", lambda *_, **__: pytest.fail("started"))
    place = {"queue": written(tmp_path), "data": data, "commit": "abc"}
    with pytest.raises(InputError, match="no run of this kind has been timed on cpu"):
        command("next", minutes=5, records=tmp_path / "records", **place)
    with pytest.raises(InputError, match="prepare it with: adaponder prepare TEXT"):
        command("claim", "lr", **place | {"data": tmp_path / "nothing"})
    with pytest.raises(InputError, match="--seeds needs a claim"):
        command("list", seeds=3, queue=place["queue"])
    with pytest.raises(InputError, match="must be numbers"):
        command("claim", "lr", seeds="1,x", **place)
    with pytest.raises(InputError, match="no such run"):
        command("run", "mini-nothing", **place)


def test_a_run_that_is_cut_leaves_no_record_and_its_process_ends(tmp_path, monkeypatch, capsys, data):
    """A child that would never end, ended when time is over."""
    children = []

    def start(experiment, where, *, beside):
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return runner.Running(experiment, children[-1], tmp_path / "log")

    monkeypatch.setattr(runner, "start", start)
    path = written(tmp_path, seconds={"hardware": "NVIDIA H200", "start": 0, "iteration": 30})
    monkeypatch.setattr(runner, "seconds_alone", lambda *_, **__: dict.fromkeys(read_queue(path).experiments, 0.0))
    place = {"queue": path, "data": data, "commit": "abc", "runs": tmp_path / "runs"}
    assert command("claim", "lr", jobs=2, minutes=0.02, records=tmp_path / "records", **place) == 1
    assert len(children) == 2
    assert all(child.returncode is not None for child in children)
    assert "2 runs are stopped" in capsys.readouterr().out
    assert not (tmp_path / "records").exists()


def test_two_runs_that_end_together_do_not_take_one_record_name(tmp_path):
    with _locked(tmp_path):
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            assert not lock(descriptor)
        finally:
            os.close(descriptor)
