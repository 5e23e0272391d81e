"""adaponder eval --tasks: what it prints and writes, the paper's suite beside its Pythia, and refusals before work."""

import json

import pytest
from transformers import GPTNeoXConfig, LlamaConfig

from adaponder import AdaPonderConfig
from adaponder.commands import tasks
from adaponder.errors import InputError
from adaponder.evaluation.tasks.suites import PAPER
from adaponder.policies import FixedDepth
from harness_support import ARC, write_records

SHAPES = {"Pythia-410M": (1024, 24, 16), "Pythia-1.4B": (2048, 24, 16), "Pythia-2.8B": (2560, 32, 32)}
TWO = {"tasks": ["arc_easy", "lambada_openai"], "fewshot": [0]}


def family(cls, hidden, layers, heads):
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return AdaPonderConfig(backbone_config=cls(**shape, intermediate_size=4 * hidden))


def test_a_run_prints_scores_with_their_split_depth_and_cost(checkpoint, records, tmp_path, capsys):
    out = tmp_path / "result.json"
    result = tasks.run_tasks(checkpoint=checkpoint, **TWO, task_data=records, dtype="float64", json=out)
    shown = capsys.readouterr().out
    for word in ("arc_easy, 0-shot", "acc_norm", "perplexity", "iterations"):
        assert word in shown
    assert result == json.loads(out.read_text())
    for task in result["tasks"]:
        assert task["split"] == "test"
        assert 1 < task["cost"]["iterations"] < 3
        assert task["cost"]["flops_ratio"] > 1
    arc, lambada = result["tasks"]
    assert arc["items"] == 4
    assert arc["metrics"]["acc"]["stderr"] > 0
    assert lambada["metrics"]["perplexity"]["stderr"] > 0


def test_the_suite_averages_and_gives_no_difference_to_an_unknown_shape(checkpoint, records):
    options = {"suite": "paper", "task_data": records, "limit": 2, "policy": FixedDepth(2)}
    result = tasks.run_tasks(checkpoint=checkpoint, **TWO, **options)
    assert result["tasks"][0]["items"] == result["tasks"][0]["cost"]["iterations"] == 2
    (row,) = result["suite"]["results"]
    scores = [task["metrics"]["acc"]["value"] * 100 for task in result["tasks"]]
    assert row["average"] == pytest.approx(sum(scores) / 2)
    assert row["difference"] is None


@pytest.mark.parametrize("name", SHAPES)
def test_the_matched_pythia_is_the_one_of_the_same_shape(name, capsys):
    matched = PAPER.matched(family(GPTNeoXConfig, *SHAPES[name]))
    assert matched is not None
    assert matched.name == name
    compared = PAPER.compare(dict.fromkeys(PAPER.tasks, 60.0), 5, matched)
    assert compared.difference == pytest.approx(60 - sum(matched.scores[5]) / 9)
    tasks.show_suite(PAPER, [compared], matched)
    assert f"{compared.difference:+.1f}" in capsys.readouterr().out


def test_another_family_or_another_shape_has_no_pythia_and_averages_are_those_the_paper_prints():
    assert PAPER.matched(family(LlamaConfig, *SHAPES["Pythia-410M"])) is None
    assert PAPER.matched(family(GPTNeoXConfig, 512, 6, 8)) is None
    printed = {"410M": (47.6, 47.6), "1.4B": (54.1, 54.1), "2.8B": (57.3, 57.6), "6.9B": (59.1, 60.1)}
    for row in PAPER.references:
        averages = [sum(row.scores[shots]) / len(PAPER.tasks) for shots in (0, 5)]
        assert averages == pytest.approx(printed[row.name.removeprefix("Pythia-")], abs=0.051)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tasks": []}, "--tasks: name at least one task"),
        ({"tasks": ["mmlu"], "suite": "paper"}, "mmlu: not in --suite paper"),
        ({"fewshot": [5]}, r"arc_easy/train\.jsonl"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"tasks": ["piqa"]}, r"no records of piqa; looked for .*piqa/validation\.jsonl"),
    ],
)
def test_wrong_use_is_told_by_its_option(asked, message, checkpoint, records):
    with pytest.raises(InputError, match=message):
        tasks.run_tasks(checkpoint=checkpoint, **{"tasks": ["arc_easy"], "fewshot": [0], "task_data": records} | asked)


def test_without_lm_eval_the_extra_is_named(checkpoint, monkeypatch):
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'adaponder\[eval\]'"):
        tasks.run_tasks(checkpoint=checkpoint, tasks=["arc_easy"], fewshot=[0])


def test_a_record_that_is_no_item_is_named(checkpoint, records, tmp_path):
    write_records(tmp_path, {"arc_easy": [ARC[0], ARC[1] | {"answerKey": "Z"}]})
    with pytest.raises(InputError, match=r"test\.jsonl: record 2 is not an item of arc_easy"):
        tasks.run_tasks(checkpoint=checkpoint, tasks=["arc_easy"], fewshot=[0], task_data=tmp_path)
