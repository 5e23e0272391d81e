"""Identities: those of every record stay as they are, whatever becomes of the recipe's fields."""

import json
from dataclasses import fields
from pathlib import Path

from adaponder.recipes import DataRecipe, ModelRecipe, TrainRecipe, load_recipe
from experiments.identity import frozen_defaults, identity

HERE = Path(__file__).parent
RECORDS = HERE.parents[2] / "experiments" / "records"


def test_every_record_keeps_its_identity():
    pinned = dict(reversed(line.split()) for line in (HERE / "identities.txt").read_text().splitlines())
    assert len(pinned) == 189
    computed = {name: identity(json.loads((RECORDS / name).read_text())["recipe"]) for name in pinned}
    assert computed == pinned


def test_every_field_has_its_frozen_default():
    """A new field goes into defaults.yaml with its default; a removed one stays there."""
    required = {"backbone", "source", "steps", "global_batch"}
    for section, kind in (("model", ModelRecipe), ("data", DataRecipe), ("train", TrainRecipe)):
        assert {field.name for field in fields(kind)} - required <= frozen_defaults()[section].keys()


def test_removing_a_field_changes_no_identity():
    recipe = load_recipe("mini/ponder").as_dict()
    known = identity(recipe)
    for section, names in frozen_defaults().items():
        for name in names:
            if name in recipe[section] and name not in ("method", "embedding_scale"):
                shorter = recipe | {section: {key: value for key, value in recipe[section].items() if key != name}}
                at_default = recipe[section][name] == names[name]
                assert (identity(shorter) == known) >= at_default, (section, name)
