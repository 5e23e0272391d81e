"""What a published Ouro is used for: policies, profiles, server, lm-eval, adapters, int8, and its own code."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from adaponder.conversion.convert import convert
from adaponder.conversion.open import load
from adaponder.serving.served import Served
from adaponder.text.prompts import chat_text
from looped_support import OURO, plain_loops, publish, random_weights
from serving_support import TEMPLATE, serving
from stock_support import make_stock

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A folder as the hub has it: weights, the release's code, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("release")
    make_stock(folder)
    size = len(AutoTokenizer.from_pretrained(folder))
    config = OURO | {"vocab_size": size, "torch_dtype": "float32", "max_position_embeddings": 256}
    publish(folder, config, random_weights(config, dtype=torch.float32))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "modeling_ouro.py").write_text("raise SystemExit('this code must never run')\n")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
    return folder


@pytest.fixture
def call(command, tmp_path):
    """Runs a command; returns its exit code and its JSON."""

    def run(*arguments):
        code, _, error = command(*map(str, arguments), "--json", str(tmp_path / "result.json"))
        assert code in (0, 1), error
        return code, json.loads((tmp_path / "result.json").read_text())

    return run


def test_commands_take_a_release_forced_depths_thresholds_profiles_and_int8(release, call, tmp_path):
    _, described = call("inspect", release)
    assert described["config"]["method"] == "ouro"
    assert call("doctor", release)[1]["checks"]["files"].endswith("code of the release is never run")
    ask = ("--prompt", "def f(x):", "--max-new-tokens", "5", "--greedy")
    depths = {rule: call("generate", release, *ask, "--policy", rule)[1] for rule in ("fixed:2", "exit:0.5", "exit:1")}
    mean = {rule: result["mean_depth"] for rule, result in depths.items()}
    assert mean["fixed:2"] == 2
    assert mean["exit:1"] == 4
    assert 1 <= mean["exit:0.5"] < 4
    (tmp_path / "text.txt").write_text(EXAMPLES.joinpath("train.py").read_text())
    few = ("--data", tmp_path / "text.txt", "--max-tokens", "300", "--window", "64")
    for weights in ("int8", "fp8"):
        _, scored = call("eval", release, *few, "--weights", weights, "--depths", "1,2,3,4", "--check-tokens", "0")
        losses = {row["label"]: row["loss"] for row in scored["rows"]}
        assert set(scored["weights"]["by_depth"]) == {f"depth {loop}" for loop in (1, 2, 3, 4)}
        for depth, change in scored["weights"]["by_depth"].items():
            difference = losses[f"{depth}, {weights} weights"] - losses[depth]
            assert change["mean"] == pytest.approx(difference, abs=1e-9) != 0
        assert [row["depth"] for row in scored["rows"]] == [4, 1, 2, 3, 4] * 2
    call("analyze", release, *few[:2], "--max-tokens", "40", "--only", "grid", "--out", tmp_path / "analysis")
    assert (tmp_path / "analysis" / "report.html").is_file()
    convert(str(release), tmp_path / "ouro")
    _, dial = call("calibrate", tmp_path / "ouro", *few, "--budget", "2.5", "--name", "half")
    assert call("generate", tmp_path / "ouro", *ask, "--profile", "half")[1]["mean_depth"] <= 4
    assert dial
    model, folder = load(str(tmp_path / "ouro"))
    with serving(Served(model, AutoTokenizer.from_pretrained(folder), folder, name="ouro")) as server:
        body = {"model": "ouro", "prompt": "def f(x):", "max_tokens": 8, "temperature": 0}
        asked = server.post("/v1/completions", body | {"adaponder": {"budget": 2.5}}).json()
        assert 1 <= asked["usage"]["adaponder"]["mean_depth"] < 4, asked


def test_the_tokenizer_and_chat_template_of_a_release_are_kept_and_served_with_depths(release, tmp_path):
    done = convert(str(release), tmp_path / "ouro")
    assert (tmp_path / "ouro" / "chat_template.jinja").read_text() == TEMPLATE
    assert not list((tmp_path / "ouro").glob("*.py"))
    assert done.remarks or json.loads((tmp_path / "ouro" / "generation_config.json").read_text())["eos_token_id"] == 0
    for folder in (release, tmp_path / "ouro"):
        model, _ = load(str(folder))
        words = AutoTokenizer.from_pretrained(tmp_path / "ouro")
        assert chat_text("messages", words, [{"role": "user", "content": "hi"}]) == "u hi a "
        with serving(Served(model, words, name="ouro")) as server:
            body = {"model": "ouro", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
            full, early = (
                server.post("/v1/chat/completions", body | more).json()
                for more in ({}, {"adaponder": {"policy": "exit:0.5"}})
            )
            assert full["usage"]["adaponder"]["mean_depth"] == 4, full
            assert 1 <= early["usage"]["adaponder"]["mean_depth"] < 4, early


def test_the_page_quotes_the_record_of_published_code():
    record = json.loads((EXAMPLES.parent / "benchmarks" / "records" / "published-code-cpu.json").read_text())
    page = " ".join((EXAMPLES.parent / "docs" / "looped-models.md").read_text().split())
    ouro, exits = record["ouro"], record["ouro"]["exits"]
    bf16 = ouro["threshold 1 in bfloat16"]
    assert f"Of {exits['tokens']:,} tokens of random models {list(exits.values())[1]}" in page
    assert f"({bf16['answered from a loop before the last']} of {bf16['tokens']} tokens" in page
    assert max(ouro["norms in float64"][name] for name in list(ouro["norms in float64"])[:3]) == 0
    assert ouro["norms in float64"]["ours with early exits, minus a plain reference"] <= 2e-13
    assert max(record["ponderlm"][name] for name in ("logits", "logits of every iteration")) <= 4e-15
    assert "{:.1f}, {:.1f}, {:.1f} and {:.1f} %".format(*(100 * x for x in record["int8"]["error by loop"])) in page


class Published:
    """What the release's code answers with, computed by the reference."""

    def __init__(self, config, weights):
        self.config, self.weights = SimpleNamespace(**config), weights
        self.dictionary, self.model = config, self.gates

    def gates(self, ids, use_cache):
        gates = plain_loops(self.dictionary, self.weights, ids, frozen=False).gates
        return None, None, [torch.logit(gate)[..., None].float() for gate in gates]

    def __call__(self, ids, use_cache, exit_at_step=None, exit_threshold=1.0):
        plain = plain_loops(self.dictionary, self.weights, ids, threshold=exit_threshold, frozen=False)
        at = plain.depth - 1 if exit_at_step is None else torch.full_like(ids, exit_at_step)
        chosen = torch.stack(plain.logits).gather(
            0, at[None, ..., None].expand(1, *at.shape, plain.logits[0].shape[-1])
        )
        return SimpleNamespace(logits=chosen[0].float())


def test_doctor_compares_a_checkpoint_with_what_its_publishers_code_computed(release, call, tmp_path):
    config = json.loads((release / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in load_file(release / "model.safetensors").items()}
    outputs = runpy.run_path(str(EXAMPLES / "save_published_outputs.py"))["outputs"]
    published = outputs(Published(config, weights), torch.arange(7, 27))
    path = tmp_path / "published.safetensors"

    def compared(**changed):
        save_file({name: tensor.contiguous() for name, tensor in (published | changed).items()}, path)
        return call("doctor", release, "--against", path)

    code, report = compared()
    assert (code, report["problems"]) == (0, {})
    assert set(report["against"]["depths"]) == {"0.3", "0.5", "0.7", "0.9"}
    assert len(report["against"]["checks"]) == 4 + 1 + 4
    logits, gates, exits = (published[name].clone() for name in ("logits", "gates", "exits"))
    assert exits.shape == (4, 20)
    logits[2, 5] += 1
    gates[5, 1] += 0.01
    exits[1] = exits[1] % 4 + 1
    for changed, message in (
        ({"logits": logits}, "logits after loop 3"),
        ({"gates": gates}, "exit probabilities"),
        ({"exits": exits}, "exits at 0.5"),
    ):
        code, report = compared(**changed)
        assert code == 1
        assert message in report["problems"]["against"]
    with pytest.raises(AssertionError, match="has \\[4, 20"):
        compared(logits=logits[:3])
