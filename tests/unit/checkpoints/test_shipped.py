"""The checkpoints that come with the package: whole, small, opened by name without a network, as their cards say."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import adaponder
from adaponder.checkpoints.loading import fetch
from adaponder.checkpoints.manifest import read_manifest, verify_files
from adaponder.checkpoints.shipped import NAMES, TEXT, data_of, shipped
from adaponder.commands.puzzle import by_need, read_puzzles
from adaponder.data.puzzles import BAR, STOP, Hops
from adaponder.errors import CheckpointError, InputError
from adaponder.evaluation.lab import profiles
from adaponder.recipes import load_recipe
from adaponder.serving.served import examples_of
from experiments.queue import identity

ROOT = Path(__file__).parents[3]
SAMPLE, HOPS = adaponder.sample_path(), adaponder.sample_path("sample-hops")
RECORD = ROOT / "experiments" / "records" / "sample.json"
CARDS = {"sample": "python", "sample-vanilla": "vanilla", "sample-adaponder": "adaponder"}


@pytest.mark.parametrize("name", NAMES)
def test_they_are_whole_and_small(name):
    folder = adaponder.sample_path(name)
    verify_files(folder)
    apart = {"profiles.json", "examples.json"}
    files = {*read_manifest(folder)["files"], "manifest.json"}
    assert files <= {path.name for path in folder.iterdir()} <= files | apart
    assert (folder / "model.safetensors").stat().st_size < 6e6  # each weight once, in bfloat16
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


def test_all_weights_together_are_small():
    assert sum((adaponder.sample_path(name) / "model.safetensors").stat().st_size for name in NAMES) < 20e6


@pytest.mark.parametrize("name", ["sample", "sample-hops"])
def test_a_name_means_a_folder_here_first_and_its_full_name_always_the_package(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert fetch(name) == fetch(f"adaponder:{name}") == adaponder.sample_path(name)
    (tmp_path / name).mkdir()
    assert shipped(name) is None
    assert data_of(name) == name
    with pytest.raises(CheckpointError, match=f"comes with adaponder is adaponder:{name}"):
        fetch(name)
    assert fetch(f"adaponder:{name}") == adaponder.sample_path(name)
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text("")
    with pytest.raises(InputError, match=f"comes with adaponder is adaponder:{name}"):
        fetch(name)


def test_the_page_of_the_sample_opens_on_text_that_it_was_not_trained_on():
    first = examples_of(SAMPLE)["examples"][0]["texts"]
    held_out = (SAMPLE / TEXT).read_text()
    assert first
    assert all(text in held_out for text in first)


def test_the_text_of_a_sample_is_its_own_and_other_names_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data_of("sample") == str(SAMPLE / TEXT)
    with pytest.raises(InputError, match="--data"):
        data_of("sample-hops")
    with pytest.raises(CheckpointError, match="sample, sample-hops"):
        adaponder.sample_path("sample-cubes")


def test_the_cards_say_what_the_record_says_and_the_recipes_are_those_they_were_trained_by():
    record, card = json.loads(RECORD.read_text()), (SAMPLE / "README.md").read_text()
    for name, recipe in CARDS.items():
        model, text = record["models"][name], (adaponder.sample_path(name) / "README.md").read_text()
        assert identity(load_recipe(f"sample/{recipe}").as_dict()) == identity(model["recipe"])
        for row in model["rows"]:
            assert f"| `{name}` | {row['label']} | {row['iterations']:.3f} | {row['loss']:.4f} |" in card, row["label"]
        for fact in (f"{model['parameters']:,}", f"{model['seconds']} s of one {record['hardware']}", record["data"]):
            assert fact in text, fact
    rows = {name: {row["label"]: row for row in model["rows"]} for name, model in record["models"].items()}
    own = rows["sample"]["its own depths"]
    shares = [count / record["tokens"] for count in own["tokens_by_depth"]]
    assert " · ".join(f"{i}: {share:.1%}" for i, share in enumerate(shares, 1)) in card
    low, high = record["minus_vanilla"]["interval"]
    assert f"{record['minus_vanilla']['difference']:+.4f} [{low:+.4f}, {high:+.4f}]" in card
    # The bars that were set before it was trained, and the verdicts of the card.
    full, plain = rows["sample"]["depth 3"]["loss"], rows["sample-vanilla"]["depth 1"]["loss"]
    at = [rows["sample"][f"depth {depth}"]["loss"] for depth in (1, 2, 3)]
    early, last = record["loss_at_full_depth"]["halted early"], record["loss_at_full_depth"]["others"]
    reached = [
        full <= plain - 0.03,
        at[0] <= plain + 0.1,
        min(at[0] - at[1], at[1] - at[2]) >= 0.005,
        own["iterations"] <= 2.8 and own["loss"] - full <= 0.01,
        sum(share >= 0.05 for share in shares) >= 3,
        last - early >= 0.5 and record["loss_at_full_depth"]["interval"][0] > 0,
    ]
    verdicts = re.findall(r"^\| [^|]+ \| [^|]+ \| (reached|missed) \|$", card, re.MULTILINE)
    assert verdicts == ["reached" if value else "missed" for value in reached]


def test_its_profiles_are_a_dial_from_few_iterations_to_many_and_the_card_lists_them():
    found, card = profiles.stored(SAMPLE), (SAMPLE / "README.md").read_text()
    ladder = sorted(found, key=lambda name: found[name]["budget"])
    depths = [found[name]["depth"] for name in ladder]
    assert [found[name]["budget"] for name in ladder] == [1.25 + 0.25 * i for i in range(7)]
    assert depths == sorted(depths)
    for name in ladder:
        measured = found[name]
        assert abs(measured["depth"] - measured["budget"]) < 0.1
        assert f"| `{name}` | {measured['depth']:.2f} | {measured['loss']:.4f} | {measured['mflops']:.1f} |" in card
        assert profiles.load_profile(SAMPLE, name).fingerprint
    assert found[ladder[0]]["loss"] > found[ladder[-1]]["loss"]


def test_its_depth_follows_the_hops_and_its_answers_are_right():
    read = read_puzzles(AutoModelForCausalLM.from_pretrained(HOPS).eval(), Hops(seed=123, documents=100))
    rows = by_need(read)
    assert all(row["right"] > 0.95 for row in rows)
    assert [round(row["depth"]) for row in rows[:2]] == [1, 2]
    assert 3 < rows[2]["depth"] < 3.6 < rows[3]["depth"]
    assert all(row["right_once"] < 0.75 for row in rows[1:-1])
    assert rows[-1]["hops"] is None
    assert rows[-1]["depth"] < 1.2, "the last question is answered by elimination"
    in_steps = [[word not in (BAR, STOP) for word in words[: words.index(BAR)]] for words in read.words]
    assert np.mean([read.depth[row, : len(steps)][steps].mean() for row, steps in enumerate(in_steps)]) < 1.02


def test_its_card_says_what_its_record_says():
    record = json.loads((ROOT / "experiments" / "records" / "sample-hops.json").read_text())
    measured, card = record["measured"], (HOPS / "README.md").read_text()
    for row, full in zip(measured["by_hops"], measured["at_fixed_depth"]["4"], strict=True):
        cells = f"| {row['hops'] or 'the last'} | {row['questions']:,} | {row['right']:.2%} | {row['depth']:.2f} |"
        assert f"{cells} {full:.2%} | {row['right_once']:.2%} |" in card
    for fact in (
        f"{measured['accuracy']:.2%} of",
        f"{measured['accuracy_at_full_depth']:.2%} at full",
        f"read {measured['depth_of_step_letters']:.2f} times",
        f"but the asked letters {measured['depth_of_other_words']:.2f} times",
        f"{measured['depth_of_all_words']:.2f} times on average",
        f"{measured['spearman_of_hops_and_depth']:.3f}, last",
        f"have {measured['iterations_over_need']:.2f} iterations more",
        f"{record['parameters']:,}",
    ):
        assert fact in card, fact
