"""An exported folder computes what the package computes, where the package is not installed."""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock

import harness_support
from adaponder import AdaPonderForCausalLM, Objective
from adaponder.checkpoints.loading import tokenizer_of
from adaponder.conversion import export as exporting
from adaponder.conversion.open import load
from support import FAMILIES, ids, tiny

CASES = {
    "gpt_neox": {"family": "gpt_neox"},
    "mistral": {"family": "mistral"},  # its window is shorter than the text
    "qwen3": {"family": "qwen3"},
    "without gates": {
        "method": "ponder",
        "family": "qwen2-mixed",
        "embedding_scale": "sqrt(d)",
        "initial_multiplier": 2.0,
    },
    "other gates": {
        "family": "llama",
        "shared_gate": True,
        "gate_width": 0,
        "embedding_scale": 1.5,
        "expectation_top_k": 7,
    },
}
HALTING = [name for name in CASES if name != "without gates"]
SAMPLED = ["mistral", "without gates"]
TASKS = ("arc_easy", "lambada_openai")
IDS = ids(3, 12)
MASK = torch.ones_like(IDS)
MASK[0, :4], MASK[1, :1], MASK[2, 10:] = 0, 0, 0
PROMPTS, PROMPT_MASK = ids(3, 7, seed=2), torch.ones(3, 7, dtype=torch.long)
PROMPT_MASK[0, :3], PROMPT_MASK[2, :1] = 0, 0
REAL = MASK.bool()


def written(model: AdaPonderForCausalLM, folder: Path) -> Path:
    """The model exported to a folder beside one that holds its tokenizer."""
    tokens = folder.with_name(f"{folder.name} tokens")
    harness_support.words().save_pretrained(tokens)
    exporting.export(model, tokens, folder, card=lambda: "# A model\n", verify=False)
    return folder


@cache
def package(name: str) -> AdaPonderForCausalLM:
    """The model of a case, by the package."""
    return tiny(**{"method": "adaponder", "iterations": 4} | CASES[name])


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> dict:
    """What a fresh process without the package computed of every case; once, for all workers."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exported"
    place.mkdir(exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        if not (place / "result.pt").exists():
            run_probe(place)
    return torch.load(place / "result.pt") | {"place": place}


def run_probe(place: Path) -> None:
    """Exports every case to ``place`` and runs the user's script there, which leaves ``result.pt``."""
    folders = {name: str(written(package(name), place / name.replace(" ", "-"))) for name in CASES}
    words = str(written(harness_support.reader(), place / "words"))
    job = {
        "folders": folders,
        "ids": IDS,
        "mask": MASK,
        "prompts": PROMPTS,
        "prompt_mask": PROMPT_MASK,
        "also": SAMPLED,
    }
    job |= {"words": words, "again": str(place / "again"), "lm_eval": harness_arguments(place, words)}
    torch.save(job, place / "job.pt")
    script = Path(__file__).parent.parent / "exported_probe.py"
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone |= {"HF_MODULES_CACHE": str(place / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(place / "job.pt"), str(place / "result.pt")]
    result = subprocess.run(command, env=alone, cwd=place, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr[-4000:]


def harness_arguments(place: Path, words: str) -> list[str]:
    """lm-eval's arguments for tasks whose records lie in ``place``."""
    spec = find_spec("lm_eval")
    if spec is None:
        return []
    records, include = harness_support.write_records(place / "records"), place / "tasks"
    include.mkdir()
    for name in TASKS:
        (source,) = (Path(spec.origin).parent / "tasks").rglob(f"{name}.yaml")
        data = {"test": str(records / name / "test.jsonl")}
        here = {"include": str(source), "task": f"{name}_here", "dataset_path": "json", "dataset_name": None}
        here |= {"dataset_kwargs": {"data_files": data}, "training_split": None, "validation_split": None}
        (include / f"{name}.yaml").write_text(yaml.safe_dump(here))
    asked = ["--model", "hf", "--model_args", f"pretrained={words},trust_remote_code=True", "--device", "cpu"]
    asked += ["--tasks", ",".join(f"{name}_here" for name in TASKS), "--include_path", str(include)]
    return [*asked, "--batch_size", "2", "--output_path", str(place / "scores")]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)


def test_the_package_was_not_there(probe):
    assert probe["imported"] == []
    assert all(probe[name]["class"].startswith("transformers_modules.") for name in CASES)
    assert all(package(name)(IDS).depth.unique().numel() > 1 for name in HALTING)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_depths_are_the_packages(probe, name):
    model, found = package(name), probe[name]
    for kind, options in {"plain": {}, "limited": {"max_iterations": 2}}.items():
        expected = model(IDS, **options)
        close(found[kind]["logits"], expected.logits)
        assert torch.equal(found[kind]["depth"], expected.depth)
    expected = model(IDS, attention_mask=MASK)
    for kind in ("padded", "cached"):
        close(found[kind]["logits"][REAL], expected.logits[REAL])
        assert torch.equal(found[kind]["depth"], expected.depth)
    close(found["by tokens"][REAL], expected.logits[REAL])
    computed, depths = found["rows"]  # halted tokens are not computed
    assert computed == depths
    assert (depths < MASK.sum() * model.config.iterations) == (name in HALTING)


@pytest.mark.parametrize("name", HALTING)
def test_gates_are_the_packages_until_a_token_halts(probe, name):
    expected, found = package(name)(IDS), probe[name]["plain"]["gates"]
    asked = torch.arange(found.shape[-1]) < expected.depth[..., None]
    close(found, torch.where(asked, expected.gates, 0.0))


@pytest.mark.parametrize("name", CASES)
def test_generation_is_the_packages(probe, name):
    model, found = package(name), probe[name]
    prompts = {"attention_mask": PROMPT_MASK, "pad_token_id": 0}
    expected = model.generate(PROMPTS, **prompts, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(found["greedy"], expected.sequences)
    assert torch.equal(found["greedy depth"], expected.past_key_values.depth)
    assert torch.equal(found["uncached"], expected.sequences)
    assert torch.equal(found["alone"], expected.sequences[:1, 3:])  # left padding changes nothing


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_with_a_seed_and_beams_are_the_packages(probe, name):
    model, found = package(name), probe[name]
    prompts = {"attention_mask": PROMPT_MASK, "pad_token_id": 0}
    beams = model.generate(PROMPTS, **prompts, max_new_tokens=4, do_sample=False, num_beams=3)
    assert torch.equal(found["beams"], beams)
    torch.manual_seed(5)
    sampled = model.generate(PROMPTS, **prompts, max_new_tokens=6, do_sample=True, top_k=20, temperature=0.8)
    assert torch.equal(found["sampled"], sampled)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradients_are_the_packages(probe, name):
    model, found = package(name), probe[name]
    loss = model(IDS, attention_mask=MASK, labels=IDS, objective=Objective(), execution="dense").loss
    loss.backward()
    close(found["loss"], loss)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert found["gradients"].keys() == expected.keys()
    for parameter, gradient in found["gradients"].items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-9, atol=1e-12)


def test_the_pipeline_writes_what_the_package_writes(probe):
    tokenizer = tokenizer_of(probe["place"] / "words")
    prompt = tokenizer("She opened the", return_tensors="pt").input_ids
    expected = harness_support.reader().generate(prompt, max_new_tokens=8, do_sample=False)
    assert probe["words"]["pipeline"] == tokenizer.decode(expected[0], skip_special_tokens=True)


def test_what_was_saved_again_is_the_same_for_transformers_and_for_the_package(probe):
    assert torch.equal(probe["words"]["again"], probe["words"]["logits"])
    model, _ = load(str(probe["place"] / "again"))
    close(probe["words"]["again"], model(IDS).logits)


def test_lm_eval_scores_the_folder_as_the_package_does(probe):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from adaponder.commands import tasks

    folder, records = probe["place"] / "words", probe["place"] / "records"
    expected = tasks.run_tasks(checkpoint=str(folder), tasks=TASKS, fewshot=[0], task_data=records)
    assert [task["cost"]["iterations"] < 3 for task in expected["tasks"]] == [True] * len(TASKS), (
        "some tokens must halt"
    )
    (scores,) = (probe["place"] / "scores").rglob("results_*.json")
    found = json.loads(scores.read_text())["results"]
    for task in expected["tasks"]:
        metrics = {key.split(",")[0]: value for key, value in found[f"{task['task']}_here"].items()}
        for name, metric in task["metrics"].items():
            assert metrics[name] == pytest.approx(metric["value"], rel=1e-9), (task["task"], name)


@pytest.mark.parametrize("name", exporting.CODE)
def test_the_exported_files_import_torch_and_transformers_alone(name):
    tree = ast.parse((Path(exporting.exported.__file__).parent / name).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    relative = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    rooms = {module.partition(".")[0] for module in imported if module is not None}
    assert rooms - sys.stdlib_module_names <= {"torch", "transformers"}
    assert {f"{module}.py" for module in relative} <= set(exporting.CODE)


def test_every_family_that_can_be_exported_is_held_against_the_package():
    assert {FAMILIES[case["family"]].model_type for case in CASES.values()} == set(exporting.FAMILIES)
