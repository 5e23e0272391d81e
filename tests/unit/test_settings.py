"""One list of settings: what is written there once is known to config, recipe and command line."""

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

from adaponder.config import AdaPonderConfig
from adaponder.recipes import ModelRecipe
from adaponder.settings import OpenRecurrence, Recurrence

# A process in which the list has one more field, written into its source before anybody imports it.
ONE_MORE = """
import json, sys, types
from pathlib import Path
import adaponder
path = Path(adaponder.__file__).with_name("settings.py")
before = "    exit_entropy_weight: float = setting("
assert path.read_text().count(before) == 1
field = '    warmth: list[int] = setting((3, 4), "how warm", Span(1, 9, because="it is a warmth"))\\n'
field += '    chill: int = setting(3, "how cool", Span(1, 9, because="it is cool"), option="Cool; {default}.")\\n'
module = sys.modules["adaponder.settings"] = types.ModuleType("adaponder.settings")
exec(compile(path.read_text().replace(before, field + before), path, "exec"), vars(module))

from typer.testing import CliRunner
from adaponder.cli import app
from adaponder.errors import ConfigError
from adaponder.recipes import load_recipe
from adaponder.config import AdaPonderConfig

def config_of(recipe):
    return AdaPonderConfig(backbone_config=recipe.model.backbone | {"vocab_size": 64}, **recipe.model.settings)

def refused(make):
    try:
        make()
    except ConfigError as error:
        return str(error)

plain = load_recipe("cpu/demo")
recipe = load_recipe("cpu/demo", ["model.warmth=[5, 6]", "model.chill=7"])
config = config_of(recipe)
raw = config.backbone_config.to_dict()
said = {
    "default": [config_of(plain).warmth, config_of(plain).chill],
    "recipe": [recipe.model.warmth, recipe.model.chill, plain.model.warmth],
    "fingerprints": [plain.fingerprint, recipe.fingerprint],
    "config": [config.warmth, config.chill],
    "saved": [json.loads(config.to_json_string()).get("chill")],
    "refused": [
        refused(lambda: AdaPonderConfig(backbone_config=raw, chill=0)),
        refused(lambda: AdaPonderConfig(backbone_config=raw, chill=None)),
        refused(lambda: load_recipe("cpu/demo", ["model.warmth=[5, 10]"])),
    ],
    "documented": "chill: how cool." in AdaPonderConfig.__doc__,
    "command": CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200"}).output,
    "beyond": CliRunner().invoke(app, ["convert", "x", "--out", "new", "--chill", "10"], env={"COLUMNS": "200"}).output,
}
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def one_more() -> dict:
    done = subprocess.run([sys.executable, "-c", ONE_MORE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_field_of_the_list_is_a_field_of_the_config(one_more):
    assert one_more["default"] == [[3, 4], 3]
    assert one_more["config"] == [[5, 6], 7]
    assert one_more["saved"] == [7]
    assert one_more["documented"]
    assert one_more["refused"][:2] == [
        "chill=0: a whole number from 1 to 9 is needed; it is cool",
        "chill=None: a value is needed, as 3",
    ]


def test_a_field_of_the_list_is_a_field_of_a_recipe(one_more):
    assert one_more["recipe"] == [[5, 6], 7, None]
    assert one_more["refused"][2] == (
        "model.warmth=(5, 10): a list of numbers, each from 1 to 9 is needed; it is a warmth"
    )


def test_a_later_field_does_not_rename_the_runs_before_it(one_more):
    from adaponder.recipes import load_recipe

    plain, changed = one_more["fingerprints"]
    assert plain == load_recipe("cpu/demo").fingerprint != changed


def test_a_field_of_the_list_is_an_option_where_it_says_so(one_more):
    assert "--chill" in one_more["command"]
    assert "Cool; 3." in one_more["command"]
    assert "--warmth" not in one_more["command"]
    assert "10: a whole number from 1 to 9 is needed; it is cool" in one_more["beyond"]


def test_nobody_repeats_the_list():
    names = {item.name for item in dataclasses.fields(Recurrence)}
    for kind in (AdaPonderConfig, ModelRecipe):
        assert not names & set(inspect.get_annotations(kind)), kind.__name__
    assert names <= {item.name for item in dataclasses.fields(AdaPonderConfig)}
    assert {item.name for item in dataclasses.fields(OpenRecurrence)} == names - {"ponder_on"}
