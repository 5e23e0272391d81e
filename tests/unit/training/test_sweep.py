"""A sweep is its runs: checked before any begins, each as if run alone, none run twice, and one table of all."""

import csv
import json
import os
import re
import shlex
import signal
from pathlib import Path

import matplotlib
import pytest
import torch

from adaponder.analysis.sensitivity import sensitivity
from adaponder.analysis.style import save
from adaponder.commands import sweep as command
from adaponder.config import AdaPonderConfig
from adaponder.errors import AdaPonderError, InputError
from adaponder.recipes import load_recipe, recipe_names
from adaponder.training import sweep as sweeping
from adaponder.training.build import config_of
from adaponder.training.run import train
from adaponder.training.sweep import plan, requested_depth
from adaponder.training.telemetry import Telemetry
from training_support import assert_same_weights, corpus, small

GRID = ["train.ponder_weight=1", "train.k_max=0.5,0.9"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    """A recipe file of four steps, two of them in stage 2."""
    folder = tmp_path_factory.mktemp("sweep")
    short = ("train.steps=4", "train.ponder_start=1", "train.ponder_full=2", "train.save_every=0")
    (folder / "tiny.yaml").write_text(small(corpus(folder), *short).to_yaml())
    return str(folder / "tiny.yaml")


@pytest.fixture(scope="module")
def swept(recipe, tmp_path_factory) -> Path:
    """A finished sweep of two runs. Others only read it."""
    out = tmp_path_factory.mktemp("swept") / "out"
    assert command.run_sweep(recipe, grid=GRID, out=out, quiet=True).exit_code == 0
    return out


def statuses(out: Path) -> list[str]:
    return [entry["status"] for entry in json.loads((out / "sweep.json").read_text())["runs"]]


def test_a_grid_is_the_product_of_its_axes_and_names_list_what_differs():
    runs = plan("mini/adaponder", ["train.ponder_weight=0,1e-2", "model.shared_gate=true,false"])
    assert [run.name for run in runs] == [
        "ponder_weight=0__shared_gate=true",
        "ponder_weight=0__shared_gate=false",
        "ponder_weight=0.01__shared_gate=true",
        "ponder_weight=0.01__shared_gate=false",
    ]
    assert runs[2].recipe.train.ponder_weight == 0.01
    assert runs[2].fields == {"train.ponder_weight": 0.01, "model.shared_gate": True}
    for run in runs:
        assert load_recipe("mini/adaponder", run.overrides).fingerprint == run.recipe.fingerprint


def test_one_at_a_time_holds_the_recipe_once_and_every_other_value_of_each_axis():
    axes = ["train.ponder_weight=0,0.1,0.2", "train.k_max=0.1,0.2"]
    runs = plan("mini/adaponder", axes, one_at_a_time=True)
    assert [run.name for run in runs] == ["base", "ponder_weight=0", "ponder_weight=0.2", "k_max=0.2"]
    assert runs[0].recipe.fingerprint == load_recipe("mini/adaponder").fingerprint
    assert runs[3].fields == {"train.ponder_weight": 0.1, "train.k_max": 0.2}
    # What the recipe leaves open resolves to the config's own: width 4 is the base, not a second run of it.
    widths = plan("mini/adaponder", ["model.gate_width=0,4"], one_at_a_time=True)
    assert [run.name for run in widths] == ["base", "gate_width=0"]
    moved = plan("mini/adaponder", axes, overrides=["train.k_max=0.2"], one_at_a_time=True)
    assert moved[0].fields["train.k_max"] == 0.2


def test_seeds_come_seed_by_seed_and_leave_the_names_of_the_first_alone():
    with pytest.raises(InputError, match="--seeds 0,0"):
        plan("mini/adaponder", [], seeds=[0, 0])
    alone = plan("mini/adaponder", ["train.k_max=0.1,0.2"])
    runs = plan("mini/adaponder", ["train.k_max=0.1,0.2"], seeds=[0, 7])
    assert [run.name for run in runs] == ["k_max=0.1", "k_max=0.2", "k_max=0.1__seed=7", "k_max=0.2__seed=7"]
    assert [run.recipe.fingerprint for run in runs[:2]] == [run.recipe.fingerprint for run in alone]
    assert [run.recipe.train.seed for run in runs] == [0, 0, 7, 7]
    assert [run.name for run in plan("mini/adaponder", [], seeds=[0, 7])] == ["base", "seed=7"]


def test_names_are_safe_for_file_systems_and_never_the_same():
    axes = ["train.betas=[0.9, 0.95],[0.9, 0.9]", "data.source=a/b c,a/b:c", f"data.tokenizer={'x' * 200},y"]
    names = [run.name for run in plan("mini/adaponder", axes)]
    assert len({name.casefold() for name in names}) == 8
    assert all(re.fullmatch(r"[A-Za-z0-9._=+-]{1,150}", name) for name in names)
    names = [run.name for run in plan("mini/adaponder", ["train.lr=1,2", "train.gate_lr=1,2"])]
    assert names[0] == "lr=1__gate_lr=1"


@pytest.mark.parametrize(
    ("grids", "field"),
    [
        ([], "--grid"),
        (["train.k_mx=0.1"], "train.k_max"),
        (["model.backbone.hiden_size=64"], "model.backbone.hidden_size"),
        (["k_max=0.1"], "section.field=value"),
        (["train.k_max=0.1,"], "section.field=value"),
        (["train.k_max=0.1,,0.2"], "--grid train.k_max"),
        (["train.steps=2001-99-99"], "--grid train.steps"),
        (["train.steps=" + "9" * 5000], "--grid train.steps"),
        (["train.k_max=few"], "train.k_max='few'"),
        (["train.k_max=0.1,2"], "train.k_max=2.0"),
        (["train.k_max=0.1", "train.k_max=0.2"], "train.k_max"),
        (["train.k_max=0.1,1e-1"], "--grid"),
        (["train.log_every=1,2"], "train.log_every"),
        (["train.seed=0,1"], "--seeds 0,1"),
        (["train.lr=1,2"], "--set and --grid"),
    ],
)
def test_a_bad_grid_is_an_error_that_names_the_field_before_anything_is_made(grids, field, tmp_path):
    with pytest.raises(AdaPonderError, match=re.escape(field)):
        command.run_sweep("cpu/demo", grid=grids, overrides=["train.lr=1e-3"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "depth"),
    [
        ([], 3.7),
        (["train.ponder_weight=0"], 4.0),
        (["model.iterations=2"], 1.9),
        (["train.steps=1321"], 3.85),  # ends half way through the warm-up of k
        (["model.method=mor"], 3.8),
        (["model.method=vanilla"], 1.0),
        (["model.method=ouro"], None),
        (["train.target_depth=2.5"], 2.5),
    ],
)
def test_what_is_requested_is_what_the_last_step_asks_for(overrides, depth):
    recipe = load_recipe("mini/adaponder", overrides)
    measured = requested_depth(recipe, config_of(recipe))
    assert measured == (None if depth is None else pytest.approx(depth))


def test_a_dry_run_prints_commands_that_are_the_runs_and_makes_nothing(recipe, tmp_path, capsys):
    out = tmp_path / "my out"
    done = command.run_sweep(recipe, grid=GRID, overrides=["train.lr=0.5"], out=out, dry_run=True)
    assert done.exit_code == 0
    assert not out.exists()
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("adaponder train")]
    assert len(lines) == 2
    for words, entry in zip(lines, done.result["runs"], strict=True):
        sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        assert load_recipe(words[2], sets).fingerprint == entry["fingerprint"]
        assert words[words.index("--out") + 1] == str(out / entry["name"])


def test_a_run_of_a_sweep_is_the_run_alone_bit_for_bit(recipe, swept, tmp_path):
    alone = load_recipe(recipe, ["train.ponder_weight=1", "train.k_max=0.9"])
    done = train(alone, out=tmp_path / "alone", quiet=True)
    assert done.final is not None
    assert_same_weights(swept / "ponder_weight=1__k_max=0.9", tmp_path / "alone")
    measured = done.trainer.evaluate(alone.train.eval_tokens)
    [entry] = [r for r in json.loads((swept / "sweep.json").read_text())["runs"] if r["name"].endswith("1__k_max=0.9")]
    assert {name: entry[name] for name in measured} == measured
    assert (entry["fingerprint"], entry["step"], entry["requested_depth"]) == (alone.fingerprint, 4, pytest.approx(1.2))


def test_the_table_is_written_three_times_and_the_figure_comes_from_the_json_alone(swept, tmp_path):
    result = json.loads((swept / "sweep.json").read_text(), parse_constant=pytest.fail)
    assert statuses(swept) == ["finished"] * 2
    assert [point["loss"]["count"] for point in result["points"]] == [1] * 2
    with (swept / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, entry in zip(rows, result["runs"], strict=True):
        assert float(row["train.k_max"]) == entry["fields"]["train.k_max"]
        assert (
            float(row["embedding_scale"])
            == entry["embedding_scale"]
            == AdaPonderConfig.from_pretrained(swept / entry["name"] / "final").embedding_scale
        )
        assert float(row["validation_loss"]) == entry["validation_loss"]
        assert [float(row[f"validation_halted_{i}"]) for i in (1, 2)] == entry["validation_halted"]
        assert entry["tokens_per_second"] > 0
    with matplotlib.rc_context({"axes.labelpad": 30.0}):  # a setting of the user that the style does not name
        drawn = save(sensitivity(result["runs"]), tmp_path / "again-0.1")
    assert [path.name for path in drawn] == ["again-0.1.png", "again-0.1.svg"]
    assert all(path.read_bytes() == (swept / f"sensitivity{path.suffix}").read_bytes() for path in drawn)


def test_what_is_finished_is_never_run_again(recipe, swept, monkeypatch, capsys):
    before = (swept / "sweep.json").read_bytes()
    monkeypatch.setattr(sweeping, "train", lambda *a, **k: pytest.fail("trained again"))
    assert command.run_sweep(recipe, grid=GRID, out=swept).exit_code == 0
    assert (swept / "sweep.json").read_bytes() == before
    shown = capsys.readouterr().out
    assert "2 done before, 0 to do" in " ".join(shown.split())
    assert "requested" in shown
    assert "scale" in shown  # of embeddings: "emb." may stand on a line of its own


@pytest.mark.parametrize(
    ("override", "says"), [("train.lr=0.5", "train.lr: 0.01 → 0.5"), ("train.eval_tokens=128", "train.eval_tokens")]
)
def test_a_folder_that_holds_another_run_is_an_error_that_names_the_field(recipe, swept, override, says):
    with pytest.raises(InputError, match=re.escape(says)):
        command.run_sweep(recipe, grid=GRID, overrides=[override], out=swept, quiet=True)


def stop_at(monkeypatch, name: str, step: int) -> None:
    advance, folders = Telemetry.advance, []
    begin = Telemetry.__init__

    def beginning(self, folder, **settings):
        folders.append(folder.name)
        begin(self, folder, **settings)

    def advancing(self, at):
        advance(self, at)
        if (folders[-1], at) == (name, step):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Telemetry, "__init__", beginning)
    monkeypatch.setattr(Telemetry, "advance", advancing)


@pytest.mark.every
def test_a_stopped_sweep_that_continues_equals_one_that_never_stopped(recipe, swept, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, "ponder_weight=1__k_max=0.5", 1)
        done = command.run_sweep(recipe, grid=GRID, out=out, quiet=True)
    assert done.exit_code == 130
    assert statuses(out) == ["stopped", "pending"]
    assert done.result["runs"][0]["step"] == 2
    # A run that was begun belongs to its recipe, as a finished one does.
    with pytest.raises(InputError, match=r"k_max=0\.5 .*train\.clip"):
        command.run_sweep(recipe, grid=GRID, overrides=["train.clip=9"], out=out, quiet=True)
    assert command.run_sweep(recipe, grid=GRID, out=out, quiet=True).exit_code == 0
    for run in plan(recipe, GRID):
        assert_same_weights(out / run.name, swept / run.name)


def test_a_signal_in_a_runs_last_step_stops_the_sweep_all_the_same(recipe, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stop_at(monkeypatch, "k_max=0.5", 3)
    assert command.run_sweep(recipe, grid=["train.k_max=0.5,0.9"], out=out, quiet=True).exit_code == 130
    assert statuses(out) == ["finished", "pending"]
    (out / "k_max=0.5" / "metrics.jsonl").unlink()
    with pytest.raises(AdaPonderError, match="metrics"):
        command.run_sweep(recipe, grid=["train.k_max=0.5"], out=out, quiet=True)


@pytest.mark.every
def test_a_run_that_fails_is_a_line_of_the_table_and_the_others_go_on(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    short = ["train.eval_tokens=64"]
    done = command.run_sweep(recipe, grid=["train.lr=100,1e-2"], overrides=short, seeds=[0, 1], out=out, quiet=True)
    assert done.exit_code == 1
    assert statuses(out) == ["failed", "finished", "failed", "finished"]
    failed, finished = done.result["points"]
    assert (failed["loss"], failed["runs"]) == (None, 2)
    assert finished["loss"]["count"] == 2
    assert finished["loss"]["deviation"] > 0
    assert "step" in done.result["runs"][0]["error"]
    shown = capsys.readouterr().out
    assert "lr=100__seed=1 failed: step" in shown
    assert "±" in shown
    assert (out / "sensitivity.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"grid": ["train.micro_batch=3,4"]}, "train.micro_batch=3"),
        ({"grid": ["data.sequence=32,64"]}, "data.sequence=64"),
        ({"grid": GRID, "device": "toaster"}, "--device toaster"),
        ({"grid": GRID, "device": "cuda"}, "--device cuda"),
        ({"grid": GRID, "processes": "2"}, "--dry-run"),
        ({"grid": GRID, "out": "nowhere/out"}, "nowhere"),
    ],
)
def test_what_could_not_run_is_an_error_before_anything_runs(recipe, settings, says, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "train", lambda *a, **k: pytest.fail("began"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", settings.pop("processes", "1"))
    out = tmp_path / settings.pop("out", "out")
    with pytest.raises(AdaPonderError, match=re.escape(says)):
        command.run_sweep(recipe, out=out, **settings, quiet=True)


def test_an_ablation_changes_at_most_three_fields_of_the_main_run():
    main = load_recipe("mini/adaponder").as_dict()
    for name in recipe_names():
        if name.startswith("ablation/"):
            recipe = load_recipe(name).as_dict()
            sections = [(recipe[section], main[section]) for section in ("model", "train")]
            changed = [key for changes, settings in sections for key in settings if changes[key] != settings[key]]
            assert recipe["data"] == main["data"], name
            assert len(changed) <= 3, name
