"""One table of fields: engine, command line, server body and OpenAPI take the same values."""

import dataclasses
import inspect
import math
from typing import Annotated

import pydantic
import pytest
import typer
from typer.testing import CliRunner

from adaponder import fields, registry
from adaponder.config import AdaPonderConfig
from adaponder.errors import ConfigError, InputError
from adaponder.fields import REQUEST_FIELDS, Recurrence, body_field, check, option
from adaponder.recipes import ModelRecipe, load_recipe

VALUES = {
    "top_p": ((0.5, 1), (0, 1.5, -1)),
    "temperature": ((0, 0.7, 100), (-0.1, 101)),
    "repetition_penalty": ((1e-6, 1.0, 1e6), (0, 1e7)),
    "max_new_tokens": ((1, 10**9), (0, -3)),
    "samples": ((1, 128), (0, 129)),
}
CASES = [(name, value, True) for name, (good, _) in VALUES.items() for value in good]
CASES += [(name, value, False) for name, (_, bad) in VALUES.items() for value in bad]


@pytest.mark.parametrize(("name", "value", "allowed"), CASES)
def test_engine_command_and_server_take_the_same_values(name, value, allowed):
    kind = REQUEST_FIELDS[name].type
    body = pydantic.create_model("Body", value=(Annotated[kind, body_field(name)], ...))
    app = typer.Typer()

    @app.command()
    def command(value: Annotated[kind, option(name, "--value")]) -> None:
        pass

    taken = {"command": CliRunner().invoke(app, [f"--value={value}"]).exit_code == 0}
    for user, take in (("engine", lambda: check(name, value)), ("server", lambda: body(value=value))):
        try:
            take()
            taken[user] = True
        except ValueError:
            taken[user] = False
    assert set(taken.values()) == {allowed}, taken


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", True, None, [1.0]])
@pytest.mark.parametrize("name", ["temperature", "top_k"])
def test_only_finite_numbers_are_numbers(name, value):
    with pytest.raises(InputError, match=f"^{name}="):
        check(name, value)


def test_config_and_recipe_have_the_fields_of_the_table_and_repeat_none():
    names = {item.name for item in dataclasses.fields(Recurrence)}
    for kind in (AdaPonderConfig, ModelRecipe):
        assert not names & set(inspect.get_annotations(kind)), kind.__name__
        assert names - {"ponder_on"} <= {item.name for item in dataclasses.fields(kind)}
    assert all(f"{name}: " in (AdaPonderConfig.__doc__ or "") for name in names)


def test_a_removed_field_is_taken_at_its_old_default_only(monkeypatch):
    plain = load_recipe("cpu/demo")
    before = plain.fingerprint
    backbone = plain.model.backbone | {"vocab_size": 64}
    removed = {"model.warmth": (3, "0.1.0"), "train.layers": ([1, 2], "0.1.0")}
    monkeypatch.setattr(fields, "REMOVED", removed)
    monkeypatch.setattr("adaponder.recipes.schema.REMOVED", removed)
    older = load_recipe("cpu/demo", ["model.warmth=3", "train.layers=[1, 2]"])
    assert older.fingerprint == load_recipe("cpu/demo").fingerprint != before
    assert not hasattr(AdaPonderConfig(backbone_config=backbone, warmth=3), "warmth")
    with pytest.raises(ConfigError, match=r"model\.warmth=4 .*0\.1\.0"):
        AdaPonderConfig(backbone_config=backbone, warmth=4)
    with pytest.raises(ConfigError, match=r"train\.layers=\[1\] .*0\.1\.0"):
        load_recipe("cpu/demo", ["train.layers=[1]"])
    monkeypatch.setattr(registry, "REMOVED_METHODS", {"ponderous": "0.1.0"})
    with pytest.raises(ConfigError, match=r"model\.method=ponderous .*0\.1\.0"):
        load_recipe("cpu/demo", ["model.method=ponderous"])
