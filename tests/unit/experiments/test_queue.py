"""The queue of experiments and its identities: every run is declared once and known by what it computes alone."""

import dataclasses
import json
from dataclasses import fields
from pathlib import Path

import pytest

from adaponder.errors import InputError
from adaponder.methods import method_class
from adaponder.recipes import DataRecipe, ModelRecipe, TrainRecipe, load_recipe
from adaponder.training.build import config_of
from experiments.measures import MEASURES
from experiments.queue import Experiment, Queue, frozen_defaults, identity, read_queue
from experiments.runner import device_seconds
from queue_support import written

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parents[2] / "experiments"


@pytest.fixture(scope="module")
def shipped() -> Queue:
    return read_queue(EXPERIMENTS / "queue.yaml")


def test_runs_have_one_label_each_and_enough_tokens(shipped):
    assert [run.claim for run in shipped.experiments[:8]] == ["noise"] * 8
    settings = {(run.setting, run.with_seed(0).identity, run.corpus) for run in shipped.experiments}
    labels, computed = {label for label, *_ in settings}, {tuple(what) for _, *what in settings}
    assert len(settings) == len(labels) == len(computed), "a setting has one label, and a label is of one setting"
    for run in shipped.experiments:
        tokens = run.tokens + (run.source.tokens if run.source else 0)
        # Puzzles are learned or not: what counts there is the share of right answers; `half` is about shorter runs.
        least = 15_000_000 if run.claim.startswith("hops") else 45_000_000 if run.claim == "half" else 90_000_000
        assert tokens >= least, f"{run.label}: a claim stands on 90M tokens at least, of puzzles 15M"


def test_every_run_builds_a_model_and_measures_what_can_be_measured(shipped):
    """A model on no device: its settings are checked where a run would begin."""
    built = {json.dumps(run.shaped.as_dict()["model"], default=str): run for run in shipped.experiments}
    assert len(built) > 20
    for run in built.values():
        config = config_of(run.shaped)
        assert config is not None
        assert method_class(config.method).added_parameters(config) >= 0
    for run in shipped.experiments:
        assert set(run.measures) <= set(MEASURES), run.label


def test_a_claim_with_other_seeds_has_every_setting_once_for_each(tmp_path):
    queue = read_queue(written(tmp_path))
    assert [run.seed for run in queue.of_claim("table1")] == [0, 1]
    chosen = [(run.changes[-1], run.seed) for run in queue.of_claim("lr", seeds=[3, 4])]
    assert chosen == [(f"train.lr={rate}", seed) for seed in (3, 4) for rate in (0.001, 0.002)]
    with pytest.raises(InputError, match="choose one of lr, table1"):
        queue.of_claim("frontier")


RUN = {"claim": "lr", "recipe": "cpu/demo"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": [RUN | {"recipe": "cpu/none"}]}, "cpu/none is neither a shipped recipe"),
        ({"runs": [RUN | {"set": {"train.stpes": 3}}]}, "train.stpes: no such field"),
        ({"runs": [RUN | {"claim": "other"}]}, "claim other is not among"),
        ({"runs": [RUN | {"seed": 3}]}, "seed: no such field of a run"),
        ({"runs": [RUN | {"each": [1]}]}, "AttributeError"),
        ({"runs": [RUN | {"corpus": "none"}]}, "corpus none is not among"),
        ({"runs": [RUN | {"from": {"seed": 1}}]}, "from.seed: no such field"),
        ({"runs": [RUN | {"from": {"recipe": "cpu/none"}}]}, "cpu/none is neither"),
        ({"data": {"folder": "x"}}, "hash"),
        ({"seconds": None}, "NoneType"),
        ({"claims": ["lr"]}, "AttributeError"),
    ],
)
def test_a_wrong_queue_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        read_queue(written(tmp_path, **changes))


def test_every_record_keeps_its_identity():
    pinned = dict(reversed(line.split()) for line in (HERE / "identities.txt").read_text().splitlines())
    assert len(pinned) == 189
    computed = {name: identity(json.loads((EXPERIMENTS / "records" / name).read_text())["recipe"]) for name in pinned}
    assert computed == pinned


def test_identity_is_of_what_a_run_computes_alone():
    recipe = load_recipe("mini/ponder").as_dict()
    known = identity(recipe)
    for same in (
        ["data.source=elsewhere", "train.log_every=3", "train.keep_logits=true"],
        ["model.embedding_scale=16", "train.gate_lr=null", "train.steps=3000.0"],
    ):
        assert identity(load_recipe("mini/ponder", same).as_dict()) == known
    changes = ("train.seed=1", "train.lr=2e-3", "model.embedding_scale=1", "data.sequence=512", "model.iterations=2")
    for change in (*changes, "train.clip=null"):
        assert identity(load_recipe("mini/ponder", [change]).as_dict()) != known, change
    run = Experiment("lr", "mini/ponder", (), 4, source=Experiment("lr", "mini/vanilla", (), 4))
    assert run.identity == identity(run.resolved().as_dict()), "of seeds and sources, too"


def test_a_field_that_comes_or_goes_changes_no_identity():
    """A new field goes into defaults.yaml with its default; a removed one stays there."""
    required = {"backbone", "source", "steps", "global_batch"}
    recipe = load_recipe("mini/ponder").as_dict()
    for section, kind in (("model", ModelRecipe), ("data", DataRecipe), ("train", TrainRecipe)):
        defaults = frozen_defaults()[section]
        assert {field.name for field in fields(kind)} - required <= defaults.keys()
        for name, default in defaults.items():
            if recipe[section].get(name, ...) == default and name not in ("method", "embedding_scale"):
                shorter = {key: value for key, value in recipe[section].items() if key != name}
                assert identity(recipe | {section: shorter}) == identity(recipe), (section, name)


def test_seconds_come_from_runs_of_the_same_model_on_the_same_hardware(tmp_path):
    queue = read_queue(written(tmp_path))
    run = Experiment("lr", "mini/ponder-k2", ("train.lr=0.002",), 1)
    assert device_seconds(run, queue, [], "NVIDIA H200") == 60  # two iterations by the queue's estimate
    assert device_seconds(run, queue, [], "another") is None
    timed = {"recipe": load_recipe("mini/ponder-k2", ["train.lr=8e-3"]).as_dict(), "hardware": "another"}
    timed |= {"tokens_per_second": 3000 * 32 * 1024 / 300, "shared_device_with": 2}
    assert device_seconds(run, queue, [timed], "another") == pytest.approx(100)
    assert device_seconds(dataclasses.replace(run, recipe="mini/ponder"), queue, [timed], "another") is None
