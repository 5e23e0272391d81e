"""An exported folder computes what the package computes, where the package is not installed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import harness_support
from adaponder.conversion import export as exporting
from adaponder.conversion.open import load
from support import ids

METHODS = ("adaponder", "ponder")


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> dict:
    """Returns the results of each exported folder in a process without the package; once, for all workers."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exported"
    place.mkdir(exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        if not (place / "result.pt").exists():
            folders = {method: str(export(method, place)) for method in METHODS}
            torch.save({"folders": folders, "ids": ids(), "again": str(place / "saved again")}, place / "job.pt")
            run_alone(place)
    return torch.load(place / "result.pt") | {"place": place}


def export(method: str, place: Path) -> Path:
    tokens = place / "tokens"
    harness_support.words().save_pretrained(tokens)
    exporting.export(harness_support.reader(method), tokens, place / method, card=lambda: "# A model\n", verify=False)
    return place / method


def run_alone(place: Path) -> None:
    """Runs the user's script in a process that cannot import the package."""
    script = Path(__file__).parent.parent / "exported_probe.py"
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone |= {"HF_MODULES_CACHE": str(place / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(place / "job.pt"), str(place / "result.pt")]
    result = subprocess.run(command, env=alone, cwd=place, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr[-4000:]


def test_the_package_was_not_there(probe):
    assert probe["imported"] == []
    assert all(probe[name]["class"].startswith("transformers_modules.") for name in (*METHODS, "saved again"))


@pytest.mark.parametrize("name", [*METHODS, "saved again"])
def test_a_folder_computes_and_writes_what_the_package_does(probe, name):
    model, tokenizer = harness_support.reader("ponder" if name == "ponder" else "adaponder"), harness_support.words()
    expected, found = model(ids()), probe[name]
    torch.testing.assert_close(found["logits"], expected.logits.detach(), rtol=0, atol=1e-12)
    assert torch.equal(found["depth"], expected.depth)
    body = model(ids(), output_hidden_states=True).hidden_states[-1].detach()
    torch.testing.assert_close(found["body"], body, rtol=0, atol=1e-12)
    prompt = tokenizer("She opened the", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(found["greedy"], written)
    assert found["pipeline"] == tokenizer.decode(written[0], skip_special_tokens=True)


def test_what_was_saved_again_opens_in_the_package(probe):
    model, _ = load(str(probe["place"] / "saved again"))
    torch.testing.assert_close(model(ids()).logits, probe["adaponder"]["logits"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", exporting.CODE)
def test_the_exported_files_import_torch_and_transformers_alone(name):
    tree = ast.parse((Path(exporting.exported.__file__).parent / name).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    relative = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    rooms = {module.partition(".")[0] for module in imported if module is not None}
    assert rooms - sys.stdlib_module_names <= {"torch", "transformers"}
    assert {f"{module}.py" for module in relative} <= set(exporting.CODE)
