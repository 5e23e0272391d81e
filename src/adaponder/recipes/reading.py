"""Loads a recipe by name or path: merges its file over its bases, applies overrides and checks every field."""

from __future__ import annotations

import copy
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from adaponder.errors import ConfigError, did_you_mean, shown
from adaponder.fields import Field, check_fields, fields_of, fits, is_removed
from adaponder.files import parse_yaml, read_yaml
from adaponder.recipes.schema import DataRecipe, ModelRecipe, Origin, Recipe, TrainRecipe

_SHIPPED = Path(__file__).parent
_SECTIONS = {"model": ModelRecipe, "data": DataRecipe, "train": TrainRecipe}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Returns the recipe with this name or path, changed by ``section.field=value`` overrides; unknown fields raise.

    A recipe that names a ``base`` states only the fields that differ from it.
    """
    values = _with_bases(name)
    for override in overrides:
        _set_field(values, override)
    return _build(Recipe, values, "")


def recipe_names() -> list[str]:
    """Returns the names of the recipes in the package, as ``folder/name``."""
    return sorted(f"{file.parent.name}/{file.stem}" for file in _SHIPPED.glob("*/*.yaml"))


def stated_in(name: str) -> dict[str, str]:
    """Maps each ``section.field`` that a recipe or one of its bases sets to the name of the recipe that decides it."""
    values, _ = _read(name)
    base = values.pop("base", None)
    return ({} if base is None else stated_in(base)) | dict.fromkeys(_fields_in(values), name)


def _fields_in(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields_in(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def base_of(name: str) -> str | None:
    """Returns the name of the recipe's ``base``, or ``None``."""
    return _read(name)[0].get("base")


def _read(name: str) -> tuple[dict[str, Any], str]:
    """Returns (parsed YAML, recipe name); ``name`` is a path or a recipe in the package."""
    if os.path.isfile(name):  # false, not an error, for a name that no file can have
        values, recipe_name = read_yaml(Path(name), ConfigError), Path(name).stem
    elif name in recipe_names():
        values, recipe_name = copy.deepcopy(_shipped(name)), name
    else:
        hint = did_you_mean(name, recipe_names()) or "; see adaponder recipes"
        raise ConfigError(f"{name} is neither a shipped recipe nor a file{hint}")
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must hold a mapping")
    if not isinstance(values.get("base", ""), str):
        raise ConfigError(f"{name}: base={shown(values['base'])} must be the name of a recipe")
    return values, recipe_name


@cache
def _shipped(name: str) -> Any:
    """Returns the parsed YAML of a recipe shipped with the package, cached by name."""
    return parse_yaml((_SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), name, ConfigError)


def _with_bases(name: str, derived: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a recipe's YAML merged over its bases; raises if its bases form a cycle.

    ``derived`` are the names of the recipes that led here: each has the next as its base, and the last has ``name``.
    """
    if name in derived:
        raise ConfigError(f"{name}: its bases form a cycle, {' → '.join((*derived, name))}")
    values, recipe_name = _read(name)
    base = values.pop("base", None)
    merged = values if base is None else _merge(_with_bases(base, (*derived, name)), values)
    return merged | {"name": recipe_name}


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges ``above`` over ``below``, section by section.

    A mapping with ``model_type`` (a backbone) or ``kind`` (an origin) replaces the one in ``below`` as a whole.
    """
    merged = dict(below)
    for key, value in above.items():
        replaces = isinstance(value, dict) and ("model_type" in value or "kind" in value)
        if isinstance(value, dict) and isinstance(merged.get(key), dict) and not replaces:
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _set_field(values: dict[str, Any], override: str) -> None:
    """Writes one ``section.field=value`` of the command line into ``values``."""
    path, equals, value = override.partition("=")
    option = f"--set {override if len(override) <= 80 else override[:79] + '…'}"
    if not equals or "." not in path:
        raise ConfigError(f"{option} must be section.field=value, e.g. train.steps=100")
    *sections, field = path.split(".")
    inner = values
    for section in sections:
        inner = inner.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{option}: {section} is not a section")
    inner[field] = parse_yaml(value, option, ConfigError)


def _build(kind: Any, values: Mapping[str, Any], path: str) -> Any:
    """Builds the dataclass ``kind`` from ``values``; field names in errors begin with ``path``, e.g. ``train.``."""
    known = fields_of(kind)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if is_removed(f"{path}{key}", value):
            continue
        if key not in known:
            raise ConfigError(f"{path}{key}: no such field{_suggestion(str(key), path, known)}")
        if key in _SECTIONS and kind is Recipe:
            arguments[key] = _build(_SECTIONS[key], _mapping(value, key), f"{key}.")
        elif key == "provenance" and kind is Recipe:
            arguments[key] = {
                name: _build(Origin, _mapping(origin, f"provenance.{name}"), f"provenance.{name}.")
                for name, origin in _mapping(value, key).items()
            }
        else:
            arguments[key] = _numbers(value) if key == "backbone" else _coerced(value, known[key].type)
    for item in fields(kind):
        if item.name not in arguments and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{path}{item.name} is missing")
    built = kind(**arguments)
    check_fields(built, path)  # sections check themselves; the path of an origin is known only here
    return built


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}={shown(value)} must be a section")
    return value


def _suggestion(key: str, path: str, known: Mapping[str, Any]) -> str:
    """Returns a hint for an unknown field: the section that has it, else the closest spelling, else all fields."""
    for section, kind in _SECTIONS.items():
        if key in fields_of(kind):
            return f"; did you mean {section}.{key}?"
    all_fields = "" if path else "; a recipe has " + ", ".join(["base", *(name for name in known if name != "name")])
    return did_you_mean(key, known, path) or all_fields


def _coerced(value: Any, hint: Any) -> Any:
    """Converts a value to the type ``hint`` if nothing is lost: 3.0 to 3, a list to a tuple, text to a number."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for argument in arguments:
            if fits(coerced := _coerced(value, argument), argument, Field("", argument)):
                return coerced
    if origin is list and isinstance(value, list):
        return [_coerced(inner, arguments[0]) for inner in value]
    if origin is tuple and isinstance(value, list) and len(arguments) == len(value):
        return tuple(_coerced(inner, argument) for inner, argument in zip(value, arguments, strict=True))
    if hint in (int, float):
        number = _number(value)
        if hint is int and isinstance(number, float) and number.is_integer():
            return int(number)
        if hint is float and isinstance(number, int) and not isinstance(number, bool):
            return float(number) if abs(number) < 1e300 else number
        return number
    return value


def _number(value: Any) -> Any:
    """Converts text that spells a number to float, since YAML 1.1 reads 1e-3 as text; other values stay unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _numbers(value: Any) -> Any:
    """Converts texts that spell numbers, anywhere in a backbone's mapping: whole numbers to int, others to float."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    number = _number(value)
    return int(number) if isinstance(value, str) and isinstance(number, float) and number.is_integer() else number
