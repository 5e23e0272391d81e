"""Recipes: those that ship build the models they describe, each value has its source, and runs follow them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adaponder
from adaponder import halting
from adaponder.config import AdaPonderConfig
from adaponder.data import Manifest
from adaponder.errors import ConfigError
from adaponder.fields import Recurrence, fields_of
from adaponder.methods import method_class
from adaponder.methods.cost import parameters_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import FREE_TRAIN, Recipe, TrainRecipe, load_recipe, recipe_names
from adaponder.registry import SCALES, scale_of
from adaponder.training.build import build_model, config_of
from adaponder.training.run import train
from adaponder.training.schedule import build_optimizer
from support import METHODS, ids, stock, tiny
from training_support import weights

PYTHIA = {"70m": 70_426_624, "410m": 405_334_016}
FROM_SCRATCH = [name for name in recipe_names() if isinstance(load_recipe(name).model.backbone, dict)]


def built(name: str, *overrides: str) -> AdaPonderConfig:
    """The config that training the recipe from scratch builds its model from."""
    config = config_of(load_recipe(name, overrides), 50_277)
    assert config is not None
    return config


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_every_recipe_builds_on_the_meta_device_with_the_parameters_it_says(name):
    config = built(name)
    with torch.device("meta"):
        model = AdaPonderForCausalLM(config)
    counted = parameters_of(config)
    assert model.num_parameters() == counted.total
    if name.startswith("paper/"):
        assert counted.backbone == PYTHIA[name.rsplit("-", 1)[1]]


PAPER = [name for name in recipe_names() if name.startswith("paper/")]
# How fast a run is and what it keeps; what it computes is the same.
OF_THE_MACHINE = {*FREE_TRAIN, "execution", "compile", "memory_budget", "cuda_graphs", "gradient_checkpointing"}
# Settings that only one method reads, by the first word of their meaning; no paper has those of "none".
OF_ONE_METHOD = {
    name: next((word for word in METHODS if re.match(rf"(for )?{word}\b", field.meaning)), None)
    for kind in (Recurrence, TrainRecipe)
    for name, field in fields_of(kind).items()
} | {"pause_token_id": "pause", "exit_threshold": "ouro", "exit_entropy_steps": "ouro"}
OF_ONE_METHOD |= dict.fromkeys(("target_gain", "target_every", "freeze_gates", "lora_rank", "lora_alpha"), "none")
# What a checkpoint brings along where the recipe leaves it open.
OF_A_CHECKPOINT = ("embedding_scale", "initial_multiplier", "expectation_top_k")


def resolved(recipe: Recipe, config: AdaPonderConfig | None, key: str) -> Any:
    """What a recipe's ``section.field`` comes to in the model that is built from ``config``, or in the run."""
    section, _, name = key.partition(".")
    if section == "code":
        optimizer = build_optimizer(tiny(), recipe.train)
        return {"gate_activation": halting.gelu.__name__, "adam_epsilon": optimizer.defaults["eps"]}[name]
    if section != "model" or name == "init":
        return getattr(getattr(recipe, section), name)
    if name.startswith("backbone.") and config is not None:
        return getattr(config.backbone_config, name.removeprefix("backbone."))
    if config is not None:
        return getattr(config, name)
    left_open = getattr(recipe.model, name) is None and name not in OF_A_CHECKPOINT
    return getattr(AdaPonderConfig, name) if left_open else getattr(recipe.model, name)


def as_number(value: Any, hidden_size: int | None) -> Any:
    if isinstance(value, str) and value in SCALES and hidden_size is not None:
        return scale_of(value, hidden_size)
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("name", PAPER)
def test_every_field_that_decides_a_papers_run_has_a_source_that_says_what_it_resolves_to(name):
    recipe = load_recipe(name)
    config, shape = config_of(recipe), recipe.model.backbone
    for key, source in recipe.provenance.items():
        assert source.note or source.kind == "stated", f"{key}: what is not stated says why"
        if key == "model.backbone" and isinstance(shape, dict):
            continue  # held by the count of its parameters, above
        if key.startswith("model.backbone.") and isinstance(shape, str):
            continue  # the checkpoint's own
        value = resolved(recipe, config, key)
        value = tuple(value) if isinstance(value, list) else value
        expected = as_number(source.value, shape["hidden_size"] if isinstance(shape, dict) else None)
        assert value == expected, f"{key}: {source}"
        assert type(value) is type(expected) or isinstance(value, float), key
    needed = {
        f"{section}.{key}"
        for section, values in recipe.as_dict().items()
        if section in ("model", "data", "train")
        for key in values
        if key not in OF_THE_MACHINE and (OF_ONE_METHOD.get(key) or recipe.model.method) == recipe.model.method
    }
    assert needed <= set(recipe.provenance)
    assert {"code.gate_activation", "code.adam_epsilon"} <= set(recipe.provenance)


def test_recipes_that_are_compared_have_one_embedding_scale():
    for name in FROM_SCRATCH:
        config = built(name)
        scale = (2.5 * config.hidden_size if config.method == "loop" else config.hidden_size) ** 0.5
        if name.startswith("paper/vanilla-") and "scaled" not in name:
            scale = 1.0  # Pythia as it was released; paper/vanilla-scaled-* is the twin to compare with
        assert config.embedding_scale == scale, name


def test_the_scale_is_recorded_and_hashed_whether_said_or_left_open():
    recipe = load_recipe("mini/vanilla")
    assert recipe.as_dict()["model"]["embedding_scale"] == "sqrt(d)"
    assert load_recipe("mini/vanilla", ["model.embedding_scale=sqrt(d)"]).fingerprint == recipe.fingerprint
    assert load_recipe("mini/vanilla", ["model.embedding_scale=1"]).fingerprint != recipe.fingerprint
    assert built("mini/vanilla").embedding_scale == 16.0
    assert built("mini/adaponder", "model.method=loop").embedding_scale == 640**0.5
    assert load_recipe("paper/adaponder-1.4b-from-ponder").as_dict()["model"]["embedding_scale"] is None


def gates_begin(name: str, *overrides: str) -> int:
    recipe = load_recipe(name, overrides)
    return recipe.train.gates_begin(pressed=method_class(recipe.model.method).has_ponder_term)


def test_whoever_says_when_gates_begin_is_heard():
    assert gates_begin("mini/adaponder", "train.gate_start=7") == 7
    assert gates_begin("mini/adaponder", "train.ponder_weight=0") == 0
    assert gates_begin("mini/adaponder", "model.method=ouro") == 0, "no ponder loss is to come"
    assert gates_begin("mini/adaponder", "model.method=ouro", "train.gate_start=7") == 7
    with pytest.raises(ConfigError, match="gate_start"):
        load_recipe("mini/adaponder", ["train.gate_start=-1"])


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
        weights_built = built.state_dict()
        assert weights_built.keys() == model.state_dict().keys()
        assert all(torch.equal(weights_built[name], value) for name, value in model.state_dict().items())
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


def test_reading_a_recipe_imports_no_torch():
    code = "import sys; from adaponder.recipes import load_recipe; load_recipe('cpu/demo')"
    code += "; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": str(Path(adaponder.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
