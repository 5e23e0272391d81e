"""Every field of a recipe has a type and a range; what leaves them is one line that names the field, at once."""

import dataclasses
import json
import types
import typing
from typing import Any, Literal

import pytest
from transformers import PreTrainedConfig

from adaponder.config import AdaPonderConfig
from adaponder.errors import ConfigError
from adaponder.fields import Field, Range, Recurrence
from adaponder.fields import fields_of as table_of
from adaponder.recipes import DataRecipe, ModelRecipe, TrainRecipe, load_recipe
from adaponder.registry import method_names
from adaponder.training import run
from adaponder.training.build import config_of

SECTIONS: dict[str, Any] = {"model": ModelRecipe, "data": DataRecipe, "train": TrainRecipe}
TINY = """
model:
  backbone: {model_type: gpt_neox, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 256}
data: {source: nowhere, sequence: 8}
train: {steps: 100, global_batch: 2}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def refusal(tiny: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(tiny, overrides)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    return str(caught.value)


# Lists whose length is held against the iterations, and only by the method that reads them.
PER_ITERATION = {"capacities": "mor", "loss_prior": "anytime"}


def kind_of(hint: Any) -> Any:
    """A field's type without ``None``, and that of its numbers where it has a number or a word."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(argument for argument in typing.get_args(hint) if argument is not type(None))
    return hint


def another(field: Field) -> Any:
    """A valid value that is not the field's default."""
    kind = kind_of(field.type)
    if typing.get_origin(kind) is list:
        return [1.0, 0.5, 0.25, 0.25] if field.name == "capacities" else [0.4, 0.3, 0.2, 0.1]
    words = field.choices() if field.choices else typing.get_args(kind)
    values = (True, False) if kind is bool else words or [kind(number) for number in (3, 0.6)]
    return next(value for value in values if value != field.default and (words or value in field.range))


def test_no_setting_of_the_config_is_forgotten():
    kinds = (AdaPonderConfig, PreTrainedConfig)
    ours, inherited = ({item.name for item in dataclasses.fields(kind)} for kind in kinds)
    assert ours - inherited - {"backbone_config"} == set(table_of(Recurrence))


@pytest.mark.parametrize("name", table_of(Recurrence))
def test_every_setting_of_the_config_is_set_by_the_command_line(tiny, name):
    section = "train" if name == "ponder_on" else "model"
    value = another(table_of(Recurrence)[name])
    method = [f"model.method={PER_ITERATION[name]}"] if name in PER_ITERATION else []
    before, after = load_recipe(tiny, method), load_recipe(tiny, [*method, f"{section}.{name}={json.dumps(value)}"])
    config = config_of(after)
    assert getattr(config, name) == value
    assert getattr(config_of(before), name) != value
    assert after.fingerprint != before.fingerprint


NEVER = (".nan", "-.inf", "1e30", "9" * 39, "9" * 5000, "0x" + "f" * 5000, "lots", "true")
OF_ANOTHER_TYPE = ("{a: 1}", "[[1]]", "2001-99-99", "!!python/object/apply:os.getcwd []", "*x")


def range_of(field: str) -> Range:
    section, _, name = field.partition(".")
    return table_of(SECTIONS[section])[name].range


def fields_of(*kinds: Any) -> list[str]:
    names = []
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            kind_of_field = kind_of(hints[item.name])
            if kind_of_field in kinds or typing.get_origin(kind_of_field) in kinds:
                names.append(f"{section}.{item.name}")
    return names


def test_every_field_is_of_a_kind_that_is_walked():
    walked = fields_of(int, float, list, tuple, bool, Literal, str)
    everything = [f"{section}.{item.name}" for section, kind in SECTIONS.items() for item in dataclasses.fields(kind)]
    assert set(everything) - set(walked) == {"model.backbone"}
    assert len(walked) == len(set(walked))
    for section, kind in SECTIONS.items():
        for item in dataclasses.fields(kind):
            if f"{section}.{item.name}" in fields_of(int, float, list, tuple):
                assert table_of(kind)[item.name].range != Range(), f"{section}.{item.name} has no range"


@pytest.mark.parametrize("field", fields_of(int, float))
def test_a_number_outside_its_range_is_refused_by_name(tiny, field):
    for value in (*NEVER, *OF_ANOTHER_TYPE, "[1]", "''"):
        assert field in refusal(tiny, f"{field}={value}")
    for value in (-1, 0):
        if value in range_of(field):
            load_recipe(tiny, [f"{field}={value}"])
        else:
            assert field in refusal(tiny, f"{field}={value}")
    if field in fields_of(int):
        assert field in refusal(tiny, f"{field}=1.5")


@pytest.mark.parametrize("field", fields_of(list, tuple))
def test_a_list_is_refused_for_any_number_in_it(tiny, field):
    length = 4 if field.partition(".")[2] in PER_ITERATION else 2
    for value in (*NEVER, "-1", "{a: 1}", "[1]", *(["0"] if 0 not in range_of(field) else [])):
        assert field in refusal(tiny, f"{field}=[{', '.join([value] * length)}]")
    for value in ("3", "text", "{a: 1}", "true", *(["[0.1]", "[0, 0, 0]"] if length == 2 else [])):
        assert field in refusal(tiny, f"{field}={value}")


@pytest.mark.parametrize("field", fields_of(bool, Literal, str))
def test_a_value_that_is_no_choice_or_no_name_is_refused(tiny, field):
    names = ("true", "'  '", '"a\\0b"', "null") if field in fields_of(str) else ("lots", "-1", "1.5")
    for value in (".nan", "5", "[a]", "{a: 1}", "''", *names):
        assert field in refusal(tiny, f"{field}={value}")


def test_only_what_may_be_left_open_is_nothing(tiny):
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            field = f"{section}.{item.name}"
            if field == "model.method":
                assert field in refusal(tiny, f"{field}=null"), "from scratch there is no checkpoint to continue"
            elif type(None) in typing.get_args(hints[item.name]):
                load_recipe(tiny, [f"{field}=null"])
            else:
                assert field in refusal(tiny, f"{field}=null")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["train.stpes=3"], "did you mean train.steps?"),
        (["trian.steps=3"], "trian"),
        (["steps=3"], "section.field=value"),
        (["train.steps"], "section.field=value"),
        (["data.sequence.x=3"], "sequence is not a section"),
        (["model.ponder_on=logits"], "did you mean train.ponder_on?"),
        (["train.tau=0.1"], "did you mean model.tau?"),
        (["model.method=adaponde"], "did you mean adaponder?"),
        (["model.method='5'"], f"model.method='5' must be one of {', '.join(method_names())}"),
        (["train.warmup=101"], "train.warmup"),
        (["train.joint_warmup=1.5"], "train.joint_warmup"),
        (["train.freeze_backbone_steps=101"], "train.freeze_backbone_steps"),
        (["train.ponder_start=5"], "train.ponder_full"),
        (["train.eval_tokens=7"], "train.eval_tokens"),
        (["train.memory_budget=0.5"], "train.memory_budget"),
        (["model.iterations=3", "train.target_depth=3.5"], "train.target_depth"),
        (["train.target_depth=2", "train.ponder_weight=0"], "train.target_depth"),
        (["train.target_depth=2", "train.cuda_graphs=true"], "train.cuda_graphs"),
        (["train.gradient_checkpointing=true", "train.cuda_graphs=true"], "train.cuda_graphs"),
        (["train.exit_entropy_steps=[1, 3]"], "train.exit_entropy_steps"),
        (["train.exit_entropy=[1, 0]", "train.exit_entropy_steps=[3, 1]"], "train.exit_entropy_steps"),
        (["train.lora_rank=2", "train.compile=true"], "train.lora_rank"),
        (["train.lora_alpha=4"], "train.lora_alpha"),
        (["train.freeze_gates=true"], "train.freeze_gates"),
        (["model.backbone=[1]"], "model.backbone"),
        (["model.backbone=''"], "model.backbone"),
        (["model.backbone={a: 1}"], "model.backbone.model_type"),
        (["model.backbone.rope_parameters={rope_theta: .inf}"], "model.backbone.rope_parameters.rope_theta"),
        (["model.embedding_scale=sqrt(e)"], "model.embedding_scale"),
    ],
)
def test_unknown_fields_and_values_that_contradict_each_other_are_refused_by_name(tiny, overrides, names):
    assert names in refusal(tiny, *overrides)


def test_a_config_made_without_a_recipe_has_the_same_ranges():
    backbone = load_recipe("cpu/demo").model.backbone | {"vocab_size": 256}
    bad = {int: (0.5, "1", True, float("nan"), 10**400), float: ("1", True, float("nan"), float("inf"), 10**400)}
    hints = typing.get_type_hints(Recurrence)
    walked = 0
    for name in hints:
        for value in bad.get(kind_of(hints[name]), ([], 5)):
            if name in PER_ITERATION and value == []:
                continue  # held against the iterations by the method that reads it
            with pytest.raises(ConfigError, match=rf"\b{name}\b"):
                AdaPonderConfig(backbone_config=backbone, **{name: value})
            walked += 1
    assert walked > 50
    for name, field in table_of(Recurrence).items():
        for bound, value in field.range.bounds.items():
            beyond = value - 1 if bound in ("ge", "gt") else value + 1
            outside = [beyond] if name in PER_ITERATION else beyond
            with pytest.raises(ConfigError, match=rf"^{name}="):
                AdaPonderConfig(backbone_config=backbone, **dict[str, Any]({name: outside}))
    for name in ("iterations", "tau", "reuse", "shared_gate", "exit_prior"):
        with pytest.raises(ConfigError, match=f"{name}=None"):
            AdaPonderConfig(backbone_config=backbone, **dict[str, Any]({name: None}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.backbone.model_type=gpt_neoxx", "model.backbone.model_type='gpt_neoxx'"),
        ("model.backbone.num_attention_heads=3", "model.backbone.num_attention_heads=3"),
        ("model.backbone.hiden_size=3", "hiden_size"),
        ("model.capacities=[1.0, 0.5]", "capacities"),
    ],
)
def test_what_no_model_can_be_built_from_is_found_before_data_is_prepared(tmp_path, monkeypatch, override, message):
    monkeypatch.setattr("adaponder.training.data.shards_folder", lambda *a, **k: pytest.fail("data was prepared"))
    recipe = load_recipe("cpu/demo", ["model.method=mor", override])
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        run.train(recipe, out=tmp_path / "out")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20)
)
FILES: dict[str, tuple[bytes, str]] = {
    "a bomb of aliases": (BOMB.encode(), "alias"),
    "nested too deeply": (b"model: " + b"[" * 100_000, "nested"),
    "nested mappings": (b"model: " + b"{a: " * 5000 + b"1" + b"}" * 5000, "nested"),
    "a number of too many digits": (b"train: {steps: " + b"9" * 100_000 + b"}", "digits"),
    "a sexagesimal of too many digits": (b"train: {steps: 1" + b":59" * 50_000 + b"}", "digits"),
    "a date that is none": (b"train: {steps: 2001-99-99}", "month"),
    "an object": (b"model: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "not UTF-8": (b"about: \xff\xfe", "is not text in UTF-8"),
    "too large": (b"about: " + b"x" * 2**20, "more than"),
    "a list": (b"[1, 2]", "mapping"),
    "a list of bases": (b"base: [a, b]", "base="),
    "a base of itself": (b"base: mine.yaml", "cycle"),
    "a key twice": (b"train: {steps: 1, steps: 2}", "steps is given twice"),
    "a key that is a number": (b"5: 6", "5: no such field; a recipe has base, model, data, train, about"),
    "a section that is none": (b"base: cpu/demo\ntrain: null", "train=None"),
    "a source of no kind": (b"base: cpu/demo\nprovenance: {train.lr: {kind: no}}", "provenance.train.lr.kind="),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path, monkeypatch, what):
    content, message = FILES[what]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_recipe("mine.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "", "/", "."])
def test_a_name_that_no_file_can_have_is_no_recipe(name):
    with pytest.raises(ConfigError, match="neither a shipped recipe nor a file"):
        load_recipe(name)
    with pytest.raises(ConfigError, match="did you mean cpu/demo"):
        load_recipe("cpu/dmo")


def test_text_in_quotes_stays_text(tiny):
    assert load_recipe(tiny, ["data.source='123'"]).data.source == "123"
    assert load_recipe(tiny, ["train.lr='1e-3'"]).train.lr == 1e-3
    assert load_recipe(tiny, ["model.backbone.hidden_size='32'"]).model.backbone["hidden_size"] == 32
