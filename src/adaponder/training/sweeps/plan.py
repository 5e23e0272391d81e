"""Which runs a sweep has: a recipe for every combination of values, each checked before any of them is trained."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from adaponder.errors import ConfigError, InputError
from adaponder.files import parse_yaml
from adaponder.recipes import Recipe, load_recipe
from adaponder.training.build import config_of

_LONGEST_NAME = 120


class Axis(NamedTuple):
    """One field of a recipe and the values it is to take."""

    field: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class PlannedRun:
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
) -> list[PlannedRun]:
    """Every run of the sweep, seed by seed, so that the first seed alone already gives a whole picture.

    ``grids`` are the axes as text (see :func:`parse_axis`), and the runs are the product of the axes. With
    ``one_at_a_time`` they are the recipe as it is, once, and then every other value of each axis with all else as in
    the recipe.
    """
    base, axes = load_recipe(name, overrides), [parse_axis(text) for text in grids]
    _check_arguments(axes, seeds, {override.partition("=")[0] for override in overrides}, one_at_a_time=one_at_a_time)
    own = {axis.field: value_of(base, axis.field) for axis in axes}
    runs = []
    for seed, point in itertools.product(seeds or (base.train.seed,), _points(axes, one_at_a_time=one_at_a_time)):
        changed = tuple(f"{field}={_as_override(value)}" for field, value in point)
        if seed != base.train.seed:
            changed += (f"train.seed={seed}",)
        try:
            recipe = load_recipe(name, [*overrides, *changed])
            config_of(recipe)  # raises where no model can be built
            fields = {axis.field: value_of(recipe, axis.field) for axis in axes}
        except ConfigError as error:
            raise ConfigError(f"--grid {' '.join(changed)}: {str(error).removeprefix('--set ')}") from None
        if one_at_a_time and point and fields == own:
            continue  # the recipe's own value: that is the base run
        runs.append(PlannedRun(_name_of(recipe, fields, point, base), recipe, fields, (*overrides, *changed)))
    _refuse_twins(runs)
    return runs


def _points(axes: Sequence[Axis], *, one_at_a_time: bool) -> list[tuple[tuple[str, Any], ...]]:
    """What each run sets: ``(field, value)`` of every axis, or of one axis at a time and first of none."""
    if one_at_a_time:
        return [(), *(((axis.field, value),) for axis in axes for value in axis.values)]
    return list(itertools.product(*([(axis.field, value) for value in axis.values] for axis in axes)))


def _check_arguments(axes: Sequence[Axis], seeds: Sequence[int], fixed: set[str], *, one_at_a_time: bool) -> None:
    """Raises where axes, seeds and the fields that are ``fixed`` by --set contradict each other."""
    if not axes and not seeds:
        raise InputError("--grid is missing: name at least one axis, e.g. --grid train.k_max=0.1,0.15,0.2; or --seeds")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"--seeds {','.join(map(str, seeds))}: a seed stands there twice")
    if seeds and "train.seed" in fixed:
        raise InputError("train.seed is --set and --seeds is given: drop one")
    for index, axis in enumerate(axes):
        if axis.field in {before.field for before in axes[:index]}:
            raise InputError(f"--grid {axis.field} stands there twice: give all its values in one")
        if axis.field in fixed and not one_at_a_time:
            raise InputError(f"{axis.field} is both --set and --grid: drop one, or say --one-at-a-time")


def _refuse_twins(runs: Sequence[PlannedRun]) -> None:
    """Raises where two runs would train the same."""
    first: dict[str, PlannedRun] = {}
    for run in runs:
        twin = first.setdefault(run.recipe.fingerprint, run)
        if twin is run:
            continue
        if same := [field for field in run.fields if run.fields[field] != twin.fields[field]]:
            raise InputError(f"--grid {same[0]}: this field does not change what is trained, so there is no axis")
        raise InputError(f"--grid: {run.name} stands there twice; list each value once")


def value_of(recipe: Recipe, field: str) -> Any:
    """The field's value; where the recipe leaves a model's field open, what it resolves to."""
    value: Any = recipe.as_dict()
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    section, _, key = field.partition(".")
    left_open = value is None or field == "model.embedding_scale"
    if left_open and section == "model" and (config := config_of(recipe)) is not None:
        value = getattr(config, key, None)
    return list(value) if isinstance(value, tuple) else value


def _name_of(recipe: Recipe, fields: Mapping[str, Any], point: Sequence[tuple[str, Any]], base: Recipe) -> str:
    """``k_max=0.1__ponder_weight=0.2__seed=1``: what the run sets, in characters that every shell takes."""
    lasts = [field.rpartition(".")[2] for field in fields]
    parts = []
    for field, _ in point:
        last = field.rpartition(".")[2]
        parts.append(f"{last if lasts.count(last) == 1 else field}={_typed(fields[field]).strip('[]')}")
    if recipe.train.seed != base.train.seed:
        parts.append(f"seed={recipe.train.seed}")
    full_name = "__".join(parts) or "base"
    safe = re.sub(r"[^A-Za-z0-9._=+-]+", "-", full_name)[:_LONGEST_NAME]
    # Two names may become equal by this: the hash tells them apart.
    return safe if safe == full_name else f"{safe}__{recipe.fingerprint}"


def _typed(value: Any) -> str:
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
