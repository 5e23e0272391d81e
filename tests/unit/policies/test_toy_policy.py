"""A policy is one file: that of an example is read with, generated with, evaluated by its word, metered and stored."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from own_policy import UntilLikely
from typer.testing import CliRunner

import lab_support
import support
from adaponder import AdaPonderError, LearnedGate, cli
from adaponder.evaluation.lab.profiles import load_profile, store
from adaponder.policies import Ranked, Schedule, parse_policy

K = 4


@pytest.fixture(scope="module")
def model():
    return support.tiny(iterations=K, dtype=torch.float32)


def test_it_is_evaluated_by_its_word_and_kept_in_a_profile(tmp_path):
    folder = lab_support.saved(tmp_path / "model", lab_support.opinionated())
    text = lab_support.written(tmp_path / "text.jsonl", documents=4)
    store(folder, "sure", {"policy": "until-likely:0.2"})
    assert load_profile(folder, "sure") == UntilLikely(0.2)
    depths = []
    for options in (["--policy", "until-likely:0.1"], ["--profile", "sure"]):
        record = tmp_path / "eval.json"
        arguments = ["eval", folder, "--data", text, "--window", "16", "--json", record, *options]
        result = CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        (row,) = json.loads(record.read_text())["rows"]
        depths.append(row["cost"]["iterations"])
    assert 1.0 < depths[0] < depths[1] < K


def test_a_policy_without_a_word_of_its_own_is_not_written_as_its_parent():
    class Stricter(UntilLikely):
        """Decides otherwise, and has inherited the word."""

    with pytest.raises(AdaPonderError, match="one line of text"):
        Stricter(0.5).as_line()
    assert type(parse_policy("until-likely:0.5")) is UntilLikely


@pytest.mark.parametrize("word", ["gate", "until-likely", "a:b", "a@b", "a,b"])
def test_a_word_that_is_taken_or_cannot_be_read_is_refused_and_named(word):
    def define() -> None:
        type("Another", (UntilLikely,), {"word": word})

    with pytest.raises(AdaPonderError, match=rf"Another\.word='{word}'"):
        define()
    assert parse_policy("gate:0.5") == LearnedGate(0.5)


def test_a_class_defined_again_takes_its_own_place(monkeypatch):
    monkeypatch.setattr("adaponder.policies.base._BY_WORD", {})
    bodies = {"word": "again", "__module__": "notebook", "__qualname__": "Again"}
    first, second = (type("Again", (UntilLikely,), dict(bodies)) for _ in range(2))
    assert first is not second
    assert type(parse_policy("again:0.5")) is second


def test_a_schedule_of_ones_own_is_ranked_by_its_word(monkeypatch, model):
    monkeypatch.setattr("adaponder.policies.base._BY_WORD", {"ranked": Ranked})

    @dataclass(frozen=True)
    class Halving(Schedule):
        """After the first iteration ``start`` of the tokens read on, after each later one half as many."""

        start: float = 1.0
        word: ClassVar[str] = "halving"
        value_field: ClassVar[str] = "start"

        def share(self, iteration: int) -> float:
            return self.start / 2**iteration

    policy = parse_policy("ranked-halving:0.5")
    assert policy == Ranked(Halving(start=0.5))
    assert policy.as_line() == "ranked-halving:0.5"
    assert parse_policy("halving:0.5@0.1,0.2,0.3") == Halving((0.1, 0.2, 0.3), start=0.5)
    depth = model(support.ids(2, 16), policy=policy).depth
    assert [(depth > i + 1).sum(1).tolist() for i in range(K - 1)] == [[8, 8], [4, 4], [2, 2]]


def test_a_policy_is_told_of_the_batch_with_padding_and_cached_tokens_counted(model, monkeypatch):
    batches, ids = [], support.ids(3, 12)
    monkeypatch.setattr(UntilLikely, "check_batch", lambda self, *sizes: batches.append(sizes))
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    asked = {"policy": UntilLikely(0.5), "use_cache": True}
    ledger = model(ids[:, :8], attention_mask=mask[:, :8], **asked).past_key_values
    model(ids[:, 8:], attention_mask=mask, past_key_values=ledger, **asked)
    assert batches == [(3, 8), (3, 12)]
