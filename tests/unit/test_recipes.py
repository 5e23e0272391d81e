"""Every recipe that ships builds the model it says, on the schedule it says; a slip of the pen is an error."""

import pytest
import torch

from adaponder.config import AdaPonderConfig
from adaponder.errors import ConfigError
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipe import load_recipe, recipe_names
from adaponder.shape import parameters_of
from adaponder.training.build import scratch_config
from adaponder.training.grid import config_of
from adaponder.training.schedule import learning_rate_factor, objective_at, phases

PYTHIA = {"70m": 70_426_624, "410m": 405_334_016}
FROM_SCRATCH = [name for name in recipe_names() if isinstance(load_recipe(name).model.backbone, dict)]


def built(name: str, *overrides: str) -> AdaPonderConfig:
    """The config that training the recipe from scratch builds its model from."""
    found = config_of(load_recipe(name, overrides), 50_277)
    assert found is not None
    return found


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_every_recipe_builds_on_the_meta_device_with_the_parameters_it_says(name):
    config = built(name)
    with torch.device("meta"):
        model = AdaPonderForCausalLM(config)
    counted = parameters_of(config)
    assert model.num_parameters() == counted.total
    if name.startswith("paper/"):
        assert counted.backbone == PYTHIA[name.rsplit("-", 1)[1]]


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("paper/")])
def test_paper_recipes_keep_the_papers_schedule_and_say_where_each_value_is_from(name):
    recipe = load_recipe(name)
    assert recipe.train.global_batch * recipe.data.sequence == 524_288
    assert recipe.train.betas == (0.9, 0.95)
    assert recipe.train.weight_decay == 0.1
    if name.removeprefix("paper/").startswith(("adaponder-70m", "adaponder-410m")):
        assert (recipe.train.ponder_start, recipe.train.ponder_full, recipe.train.steps) == (20_000, 24_000, 50_000)
        stated = set(recipe.provenance)
        assert {"train.lr", "train.steps", "train.ponder_weight", "train.k_max", "model.tau", "train.clip"} <= stated
    known = {f"{section}.{key}" for section, keys in recipe.as_dict().items() if isinstance(keys, dict) for key in keys}
    assert set(recipe.provenance) <= known
    for source in recipe.provenance.values():
        assert source.startswith(("stated", "inferred", "from the PonderLM"))


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_recipes_that_are_compared_have_one_embedding_scale(name):
    config = built(name)
    scale = (2.5 * config.hidden_size if config.method == "loop" else config.hidden_size) ** 0.5
    if name.startswith("paper/vanilla-") and "scaled" not in name:
        scale = 1.0  # Pythia as it was released; paper/vanilla-scaled-* is the twin to compare with
    assert config.embedding_scale == scale


def test_the_scale_is_recorded_and_hashed_whether_said_or_left_open():
    recipe = load_recipe("mini/vanilla")
    assert recipe.as_dict()["model"]["embedding_scale"] == "sqrt(d)"
    assert load_recipe("mini/vanilla", ["model.embedding_scale=sqrt(d)"]).fingerprint == recipe.fingerprint
    assert load_recipe("mini/vanilla", ["model.embedding_scale=1"]).fingerprint != recipe.fingerprint
    assert built("mini/vanilla").embedding_scale == 16.0
    assert built("mini/adaponder", "model.method=loop").embedding_scale == 640**0.5
    assert load_recipe("paper/adaponder-1.4b-from-ponder").as_dict()["model"]["embedding_scale"] is None


GATES_BEGIN = {
    "mini/adaponder": 400,
    "mini/ponder": 0,
    "mini/mor": 0,
    "ablation/no-stage-1": 0,
    "paper/adaponder-70m": 6666,
    "paper/adaponder-410m": 6666,
    "paper/ablation-k-0.15-70m": 2543,
    "paper/pause-70m": 0,
    "paper/adaponder-1.4b-from-ponder": 0,  # they learn alone first
    "paper/adaponder-1.4b-from-vanilla": 0,
    "cpu/demo": 0,  # its stage 1 is over before reading again could pay
}


@pytest.mark.parametrize("name", GATES_BEGIN)
def test_gates_begin_to_learn_a_third_into_stage_1_where_one_is_long(name):
    assert load_recipe(name).train.gates_begin == GATES_BEGIN[name]


def test_whoever_says_when_gates_begin_is_heard():
    assert load_recipe("mini/adaponder", ["train.gate_start=7"]).train.gates_begin == 7
    assert load_recipe("mini/adaponder", ["train.ponder_weight=0"]).train.gates_begin == 0
    with pytest.raises(ConfigError, match="gate_start"):
        load_recipe("mini/adaponder", ["train.gate_start=-1"])


def test_continued_pretraining_trains_gates_alone_for_a_billion_tokens_first():
    recipe = load_recipe("paper/adaponder-1.4b-from-ponder")
    first, second = phases(recipe.train)
    assert not first.backbone_trains
    assert second.backbone_trains
    assert abs((first.end - first.start) * 524_288 - 1e9) < 524_288
    assert recipe.train.lr == pytest.approx(2e-5)
    assert len(phases(load_recipe("paper/adaponder-1.4b-from-vanilla").train)) == 1


def test_the_schedule_warms_up_and_ends_at_its_floor():
    train = load_recipe("paper/adaponder-70m").train
    assert learning_rate_factor(train, 0) == pytest.approx(1 / 1000)
    assert learning_rate_factor(train, 999) == 1.0
    assert learning_rate_factor(train, 49_999) == pytest.approx(0.1)
    assert objective_at(train, 19_999).ponder_weight == 0
    assert objective_at(train, 20_000).ponder_fraction == 0
    assert objective_at(train, 22_000).ponder_fraction == pytest.approx(0.05)
    assert objective_at(train, 24_000).ponder_fraction == 0.1


def test_overrides_reach_their_field_and_change_the_hash():
    plain = load_recipe("cpu/demo")
    changed = load_recipe("cpu/demo", ["train.lr=1e-4", "train.betas=[0.8, 0.9]", "model.backbone.hidden_size=64"])
    assert changed.train.lr == 1e-4
    assert changed.train.betas == (0.8, 0.9)
    assert changed.model.backbone["hidden_size"] == 64
    assert changed.fingerprint != plain.fingerprint
    assert load_recipe("cpu/demo", ["train.log_every=1"]).fingerprint == plain.fingerprint


def test_a_written_recipe_is_read_back_as_it_was(tmp_path):
    recipe = load_recipe("paper/mor-70m")
    (tmp_path / "mine.yaml").write_text(recipe.to_yaml())
    assert load_recipe(str(tmp_path / "mine.yaml")).fingerprint == recipe.fingerprint


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.stpes=3", "did you mean train.steps"),
        ("trian.steps=3", "trian"),
        ("steps=3", "section.field=value"),
        ("train.steps", "section.field=value"),
        ("train.steps=many", "train.steps"),
        ("train.steps=0", "at least one"),
        ("train.lr=-1", "train.lr"),
        ("train.dtype=int8", "choose one of"),
        ("train.betas=[0.9]", "2 numbers"),
        ("train.compile=maybe", "train.compile"),
        ("train.ponder_full=3", "ponder_start"),
        ("train.freeze_backbone_steps=999999", "freeze_backbone_steps"),
        ("data=3", "section.field=value"),
        ("data.sequence.x=3", "sequence is not a section"),
    ],
)
def test_a_slip_of_the_pen_is_an_error_that_names_the_field(override, says):
    with pytest.raises(ConfigError, match=says):
        load_recipe("cpu/demo", [override])


def test_unknown_recipes_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean cpu/demo"):
        load_recipe("cpu/dmo")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_recipe(str(tmp_path / "bad.yaml"))
    (tmp_path / "loop.yaml").write_text(f"base: {tmp_path / 'loop.yaml'}")
    with pytest.raises(ConfigError, match="circle"):
        load_recipe(str(tmp_path / "loop.yaml"))


def test_a_misspelt_field_of_the_backbone_is_an_error_with_a_suggestion():
    recipe = load_recipe("cpu/demo", ["model.backbone.hiden_size=64"])
    with pytest.raises(ConfigError, match=r"model.backbone.hiden_size: gpt_neox has no such field; did you mean"):
        scratch_config(recipe, 300)


@pytest.mark.parametrize("override", ["train.memory_budget=0.5", "train.memory_budget=0"])
def test_settings_of_the_compiler_without_it_are_named(override):
    with pytest.raises(ConfigError, match=override.removeprefix("train.")):
        load_recipe("mini/adaponder", ["train.compile=false", override])


def test_how_to_compile_may_be_said_of_what_is_not_compiled():
    assert load_recipe("mini/adaponder", ["train.compile=false"]).train.compile_by == "pass"
    assert load_recipe("ablation/no-reuse").train.compile_by == "pass"
    assert load_recipe("paper/adaponder-70m").train.compile_by == "layer"
    with pytest.raises(ConfigError, match="compile_by"):
        load_recipe("mini/adaponder", ["train.compile_by=whole"])
