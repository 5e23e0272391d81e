"""Training on from a checkpoint: conversations, gates that stay, adapters, and the depth before and after."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from adaponder import AdaPonderForCausalLM, cli
from adaponder.commands import train as command
from adaponder.conversion.card import training_of
from adaponder.data import Shards
from adaponder.data.manifest import DataError, Manifest
from adaponder.data.prepare import prepare
from adaponder.errors import InputError
from adaponder.files import read_json
from adaponder.recipes import load_recipe
from adaponder.training import lora
from adaponder.training.build import with_method
from adaponder.training.data import MicroBatches, sampler_of
from adaponder.training.distributed import World
from adaponder.training.run import train
from adaponder.training.validation import validate
from training_support import WORDS, assert_same_weights, corpus, small, weights

TEMPLATE = """{% for message in messages %}{% if message.role == "user" %}ask {{ message.content }}
{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A run folder whose final model is trained on; its data lies beside it."""
    folder = tmp_path_factory.mktemp("base")
    shards = corpus(folder)
    train(small(shards, "train.steps=4", "train.save_every=0"), out=folder / "run", quiet=True)
    return folder


@pytest.fixture(scope="module")
def chats(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    rows = []
    for number in range(120):
        drawn = ([WORDS[(number * k + i) % len(WORDS)] for i in range(4 + number % 5)] for k in (3, 5))
        question, answer = (" ".join(words) for words in drawn)
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": chat}))
    (folder / "chats.jsonl").write_text("\n".join(rows))
    (folder / "chat.jinja").write_text(TEMPLATE)
    how = {"chat": ["messages"], "chat_template": folder / "chat.jinja", "validation": 0.2}
    prepare([str(folder / "chats.jsonl")], out=folder / "shards", tokenizer=str(base / "run" / "final"), **how)
    return folder / "shards"


def finetune(base: Path, *overrides: str, data: Path | None = None, name: str = "finetune/text"):
    train = {"steps": 6, "global_batch": 4, "lr": 0.01, "gate_lr": 0.01, "save_every": 3, "keep": 99, "log_every": 1}
    settings = [f"model.backbone={base / 'run' / 'final'}", f"data.source={base / 'shards' if data is None else data}"]
    settings += ["data.sequence=32", "train.eval_tokens=256", *(f"train.{key}={value}" for key, value in train.items())]
    return load_recipe(name, [*settings, *overrides])


def test_17_data_of_another_tokenizer_than_the_checkpoints_is_refused(base, tmp_path):
    other = tmp_path / "shards"
    prepare([str(base / "run" / "recipe.yaml")], out=other, tokenizer="train-bpe:270", validation=0)
    with pytest.raises(DataError, match="tokenizer"):
        train(finetune(base, data=other), out=tmp_path / "run", quiet=True)


def test_a_checkpoint_names_the_tokenizer_of_its_data_not_of_its_recipe(base):
    made_by = Manifest.load(base / "shards").fingerprint["tokenizer"]
    assert read_json(base / "run" / "final" / "state.json")["recipe"]["data"]["tokenizer"] != made_by
    known = training_of(base / "run" / "final")
    assert known is not None
    assert known["tokenizer"] == made_by
    card = (base / "run" / "final" / "README.md").read_text()
    assert "tags: [adaponder, adaptive-computation]" in card  # each once


def moved(run: Path, base: Path) -> set[str]:
    before, after = weights(base / "run" / "final"), weights(run / "final")
    assert before.keys() == after.keys()
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("method", ["ouro", "vanilla"])
def test_a_checkpoint_keeps_its_method_unless_the_user_names_another(base, tmp_path, method):
    settings = ["train.steps=1", "train.save_every=0", "train.eval_tokens=64"]
    train(small(base / "shards", *settings, method=method), out=tmp_path / "run", quiet=True)
    recipe = finetune(tmp_path, *settings, data=base / "shards")
    train(recipe, out=tmp_path / "tuned", quiet=True)
    assert read_json(tmp_path / "tuned" / "final" / "config.json")["method"] == method
    assert weights(tmp_path / "tuned" / "final").keys() == weights(tmp_path / "run" / "final").keys()
    assert load_recipe(str(tmp_path / "tuned" / "recipe.yaml")).model.method == method
    assert train(recipe, out=tmp_path / "tuned", resume="auto", quiet=True).trainer is None, "the run is finished"
    other = finetune(tmp_path, *settings, "model.method=adaponder", data=base / "shards")
    model = train(other, out=tmp_path / "other", quiet=True).trainer.model
    assert model.config.method == "adaponder"


def test_a_run_resumes_without_the_checkpoint_it_began_from(base, tmp_path):
    train(small(base / "shards", "train.steps=1", method="ouro"), out=tmp_path / "run", quiet=True)
    recipe, out = finetune(tmp_path, "train.eval_tokens=64", data=base / "shards"), tmp_path / "tuned"
    train(recipe, out=out, quiet=True)
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "mine.yaml").write_text(recipe.to_yaml())
    command.train(recipe=str(tmp_path / "mine.yaml"), out=out, resume="auto")  # finished
    (tmp_path / "whole").mkdir()
    (out / "final").rename(tmp_path / "whole" / "final")
    command.train(recipe=str(tmp_path / "mine.yaml"), out=out, resume="auto")
    assert_same_weights(out, tmp_path / "whole")
    source = str(out / "checkpoints" / "step-00000003")
    command.train(recipe=str(tmp_path / "mine.yaml"), out=tmp_path / "again", resume=source)
    assert_same_weights(tmp_path / "again", tmp_path / "whole")
    (tmp_path / "gone").rename(tmp_path / "run")
    sweep = ["sweep", str(tmp_path / "mine.yaml"), "--seeds", "0", "--out", str(tmp_path / "sweep")]
    assert CliRunner().invoke(cli.app, sweep).exit_code == 0
    (tmp_path / "run").rename(tmp_path / "gone")
    assert CliRunner().invoke(cli.app, sweep).exit_code == 0, "finished runs are shown"
    again = ["train", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "other"), "--resume", "nowhere"]
    assert "--resume nowhere: no such folder" in str(CliRunner().invoke(cli.app, again).exception)


def test_a_resumed_run_keeps_the_method_it_began_with(base, tmp_path):
    settings = ["train.steps=1", "train.save_every=0", "train.eval_tokens=64"]
    train(finetune(base, *settings, "model.method=ponder"), out=tmp_path / "tuned", quiet=True)
    recipe = finetune(base, *settings)
    assert with_method(recipe, tmp_path / "tuned", "auto").model.method == "ponder"
    assert train(recipe, out=tmp_path / "tuned", resume="auto", quiet=True).trainer is None, "the run is finished"
    source = tmp_path / "tuned" / "final"
    trainer = train(recipe, out=tmp_path / "on", resume=str(source), weights_only=True, quiet=True).trainer
    assert trainer.recipe.model.method == trainer.model.config.method == "ponder"
    source.rename(tmp_path / "gone")  # so nothing is left to resume
    other = finetune(base, *settings, f"model.backbone={base / 'run'}")
    trainer = train(other, out=tmp_path / "tuned", resume="auto", quiet=True).trainer
    assert trainer.model.config.method == "adaponder"


def test_targets_are_the_assistants_words_alone(base, chats):
    recipe = finetune(base, data=chats, name="finetune/chat")
    batches = MicroBatches(recipe, sampler_of(recipe, Shards.open(chats)), World())
    (inputs,), (batch,) = batches.inputs(1), batches.draw(1)
    targets, following = inputs["targets"].numpy(), batch.tokens[:, 1:]
    same = batch.documents[:, 1:] == batch.documents[:, :-1]
    assert np.array_equal(targets != -100, batch.learned[:, 1:] & same)
    assert np.array_equal(targets[targets != -100], following[targets != -100])
    assert 0.2 < (targets != -100).mean() < 0.8


@pytest.fixture(scope="module")
def tuned(base, chats, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "run"
    return train(finetune(base, data=chats, name="finetune/chat"), out=out, quiet=True).trainer


def test_validation_scores_what_training_learns(tuned, chats):
    trainer, shards = tuned, Shards.open(chats, "validation")
    model = trainer.model.eval()
    total, count, depth = torch.zeros((), dtype=torch.double), 0, 0
    windows = 256 // 32
    for window in range(windows):
        tokens = torch.from_numpy(shards.read(window * 32, 33))[None]
        documents = torch.from_numpy(shards.number_blocks(np.array([window * 32]), 33))
        learned = torch.from_numpy(shards.learned_blocks(np.array([window * 32]), 33))
        counted = learned[:, 1:] & (documents[:, 1:] == documents[:, :-1])
        output = model(tokens[:, :-1], document_ids=documents[:, :-1])
        nll = torch.nn.functional.cross_entropy(output.logits[0].double(), tokens[0, 1:], reduction="none")
        total, count = total + nll[counted[0]].detach().sum(), count + int(counted.sum())
        depth += int(output.depth[counted].sum())
    assert trainer.after["validation_loss"] == pytest.approx(float(total) / count, rel=1e-5)
    assert trainer.after["validation_depth"] == pytest.approx(depth / count)
    model.train()
    apart = validate(model, shards, tokens=256, length=32, together=4, world=World(), dtype="float32", across=False)
    together = validate(model, shards, tokens=256, length=32, together=4, world=World(), dtype="float32")
    assert apart == trainer.after != together


def test_the_template_is_saved_with_the_model(tuned):
    words = AutoTokenizer.from_pretrained(tuned.run / "final")
    rendered = words.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert rendered == "ask the cat\n"


@pytest.mark.parametrize("rank", ["null", "2"])
def test_gates_train_or_stay(base, tmp_path, rank):
    own = [f"train.lora_rank={rank}", "train.steps=2", "train.save_every=0", "train.eval_tokens=64"]
    train(finetune(base, *own), out=tmp_path / "trained", quiet=True)
    train(finetune(base, *own, "train.freeze_gates=true", "train.ponder_weight=0"), out=tmp_path / "kept", quiet=True)
    gates = {name for name in weights(base / "run" / "final") if name.startswith("method.")}
    assert gates <= moved(tmp_path / "trained", base)
    still = moved(tmp_path / "kept", base)
    assert still
    assert not gates & still


def test_adapters_train_alone_and_the_final_model_has_them_merged(base, tmp_path):
    recipe = finetune(base, "train.lora_rank=2", "train.dtype=float64")
    trainer = train(recipe, out=tmp_path / "run", quiet=True).trainer
    backbone = {name for name in moved(tmp_path / "run", base) if not name.startswith("method.")}
    maps = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    assert backbone == {f"backbone.gpt_neox.layers.{n}.{name}.weight" for n in (0, 1) for name in maps}
    adapted = trainer.model.eval()
    assert any("lora" in name for name, _ in adapted.named_parameters())
    for folder in (tmp_path / "run" / "final", tmp_path / "run" / "checkpoints" / "step-00000003"):
        opened = AdaPonderForCausalLM.from_pretrained(folder, dtype=torch.float64)
        assert not any("lora" in name for name, _ in opened.named_parameters())
    merged = AdaPonderForCausalLM.from_pretrained(tmp_path / "run" / "final", dtype=torch.float64)
    text = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    expected, actual = adapted(text), merged(text)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-10)
    assert torch.equal(actual.depth, expected.depth)


def test_a_resumed_run_with_adapters_is_the_unbroken_one(base, tmp_path):
    model = AdaPonderForCausalLM.from_pretrained(base / "run" / "final")
    backbone = model.config.backbone_config
    backbone.attention_dropout = backbone.hidden_dropout = 0.1  # so that training on draws random numbers
    model.save_pretrained(tmp_path / "run" / "final")
    recipe = finetune(tmp_path, "train.lora_rank=2", data=base / "shards")
    train(recipe, out=tmp_path / "whole", quiet=True)
    source = tmp_path / "whole" / "checkpoints" / "step-00000003"
    resumed = train(recipe, out=tmp_path / "resumed", resume=str(source), quiet=True)
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")
    assert resumed.trainer.before is None, "another folder does not know what was before"
    (tmp_path / "whole" / "final").rename(tmp_path / "elsewhere")
    again = train(recipe, out=tmp_path / "whole", resume="auto", quiet=True)
    assert again.trainer.before == json.loads((tmp_path / "whole" / "before.json").read_text())
    other = finetune(tmp_path, "train.lora_rank=3", data=base / "shards")
    with pytest.raises(Exception, match="lora_rank: 2 → 3"):
        train(other, out=tmp_path / "other", resume=str(source), quiet=True)
    with pytest.raises(Exception, match=r"lora\.safetensors"):
        train(other, out=tmp_path / "more", resume=str(source), allow_changes=True, quiet=True)


def test_depth_before_and_after_is_printed_and_written(base, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(finetune(base, "train.save_every=0").to_yaml())
    record = tmp_path / "record.json"
    command.train(recipe=str(recipe), out=tmp_path / "run", json=record)
    shown, result = capsys.readouterr().out, json.loads(record.read_text())
    assert result["before"]["validation_loss"] > result["after"]["validation_loss"]
    for values in (result["before"], result["after"]):
        assert f"{values['validation_depth']:.3f}" in shown
        assert f"{values['validation_loss']:.4f}" in shown
    opened = AdaPonderForCausalLM.from_pretrained(base / "run" / "final")
    shards = Shards.open(base / "shards", "validation")
    measured = validate(opened, shards, tokens=256, length=32, together=4, world=World(), dtype="float32")
    assert result["before"] == measured


def test_collapsed_gates_of_a_method_without_a_ponder_term_are_warned_of(base, tmp_path, capsys):
    shards = base / "shards"
    recipe = small(shards, "train.steps=1", "train.save_every=0", "model.capacities=[1.0,0.03,0.03]", method="mor")
    train(recipe, out=tmp_path / "run")
    assert "collapsed, every token halts after" in " ".join(capsys.readouterr().out.split())


def test_adapters_without_peft_are_refused_with_the_cure(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="peft"):
        lora.attach(None, finetune(base, "train.lora_rank=2").train)
