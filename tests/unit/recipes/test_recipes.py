"""Every recipe that ships builds the model it says, on the schedule it says; a slip of the pen is an error."""

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
from adaponder.errors import ConfigError
from adaponder.fields import Recurrence, fields_of
from adaponder.methods import method_class
from adaponder.methods.cost import parameters_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import FREE_TRAIN, Recipe, TrainRecipe, load_recipe, recipe_names
from adaponder.registry import SCALES, scale_of
from adaponder.training.build import config_of
from adaponder.training.schedule import build_optimizer
from support import METHODS, tiny

PYTHIA = {"70m": 70_426_624, "410m": 405_334_016}
FROM_SCRATCH = [name for name in recipe_names() if isinstance(load_recipe(name).model.backbone, dict)]


def built(name: str, *overrides: str) -> AdaPonderConfig:
    """The config that training the recipe from scratch builds its model from."""
    found = config_of(load_recipe(name, overrides), 50_277)
    assert found is not None
    return found


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
OF_THE_MACHINE = {*FREE_TRAIN, "execution", "compile", "memory_budget", "gradient_checkpointing"}
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
def test_every_source_says_what_the_recipe_resolves_to(name):
    recipe = load_recipe(name)
    config, shape = config_of(recipe), recipe.model.backbone
    for key, source in recipe.provenance.items():
        if key == "model.backbone" and isinstance(shape, dict):
            continue  # held by the count of its parameters, above
        if key.startswith("model.backbone.") and isinstance(shape, str):
            continue  # the checkpoint's own
        found = resolved(recipe, config, key)
        found = tuple(found) if isinstance(found, list) else found
        said = as_number(source.value, shape["hidden_size"] if isinstance(shape, dict) else None)
        assert found == said, f"{key}: {source}"
        assert type(found) is type(said) or isinstance(found, float), key


@pytest.mark.parametrize("name", PAPER)
def test_every_field_that_decides_a_papers_run_has_a_source(name):
    recipe = load_recipe(name)
    needed = {
        f"{section}.{key}"
        for section, values in recipe.as_dict().items()
        if section in ("model", "data", "train")
        for key in values
        if key not in OF_THE_MACHINE and (OF_ONE_METHOD.get(key) or recipe.model.method) == recipe.model.method
    }
    assert needed <= set(recipe.provenance)
    assert {"code.gate_activation", "code.adam_epsilon"} <= set(recipe.provenance)
    for key, source in recipe.provenance.items():
        assert source.note or source.kind == "stated", f"{key}: what is not stated says why"


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


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.stpes=3", "did you mean train.steps"),
        ("trian.steps=3", "trian"),
        ("steps=3", "section.field=value"),
        ("train.steps", "section.field=value"),
        ("train.betas=[0.9]", "2 numbers"),
        ("data.sequence.x=3", "sequence is not a section"),
    ],
)
def test_a_slip_of_the_pen_is_an_error_that_names_the_field(override, says):
    with pytest.raises(ConfigError, match=says):
        load_recipe("cpu/demo", [override])
    with pytest.raises(ConfigError, match="did you mean cpu/demo"):
        load_recipe("cpu/dmo")


def test_reading_a_recipe_imports_no_torch():
    code = "import sys; from adaponder.recipes import load_recipe; load_recipe('cpu/demo')"
    code += "; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": str(Path(adaponder.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
