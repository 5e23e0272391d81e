"""Every example runs as its first lines say, at a size of seconds, and prints what it promises."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import Mock

import matplotlib.pyplot
import pytest
import torch
from transformers import AutoModelForCausalLM

from adaponder import methods, registry
from adaponder.policies.base import _BY_WORD
from stock_support import make_stock

EXAMPLES = Path(__file__).parents[2] / "examples"

# By file: arguments that make it small, and what its output must contain.
RUNS = {
    "wrap_a_decoder": ([], r"largest difference 0\.0e\+00[\s\S]*ForcedDepths\(…\)\s+\[1, 2, 3, 4, 1"),
    "train": (["--steps", "5", "--out", "model"], r"stage 1  loss 5\.\d+  mean depth 3\.00[\s\S]*stage 2  loss"),
    "own_policy": (["--max-new-tokens", "4"], r"its own gates: mean depth [123]\.[\s\S]*until 90%: mean depth [34]\."),
    "own_method": (["--steps", "2"], r"goes on with \[[\d, ]+\], read \[[123, ]+\] times\n.* the same: True"),
    "generate_under_a_budget": (["--tokens", "4"], r"budget 1\.25  mean depth 1\.[\s\S]*budget 2\.75  mean depth 2\."),
    "finetune_with_lora": (
        ["--steps", "1", "--out", "model"],
        r"263,683 of 3,090,438 parameters train\nbefore: loss 3\.[\s\S]*after:  loss [\s\S]*differ by \de-0[5-9]",
    ),
    "save_published_outputs": (["stock"], r"published\.safetensors: ids \[\d+\], logits \[1, \d+, \d+\]"),
    "read_a_trace": (["runs/sample/trace.parquet"], r"tokens, loss \d\.\d+, mean depth 2\.\d+ of 3"),
}


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_SCALES", dict(registry._SCALES))
    monkeypatch.setattr(methods, "_CLASSES", dict(methods._CLASSES))
    shipped = {word: kind for word, kind in _BY_WORD.items() if kind.__module__.startswith("adaponder.")}
    monkeypatch.setattr("adaponder.policies.base._BY_WORD", shipped)

    def start(program: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(program), *arguments])
        runpy.run_path(str(program), run_name="__main__")
        return capsys.readouterr().out

    return start


def docstring(name: str) -> str:
    return str(ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())))


@pytest.mark.parametrize("name", sorted(RUNS))
def test_an_example_runs_and_shows_what_it_says(command, run, name):
    arguments, shown = RUNS[name]
    if name == "read_a_trace":
        (line,) = re.findall(r"^ +adaponder (.+)$", docstring(name), flags=re.MULTILINE)
        assert command(*line.split(), "--max-tokens", "200")[0] == 0
    if name == "save_published_outputs":
        make_stock(Path("stock"))
    printed = run(EXAMPLES / f"{name}.py", *arguments)
    assert re.search(shown, printed), printed
    if name == "train":
        assert AutoModelForCausalLM.from_pretrained("model").config.iterations == 3


def test_every_example_is_tried_says_how_it_is_called_and_what_is_learned_and_is_one_page():
    files = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in files} == set(RUNS)
    for path in files:
        assert f"    python examples/{path.name}" in docstring(path.stem), path.name
        assert "You learn" in docstring(path.stem), path.name
        assert len(path.read_text().splitlines()) <= 100, path.name
    assert len((EXAMPLES / "train.py").read_text().splitlines()) <= 60


def test_examples_come_in_by_the_public_door():
    """What a method of one's own needs beyond it are types of its arguments."""
    deeper = {"own_method": {"adaponder.execution.base", "adaponder.methods"}}
    for path in EXAMPLES.glob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        inside = {str(node.module) for node in nodes if str(node.module).startswith("adaponder.")}
        assert inside <= deeper.get(path.stem, set()), path.name


def without_rounding(text: str) -> str:
    """Differences that are rounding, such as 2.8e-14, are other ones on other machines."""
    return re.sub(r"\b\d(\.\d)?e[-+]\d+", "tiny", text).strip()


def test_the_notebook_prints_what_is_saved_in_it(monkeypatch, capsys):
    """Its cells in order. They were saved by ``jupyter execute --inplace examples/the_algorithm.ipynb`` (nbclient)."""
    matplotlib.use("Agg")
    monkeypatch.setattr(matplotlib.pyplot, "show", drawn := Mock(side_effect=lambda: matplotlib.pyplot.close("all")))
    notebook = json.loads((EXAMPLES / "the_algorithm.ipynb").read_text())
    names: dict[str, object] = {}
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        exec("".join(cell["source"]), names)
        outputs = cell["outputs"]
        assert all(output.get("name") != "stderr" for output in outputs), f"cell {number}: a warning is saved in it"
        saved = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
        assert without_rounding(capsys.readouterr().out) == without_rounding(saved), f"cell {number}"
    pictures = [output for cell in notebook["cells"] for output in cell.get("outputs", []) if "data" in output]
    assert drawn.call_count == len(pictures) == 5
    assert torch.equal(names["computed"].sum(0), names["output"].depth)
    assert (names["logits"] - names["output"].logits).abs().max() < 1e-12
