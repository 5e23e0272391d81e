"""What a recipe says reaches the model that is trained, from scratch or from a checkpoint."""

import re
from pathlib import Path

import pytest
import torch

from adaponder.data import Manifest
from adaponder.errors import ConfigError
from adaponder.recipes import load_recipe
from adaponder.training.build import build_model
from adaponder.training.run import train
from support import ids, stock, tiny
from training_support import corpus, weights


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = tiny("adaponder", iterations=3, dtype=torch.float32, tau=0.5, initial_multiplier=2.0)
    folder = tmp_path_factory.mktemp("checkpoint") / "ada"
    model.save_pretrained(folder)
    return model, folder


def goes_on(folder: Path, *overrides: str):
    open_fields = [f"model.{name}=null" for name in ("iterations", "gate_bias")]
    return build_model(load_recipe("cpu/demo", [f"model.backbone={folder}", *open_fields, *overrides]), 28)


def test_a_checkpoint_of_the_same_method_goes_on_as_the_recipe_says(checkpoint):
    model, folder = checkpoint
    same = goes_on(folder, "model.gate_bias=1.0", "model.iterations=3")  # where gates began is past
    assert (same.config.tau, same.config.initial_multiplier, same.config.gate_bias) == (0.5, 2.0, 4.0)
    asked = ("model.tau=0.25", "model.reuse=kv", "model.embedding_scale=sqrt(d)", "train.ponder_on=logits")
    changed = goes_on(folder, *asked)
    assert (changed.config.tau, changed.config.reuse, changed.config.ponder_on) == (0.25, "kv", "logits")
    assert (changed.config.embedding_scale, changed.config.initial_multiplier) == (4.0, 2.0)
    for built in (same, changed):
        found = built.state_dict()
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
        assert built.training


@pytest.mark.parametrize("override", ["model.iterations=4", "model.gate_width=2", "model.shared_gate=True"])
def test_a_setting_that_trained_gates_cannot_follow_is_refused_by_name(checkpoint, override):
    name, value = override.split("=")
    with pytest.raises(ConfigError, match=f"{re.escape(name)}={value}.*another shape"):
        goes_on(checkpoint[1], override)


CONVERTED = {"convert/pythia-160m": "gpt_neox", "convert/llama-3.2-1b": "llama", "convert/qwen2.5-0.5b": "qwen2"}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_plain_checkpoint_is_converted_and_trained_on_in_one_command(name, shards, tmp_path):
    plain, size = stock(CONVERTED[name], dtype=torch.float32), Manifest.load(shards).vocab_size
    plain.resize_token_embeddings(max(size, plain.config.vocab_size))
    plain.save_pretrained(tmp_path / "plain")
    short = ("data.sequence=16", "train.steps=4", "train.global_batch=4", "train.micro_batch=2", "train.compile=false")
    stages = ("train.gate_start=1", "train.ponder_start=2", "train.ponder_full=3")
    stages += ("train.eval_tokens=128", "train.lr=1e-3")
    recipe = load_recipe(name, [f"model.backbone={tmp_path / 'plain'}", f"data.source={shards}", *short, *stages])
    begun = build_model(recipe, size).eval()
    with torch.no_grad():
        once, before = begun(ids(), max_iterations=1).logits, plain.eval()(ids()).logits
    torch.testing.assert_close(once, before, rtol=1e-5, atol=1e-5)  # read once, it is what it was
    assert (begun.config.iterations, begun.config.embedding_scale, begun.config.gate_bias) == (3, 1.0, 4.0)
    train(recipe, out=tmp_path / "run", quiet=True)
    before, after = begun.state_dict(), weights(tmp_path / "run" / "final")
    moved = [key for key, value in after.items() if not torch.equal(value, before[key])]
    assert any("layers.0" in key for key in moved)
    assert any("gates" in key for key in moved)
