"""A method is one class and one line: an example's does all that the family does."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from adaponder import AdaPonderForCausalLM, cli, methods, registry
from adaponder.analysis.figures import PLATES, GateValues, TokenGrid
from adaponder.analysis.report import write_report
from adaponder.analysis.trace import Trace, make_trace
from adaponder.evaluation.meter import check_flops
from adaponder.evaluation.scoring import score
from adaponder.evaluation.text import Text, Windows, open_text, open_vocabulary
from adaponder.methods import register_method
from adaponder.methods.cost import cost_of, parameters_of
from adaponder.training.run import train
from laws import assert_causal, assert_one_function, assert_static_after_halting, make_case
from support import ids, stock, tiny
from training_support import corpus, losses, metrics, small

WINDOWS = Windows(24)
NAME = "loud"


@pytest.fixture(scope="module", autouse=True)
def echo():
    """Registers the class while these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_SCALES", dict(registry._SCALES))
        patch.setattr(methods, "_CLASSES", dict(methods._CLASSES))

        class Loud(runpy.run_path(str(Path(__file__).parents[3] / "examples" / "own_method.py"))["Echo"]):
            after_halting = "halted: silent"

            @classmethod
            def described(cls, config):
                return {"silence below": config.tau}

        register_method(NAME, Loud)
        yield Loud


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    recipe = small(corpus(folder), "model.tau=0.5", "model.gate_bias=0.3", "train.halt_before_ponder=true", method=NAME)
    assert train(recipe, out=folder / "run", quiet=True).final == folder / "run" / "final"
    return folder / "run"


@pytest.fixture(scope="module")
def model(run) -> AdaPonderForCausalLM:
    return AdaPonderForCausalLM.from_pretrained(run / "final").eval()


@pytest.fixture(scope="module")
def text(run) -> Text:
    return open_text(str(run.parent / "shards"), open_vocabulary(str(run / "final")), whose="toy", max_tokens=200)


@pytest.fixture(scope="module")
def trace(model, text) -> Trace:
    return make_trace(model, text, WINDOWS, checkpoint="toy", data="made up")


def test_it_trains_its_parameters(run, model):
    first, *_, last = losses(run)
    assert last < first
    assert metrics(run)[-1]["validation_depth"] > 1
    assert not torch.equal(model.method.ear.bias, torch.tensor([0.3]))


def test_it_keeps_the_laws():
    toy = tiny(NAME)
    for padding in ("none", "left"):
        assert_one_function(toy, make_case(2, 7, 3, "random", padding, 0))
    assert_static_after_halting(toy, make_case(2, 7, 3, "random", "none", 1), "compact")
    for where in range(1, 5):
        assert_causal(toy, ids(1, 5, seed=where), where)
    plain = AdaPonderForCausalLM.from_backbone(stock(), method=NAME, iterations=1, embedding_scale=1.0)
    torch.testing.assert_close(plain(ids()).logits, stock()(ids()).logits, rtol=1e-12, atol=1e-12)


def test_it_is_evaluated_and_metered(model, text):
    scores = score(model, text, WINDOWS)
    assert np.isfinite(scores.loss)
    assert set(np.unique(scores.depth)) <= {1, 2, 3}
    assert len(np.unique(scores.depth)) > 1
    assert scores.spent.halts
    assert scores.spent.iterations == pytest.approx(float(scores.depth.mean()), abs=0.05)
    assert parameters_of(model.config).added == sum(parameter.numel() for parameter in model.method.parameters())
    assert check_flops(NAME).ratio == 1.0
    halted, full = (cost_of(torch.tensor([depths]), model.config) for depths in ([1, 2, 3], [3, 3, 3]))
    assert (halted.total_depth, halted.gates) == (6, (3 + 2) * 2 * model.config.hidden_size)
    assert halted.flops < full.flops
    assert halted.expectation == full.expectation == 0


def test_it_is_drawn_in_its_own_words(echo, trace, tmp_path):
    assert [plate for plate in PLATES if plate.missing(trace.about) is not None] == []
    write_report(trace, tmp_path, only=("gates", "grid"))
    assert echo.gate_meaning in (tmp_path / "figures" / "gates.svg").read_text()
    assert echo.after_halting in (tmp_path / "figures" / "grid.svg").read_text()
    assert GateValues(trace).meaning == echo.gate_meaning
    assert GateValues(trace).lines == (0.5, 0.5)
    assert TokenGrid(trace).after == echo.after_halting


def test_commands_take_it(run, tmp_path):
    stock(dtype=torch.float32).save_pretrained(tmp_path / "stock")
    said = {}
    for words in (
        ("inspect", str(run)),
        ("convert", str(tmp_path / "stock"), "--method", NAME, "--iterations=2", "--out", str(tmp_path / "converted")),
    ):
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, result.output
        said[words[0]] = result.output
    assert "silence below" in said["inspect"]
    assert "one iteration equals the source" in said["convert"]
    assert AdaPonderForCausalLM.from_pretrained(tmp_path / "converted").config.method == NAME
