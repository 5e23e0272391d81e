"""A grid is a list of recipes: each is built and checked before any of them runs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from adaponder.config import AdaPonderConfig
from adaponder.errors import ConfigError, InputError
from adaponder.files import parse_yaml
from adaponder.recipes import Recipe, load_recipe
from adaponder.training.build import scratch_config

_LONGEST_NAME = 120


class Axis(NamedTuple):
    """One field of a recipe and the values it is to take."""

    field: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its folder's name, its recipe, the value of every axis, and the overrides that make it."""

    name: str
    recipe: Recipe
    fields: Mapping[str, Any]
    overrides: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """``section.field=value,value,…`` as data; a list in brackets is one value."""
    field, _, listed = text.partition("=")
    if "." not in field or not listed.strip() or listed.rstrip().endswith(","):
        raise InputError(f"--grid {text}: section.field=value,value,… is needed, e.g. train.k_max=0.1,0.15,0.2")
    if field == "train.seed":
        raise InputError(f"--grid {text}: say --seeds {listed}; seeds are averaged over, not compared")
    try:
        values = parse_yaml(f"[{listed}]", "--grid", InputError)
    except InputError:
        raise InputError(f"--grid {text}: {listed!r} is not a list of values") from None
    return Axis(field, tuple(values))


def plan(
    name: str,
    grids: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    one_at_a_time: bool = False,
    seeds: Sequence[int] = (),
) -> list[Run]:
    """Every run of the grid, seed by seed, so that the first seed alone already gives a whole picture.

    The grid is the product of the axes. ``one_at_a_time`` is the recipe as it is, once, and then every other value of
    each axis with all else as in the recipe.
    """
    base, axes = load_recipe(name, overrides), [parse_axis(text) for text in grids]
    if not axes and not seeds:
        raise InputError("--grid is missing: name at least one axis, e.g. --grid train.k_max=0.1,0.15,0.2; or --seeds")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"--seeds {','.join(map(str, seeds))}: a seed stands there twice")
    fixed = {override.partition("=")[0] for override in overrides}
    if seeds and "train.seed" in fixed:
        raise InputError("train.seed is --set and --seeds is given: drop one")
    _check_axes(axes, fixed, one_at_a_time=one_at_a_time)
    if one_at_a_time:
        points = [(), *(((axis.field, value),) for axis in axes for value in axis.values)]
    else:
        points = list(itertools.product(*([(axis.field, value) for value in axis.values] for axis in axes)))
    own = {axis.field: value_of(base, axis.field) for axis in axes}
    runs = []
    for seed, point in itertools.product(seeds or (base.train.seed,), points):
        changed = tuple(f"{field}={_as_override(value)}" for field, value in point)
        if seed != base.train.seed:
            changed += (f"train.seed={seed}",)
        try:
            recipe = load_recipe(name, [*overrides, *changed])
            config_of(recipe)  # what no model can be built from is an error now
            fields = {axis.field: value_of(recipe, axis.field) for axis in axes}
        except ConfigError as error:
            raise ConfigError(f"--grid {' '.join(changed)}: {str(error).removeprefix('--set ')}") from None
        if one_at_a_time and point and fields == own:
            continue  # the recipe's own value: that is the base run
        runs.append(Run(_name_of(recipe, fields, point, base), recipe, fields, (*overrides, *changed)))
    _refuse_twins(runs)
    return runs


def _check_axes(axes: Sequence[Axis], fixed: set[str], *, one_at_a_time: bool) -> None:
    for place, axis in enumerate(axes):
        if axis.field in {before.field for before in axes[:place]}:
            raise InputError(f"--grid {axis.field} stands there twice: give all its values in one")
        if axis.field in fixed and not one_at_a_time:
            raise InputError(f"{axis.field} is both --set and --grid: drop one, or say --one-at-a-time")


def _refuse_twins(runs: Sequence[Run]) -> None:
    first: dict[str, Run] = {}
    for run in runs:
        twin = first.setdefault(run.recipe.fingerprint, run)
        if twin is run:
            continue
        if same := [field for field in run.fields if run.fields[field] != twin.fields[field]]:
            raise InputError(f"--grid {same[0]}: this field does not change what is trained, so there is no axis")
        raise InputError(f"--grid: {run.name} stands there twice; list each value once")


def value_of(recipe: Recipe, field: str) -> Any:
    """The field's value; where the recipe leaves a model's field open, what it resolves to."""
    place: Any = recipe.as_dict()
    for part in field.split("."):
        place = place.get(part) if isinstance(place, dict) else None
    section, _, key = field.partition(".")
    left_open = place is None or field == "model.embedding_scale"
    if left_open and section == "model" and (config := config_of(recipe)) is not None:
        place = getattr(config, key, None)
    return list(place) if isinstance(place, tuple) else place


def config_of(recipe: Recipe, vocabulary: int | None = None) -> AdaPonderConfig | None:
    """The config that a recipe from scratch builds its model from; ``None`` where a checkpoint decides.

    Before there is a tokenizer, its vocabulary is taken to be as large as the recipe needs it.
    """
    if isinstance(recipe.model.backbone, str):
        return None
    smallest = (recipe.model.pause_token_id or 0) + 1
    return scratch_config(recipe, smallest if vocabulary is None else vocabulary)


def _name_of(recipe: Recipe, fields: Mapping[str, Any], point: Sequence[tuple[str, Any]], base: Recipe) -> str:
    """``k_max=0.1__ponder_weight=0.2__seed=1``: what was asked, in letters that every file system and shell takes."""
    lasts = [field.rpartition(".")[2] for field in fields]
    parts = []
    for field, _ in point:
        last = field.rpartition(".")[2]
        parts.append(f"{last if lasts.count(last) == 1 else field}={shown(fields[field]).strip('[]')}")
    if recipe.train.seed != base.train.seed:
        parts.append(f"seed={recipe.train.seed}")
    wished = "__".join(parts) or "base"
    safe = re.sub(r"[^A-Za-z0-9._=+-]+", "-", wished)[:_LONGEST_NAME]
    # What had to be rewritten or cut may be taken for another: the hash tells them apart.
    return safe if safe == wished else f"{safe}__{recipe.fingerprint}"


def shown(value: Any) -> str:
    """A value as one would type it: 0.1, 4, true, none."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _as_override(value: Any) -> str:
    """Text that ``--set`` reads as ``value``."""
    if isinstance(value, str):
        try:
            if parse_yaml(value, "--grid", InputError) == value:
                return value
        except InputError:
            pass  # needs quotes to be read as text
    return json.dumps(value, default=str)
