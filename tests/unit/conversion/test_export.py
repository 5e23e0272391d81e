"""adaponder export: what it writes, what it refuses, what the card says, and that the package never runs the code."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from adaponder import AdaPonderForCausalLM, cli
from adaponder.commands import export as command
from adaponder.commands.doctor import examine_checkpoint as examine
from adaponder.config import OUR_AUTO_MAP, AdaPonderConfig, is_our_auto_map
from adaponder.conversion import export as exporting
from adaponder.conversion.card import card_text, training_of
from adaponder.conversion.exported import modeling_adaponder
from adaponder.conversion.open import load
from adaponder.errors import AdaPonderError, CheckpointError, ConfigError, InputError
from adaponder.methods import method_class
from adaponder.methods.adaponder import AdaPonder
from harness_support import reader, words
from support import METHODS, ids, tiny

STATE = {
    "step": 160,
    "recipe": {
        "name": "cpu/demo",
        "data": {"source": "/some/where/corpus", "tokenizer": "train-bpe:2048", "sequence": 256},
        "train": {"global_batch": 4, "seed": 7, "eval_tokens": 16384},
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder: a model of float64 with its tokenizer, how it was trained, and its metrics."""
    folder = tmp_path_factory.mktemp("run")
    reader().save_pretrained(folder / "final")
    words().save_pretrained(folder / "final")
    (folder / "final" / "state.json").write_text(json.dumps(STATE))
    lines = [{"step": 149, "validation_loss": 9.0}, {"step": 159, "validation_loss": 4.5, "validation_depth": 2.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    (folder / "text.txt").write_text("The river ran past the mill. " * 30)
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    """The run exported and measured by the command line."""
    out = tmp_path_factory.mktemp("hub") / "river"
    asked = ["export", str(run), "--out", str(out), "--data", str(run / "text.txt"), "--license", "apache-2.0"]
    result = CliRunner().invoke(cli.app, [*asked, "--json", str(out.with_suffix(".json"))])
    assert result.exit_code == 0, result.output
    return out


def test_the_folder_holds_all_that_the_hub_needs_and_nothing_else(exported):
    files = {"README.md", "config.json", "generation_config.json", "manifest.json", "model.safetensors"}
    files |= {"tokenizer.json", "tokenizer_config.json", *exporting.CODE}
    assert {path.name for path in exported.iterdir()} == files
    assert json.loads((exported / "config.json").read_text())["auto_map"] == OUR_AUTO_MAP
    for name in exporting.CODE:
        assert (exported / name).read_bytes() == Path(modeling_adaponder.__file__).with_name(name).read_bytes()
    listed = json.loads((exported / "manifest.json").read_text())["files"]
    assert set(listed) == files - {"README.md", "manifest.json", *exporting.CODE}  # what the package downloads


def test_doctor_tells_of_the_code_and_whether_it_is_ours(exported, run, tmp_path):
    assert examine(run / "final")["checks"]["files"] == "no code, nothing outside the folder"
    assert "only trust_remote_code=True runs, as adaponder export writes it" in examine(exported)["checks"]["files"]
    other = shutil.copytree(exported, tmp_path / "other")
    (other / exporting.CODE[1]).write_text("import os\n")
    assert "modeling_adaponder.py differs from what this version exports" in examine(other)["problems"]["files"]
    assert CliRunner().invoke(cli.app, ["doctor", str(other)]).exit_code == 1


def test_the_card_is_measured_and_has_the_hubs_metadata(exported):
    card = ModelCard.load(exported / "README.md")
    expected = {"license": "apache-2.0", "library_name": "transformers", "pipeline_tag": "text-generation"}
    assert expected.items() <= card.data.to_dict().items()
    result = json.loads(exported.with_suffix(".json").read_text())["measured"]
    own = result["rows"][0]
    values = {entry.metric_type: entry.metric_value for entry in card.data.eval_results}
    assert values["loss"] == pytest.approx(own["loss"], abs=1e-6)
    assert values["mean_depth"] == pytest.approx(own["depth"], abs=1e-6)
    assert [row["label"] for row in result["rows"]] == ["its own depths", "depth 1", "depth 2", "depth 3"]
    assert 1 < own["depth"] < 3
    for row in result["rows"]:
        cells = (f"{row['loss']:.4f}", f"{row['depth']:.3f}", f"{row['flops'] / 1e6:,.2f}", f"{row['ratio']:.2f}")
        (line,) = re.findall(rf"^\| {row['label']} \|.*$", card.text, flags=re.MULTILINE)
        assert all(f" {cell} " in line for cell in cells), line
    assert f"{result['tokens']:,} tokens" in card.text
    assert str(exported.parent) not in card.text  # no path of the machine
    # What the checkpoint recorded.
    for name, value in {"data": "corpus", "tokens": "163,840", "recipe": "cpu/demo", "seed": "7"}.items():
        assert f"| {name} | {value} |" in card.text
    assert "| validation loss of the run (first 16,384 tokens) | 4.5000 at mean depth 2.250 |" in card.text
    assert "/some/where" not in card.text


def test_the_python_of_the_card_runs(exported, monkeypatch):
    (code,) = re.findall(r"```python\n(.+?)```", (exported / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(exported.parent)
    opened = modeling_adaponder.AdaPonderForCausalLM.from_pretrained("river")
    trusted = []

    def from_pretrained(name, trust_remote_code):
        trusted.append((name, trust_remote_code))
        return opened

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, trust_remote_code: words())
    exec(code, {})
    assert trusted == [("river", True)]
    assert opened.config.tau == 0.01


@pytest.mark.parametrize("family", [modeling_adaponder.AdaPonderForCausalLM, AdaPonderForCausalLM])
def test_what_a_tokenizer_returns_can_be_handed_on_whole_and_generate_stops_at_a_string(exported, family):
    model, tokenizer = family.from_pretrained(exported), words()
    inputs = tokenizer("She opened the", return_tensors="pt")
    with torch.no_grad():
        typed = model(**inputs, token_type_ids=torch.zeros_like(inputs.input_ids))
        assert torch.equal(typed.logits, model(**inputs).logits)
    with pytest.raises((ValueError, TypeError), match="no_such"):
        model(**inputs, no_such=1)
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    whole = model.generate(**inputs, **asked)[0]
    stop = tokenizer.decode(whole[inputs.input_ids.shape[1]])
    stopped = model.generate(**inputs, **asked, stop_strings=[stop], tokenizer=tokenizer)[0]
    assert stopped.tolist() == whole[: inputs.input_ids.shape[1] + 1].tolist()


def test_what_is_not_known_is_said(tmp_path):
    folder = tmp_path / "model"
    reader("ponder").save_pretrained(folder)
    words().save_pretrained(folder)
    command.export(checkpoint=str(folder), out=tmp_path / "an export")
    card = ModelCard.load(tmp_path / "an export" / "README.md")
    assert "--model_args\n'pretrained=an export,trust_remote_code=True'`" in card.text
    assert card.data.license == "unknown"
    assert card.data.eval_results is None
    for words_of_it in ("does not record how it was trained", "were not measured", "No licence was stated"):
        assert words_of_it in card.text
    assert "| 3 |" in card.text  # the cost of a token at each depth is known all the same
    assert "tau" not in card.text


def test_a_damaged_record_is_not_known_either(tmp_path):
    assert training_of(tmp_path) is None
    (tmp_path / "state.json").write_text('{"step": "many", "recipe": []}')
    found = training_of(tmp_path)
    assert set(found.values()) == {None}
    card = card_text("a/b", reader().config, dtype="float32", training=found, measured=None, license=None)
    assert "| data | not recorded |" in card


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"method": "loop"}, "method=loop cannot be exported"),
        ({"family": "gpt2"}, "backbone=gpt2 cannot be exported"),
        ({"family": "gemma3"}, "backbone=gemma3_text cannot be exported"),
        ({"reuse": "kv"}, "reuse=kv cannot be exported"),
    ],
)
def test_backbones_and_settings_that_it_does_not_compute_are_refused(model, says):
    with pytest.raises(InputError, match=says):
        exporting.require_exportable(tiny(**model).config, "CKPT")
    assert {method for method in METHODS if method_class(method).can_be_exported()} == {"adaponder", "ponder"}
    assert not type("Mine", (AdaPonder,), {}).can_be_exported(), "what computes something else is not exported"


def test_nothing_is_written_without_a_tokenizer_or_if_the_file_computes_something_else(run, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="has no tokenizer"):
        exporting.export(reader(), tmp_path, tmp_path / "out", card=lambda: "")
    wrong = modeling_adaponder.AdaPonderForCausalLM.expected_embedding
    monkeypatch.setattr(
        modeling_adaponder.AdaPonderForCausalLM, "expected_embedding", lambda self, hidden: 1.01 * wrong(self, hidden)
    )
    with pytest.raises(CheckpointError, match="the exported file's logits: differs by"):
        command.export(checkpoint=str(run), out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_package_opens_it_by_its_own_classes_and_runs_none_of_its_code(exported, tmp_path, monkeypatch):
    folder, canary = Path(shutil.copytree(exported, tmp_path / "ckpt")), tmp_path / "canary"
    for name in exporting.CODE:
        (folder / name).write_text(f"open({str(canary)!r}, 'w')\nraise SystemExit('run')\n")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    asked = ["generate", str(folder), "--prompt", "The river", "--max-new-tokens", "4", "--greedy"]
    result = CliRunner().invoke(cli.app, [*asked, "--json", str(tmp_path / "out.json")], input="y\n")
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(cli.app, ["doctor", str(folder)], input="y\n").exit_code == 1
    model, _ = load(str(folder))
    assert type(model) is AdaPonderForCausalLM
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is AdaPonderForCausalLM
    assert type(AutoConfig.from_pretrained(folder)) is AdaPonderConfig
    assert torch.equal(model(ids()).logits, reader()(ids()).logits)
    assert not canary.exists()
    assert not (tmp_path / "modules").exists()
    model.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text()), "it asks for no code"


def test_the_auto_map_of_a_hub_repository_is_ours_and_no_other_is():
    named = {key: f"me/river--{value}" for key, value in OUR_AUTO_MAP.items()}
    assert AdaPonderConfig(backbone_config=tiny().backbone.config, auto_map=named).method == "adaponder"
    for other in (
        named | {"AutoConfig": "me/river--evil.Evil"},
        named | {"AutoModel": "x.Y"},
        {},
        ["x.Y"],
        {"a": ["b"]},
    ):
        assert not is_our_auto_map(other)
        with pytest.raises(ConfigError, match="auto_map asks to run code"):
            AdaPonderConfig(backbone_config=tiny().backbone.config, auto_map=other)


@pytest.fixture
def hub(monkeypatch) -> Mock:
    """Stands in for the hub's client; ``hub.files`` is what it was sent last."""
    client = Mock(files=None)

    def upload(*, repo_id: str, folder_path: Path, **options: Any) -> SimpleNamespace:
        assert options["ignore_patterns"] == [".*"]
        client.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/0")

    client.upload_folder.side_effect = upload
    monkeypatch.setattr(exporting, "HfApi", lambda: client)
    return client


def test_the_command_pushes_every_file_only_when_asked_and_a_hub_that_refuses_changes_nothing(run, tmp_path, hub):
    command.export(checkpoint=str(run), out=tmp_path / "kept")
    assert not hub.mock_calls
    result = command.export(checkpoint=str(run), out=tmp_path / "sent", push="me/river", private=True)
    assert result["pushed"] == "https://hub/me/river/commit/0"
    hub.create_repo.assert_called_once_with("me/river", private=True, exist_ok=True)
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "sent").iterdir()}
    card = hub.files["README.md"].decode()
    assert 'from_pretrained("me/river", trust_remote_code=True)' in card
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "text-generation"
    hub.create_repo.side_effect = LocalTokenNotFoundError("not yours")
    with pytest.raises(AdaPonderError, match="--push me/river"):
        exporting.push(tmp_path / "kept", "me/river")
    assert (tmp_path / "kept" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["river", "a/b/c", "me/ri ver", "../river", "me/river--x"])
def test_a_name_that_the_hub_cannot_have_is_refused_before_anything_is_done(name, run, tmp_path):
    with pytest.raises(InputError, match="--push"):
        command.export(checkpoint=str(run), out=tmp_path / "out", push=name)
    assert not (tmp_path / "out").exists()
