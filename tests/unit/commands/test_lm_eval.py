"""lm-eval's own command line over a checkpoint: ``hf`` and ``adaponder`` score as ``adaponder eval --tasks`` does."""

import json
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

import lm_eval
from lm_eval.tasks import TaskManager

from adaponder import FixedDepth
from adaponder.commands import tasks
from adaponder.commands.lm_eval_model import AdaPonderLM
from adaponder.errors import InputError
from adaponder.evaluation.lab.profiles import store
from adaponder.serving.served import Served
from harness_support import POSITIONS, RECORDS, reader, words, write_records
from serving_support import serving

NAMES = ("arc_easy", "lambada_openai", "wikitext")


@pytest.fixture(scope="module")
def checkpoint(checkpoint):
    store(Path(checkpoint), "two", {"policy": "fixed:2"})
    return Path(checkpoint)


@pytest.fixture
def command_line(records, tmp_path, monkeypatch):
    """``command_line(*arguments)`` runs ``python -m adaponder.lm_eval`` on the records and returns its results."""
    library, include = Path(lm_eval.__file__).parent / "tasks", tmp_path / "tasks"
    include.mkdir()
    # An index of lm-eval's own thirteen thousand tasks takes ten seconds, and none of them is asked for.
    whole = TaskManager.__init__

    def indexed(self, *args, **kwargs):
        whole(self, *args, **kwargs | {"include_defaults": False})

    monkeypatch.setattr(TaskManager, "__init__", indexed)

    def run(*arguments: str, names=NAMES, records=records):
        for name in names:
            (source,) = library.rglob(f"{name}.yaml")
            data = {"test": str(records / name / "test.jsonl")}
            there = {"include": str(source), "task": f"{name}_here", "dataset_path": "json", "dataset_name": None}
            there |= {"dataset_kwargs": {"data_files": data}, "training_split": None, "validation_split": None}
            (include / f"{name}.yaml").write_text(yaml.safe_dump(there))
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        words = ["adaponder.lm_eval", *arguments, "--tasks", ",".join(f"{name}_here" for name in names)]
        words += ["--include_path", str(include), "--device", "cpu", "--batch_size", "2", "--output_path", str(out)]
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_module("adaponder.lm_eval", run_name="__main__")
        (written,) = out.rglob("results_*.json")
        return json.loads(written.read_text())

    return run


def metrics_of(result: dict) -> dict[str, float]:
    """Returns lm-eval's results by ``task metric``."""
    return {
        f"{task.removesuffix('_here')} {key.split(',')[0]}": value
        for task, metrics in result["results"].items()
        for key, value in metrics.items()
        if isinstance(value, float) and "_stderr" not in key and "," in key
    }


def our_metrics(result: dict) -> dict[str, float]:
    """Returns the results of ``adaponder eval --tasks --json`` by ``task metric``."""
    return {
        f"{task['task']} {name}": metric["value"]
        for task in result["tasks"]
        for name, metric in task["metrics"].items()
    }


@pytest.fixture(scope="module")
def expected(checkpoint, records):
    return tasks.run_tasks(checkpoint=str(checkpoint), tasks=list(NAMES), fewshot=[0], task_data=records)


def test_both_models_of_the_command_line_score_as_adaponder_eval_does(command_line, checkpoint, expected):
    scores = our_metrics(expected)
    assert len(scores) == 7
    assert [task["cost"]["iterations"] < 3 for task in expected["tasks"]] == [True] * 3, "some tokens must halt"
    result = command_line("--model", "hf", "--model_args", f"pretrained={checkpoint},dtype=float64")
    assert metrics_of(result) == pytest.approx(scores, rel=1e-9)
    result = command_line("--model", "adaponder", "--model_args", f"pretrained={checkpoint}")
    assert metrics_of(result) == pytest.approx(scores, rel=1e-9)
    cost = result["config"]["model_cost"]
    assert {name: cost[f"{name}_here"]["iterations"] for name in NAMES} == {
        task["task"]: task["cost"]["iterations"] for task in expected["tasks"]
    }


@pytest.mark.every
def test_local_completions_from_a_server_score_as_adaponder_eval_does(command_line, checkpoint, tmp_path, monkeypatch):
    """Items are short: lm-eval cuts those that exceed the positions of a server otherwise than those of a model."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    short = {name: [item for item in RECORDS[name] if len(str(item)) < 200] for name in NAMES}
    data = write_records(tmp_path / "short", short)
    with serving(Served(reader(), words(), name="tiny")) as server:
        how = f"model=tiny,base_url={server.address}/v1/completions,tokenizer={checkpoint},max_length={POSITIONS}"
        metrics = metrics_of(command_line("--model", "local-completions", "--model_args", how, records=data))
    scores = our_metrics(tasks.run_tasks(checkpoint=str(checkpoint), tasks=NAMES, fewshot=[0], task_data=data))
    assert metrics == pytest.approx(scores, rel=1e-9)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("argument", ["policy=fixed:2", "profile=two", "max_iterations=2"])
def test_policies_and_profiles_are_model_arguments(argument, command_line, checkpoint, records, expected):
    result = command_line(
        "--model", "adaponder", "--model_args", f"pretrained={checkpoint},{argument}", names=NAMES[1:2]
    )
    cost = result["config"]["model_cost"]["lambada_openai_here"]
    if argument == "max_iterations=2":
        assert cost["iterations"] <= 2
        return
    assert cost["iterations"] == 2
    assert result["config"]["model_policy"] == "fixed:2"
    what = {"tasks": [NAMES[1]], "fewshot": [0], "task_data": records}
    wanted = tasks.run_tasks(checkpoint=str(checkpoint), policy=FixedDepth(2), **what)
    assert metrics_of(result) == pytest.approx(our_metrics(wanted), rel=1e-12)
    assert metrics_of(result) != pytest.approx(our_metrics(expected), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("profile=none", "--profile none"),
        ("polcy=fixed:2", "--model_args polcy"),
        ("trust_remote_code=True", "--model_args trust_remote_code"),
        ("policy=fixed:2,tau=0.5", "--policy and --tau"),
    ],
)
def test_wrong_model_arguments_are_one_line(arguments, message, command_line, checkpoint, capsys):
    with pytest.raises(SystemExit) as exit:
        command_line("--model", "adaponder", "--model_args", f"pretrained={checkpoint},{arguments}")
    assert exit.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("model", ["hf", "adaponder"])
@pytest.mark.parametrize("given", ["pretrained={0}", "pretrained={1},tokenizer={0}", '{{"pretrained": "{0}"}}'])
def test_code_in_a_checkpoint_is_refused_in_one_line(given, model, command_line, checkpoint, tmp_path, capsys):
    hostile, canary = tmp_path / "hostile", tmp_path / "canary"
    shutil.copytree(checkpoint, hostile)
    settings = json.loads((hostile / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (hostile / "tokenizer_config.json").write_text(json.dumps(settings))
    (hostile / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    with pytest.raises(SystemExit) as exit:
        command_line("--model", model, "--model_args", given.format(hostile, checkpoint))
    assert exit.value.code == 1
    assert "auto_map" in capsys.readouterr().err
    assert not canary.exists()


def test_a_machine_without_a_gpu_reads_on_its_cpu_and_says_so(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = AdaPonderLM(str(checkpoint), device="cuda:0")  # what lm-eval says unless told
    assert model.model.device.type == "cpu"
    assert "computing on the CPU" in capsys.readouterr().err
    with pytest.raises(InputError, match="--device cuda:1"):
        AdaPonderLM(str(checkpoint), device="cuda:1")


def test_the_entry_point_that_lm_eval_looks_for_names_the_registered_class():
    from lm_eval.api.registry import get_model

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["adaponder"].partition(":")
    registered = getattr(__import__(module, fromlist=[name]), name)
    assert get_model("adaponder") is registered
