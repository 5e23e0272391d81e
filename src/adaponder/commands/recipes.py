"""adaponder recipes: lists the shipped recipes, or shows one recipe field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from rich.padding import Padding

from adaponder.commands.shared import Json, arg
from adaponder.terminal import console, line, write_json

if TYPE_CHECKING:
    from adaponder.recipes import Recipe


def recipes(
    name: Annotated[str | None, arg("The recipe to show; default: list all.", "RECIPE")] = None,
    *,
    json: Json = None,
) -> None:
    """List the shipped recipes, or show every field of one and the source of its value."""
    from adaponder.recipes import load_recipe, recipe_names

    loaded = [load_recipe(recipe) for recipe in (recipe_names() if name is None else [name])]
    if name is None:
        list_recipes(loaded)
    else:
        describe(name, loaded[0])
    write_json(json, {recipe.name: recipe.as_dict() for recipe in loaded})


def show_recipe(name: str, recipe: Recipe, overrides: Sequence[str], *, verbose: bool = False) -> None:
    """Prints the recipe's hash and the fields that are overridden or differ from its base (``verbose``: all fields)."""
    from adaponder.recipes import DataRecipe, ModelRecipe, TrainRecipe, base_of, load_recipe

    console.print(line((recipe.name, "bold"), f"  {recipe.fingerprint}  {recipe.about}"))
    values, base = flat(recipe), base_of(name)
    if base is None:
        sections = {"model": ModelRecipe, "data": DataRecipe, "train": TrainRecipe}
        defaults = {
            f"{name}.{item.name}": _shown(item.default) for name, kind in sections.items() for item in fields(kind)
        }
    else:
        defaults = flat(load_recipe(base))
    changed = {override.partition("=")[0] for override in overrides}
    differing = {key: value for key, value in values.items() if verbose or key in changed or defaults.get(key) != value}
    if base is not None and not verbose:
        console.print(f"as {base}, but" if differing else f"as {base}")
    for section in ("model", "data", "train"):
        styled = [
            (f"  {key.removeprefix(section + '.')}={value}", "bold yellow" if key in changed else "")
            for key, value in differing.items()
            if key.startswith(f"{section}.")
        ]
        if styled:
            # Lines break between fields, never within one.
            console.print(line((section, "bold"), *styled))
    if not verbose:
        console.print(line((f"every field: adaponder recipes {name}", "dim")))


def flat(recipe: Recipe) -> dict[str, Any]:
    """Returns the value of every field by ``section.field``; a backbone's fields are ``model.backbone.field``."""
    by_field: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                add(f"{key}.{name}" if key else name, inner)
        elif value is not None:
            by_field[key] = _shown(value)

    values = recipe.as_dict()
    add("", {section: values[section] for section in ("model", "data", "train")})
    return by_field


def _shown(value: Any) -> Any:
    """Returns the value; a list as text without spaces, so that a narrow terminal does not break it."""
    return str(list(value)).replace(" ", "") if isinstance(value, (tuple, list)) else value


def list_recipes(shipped: Sequence[Recipe]) -> None:
    """Prints two lines per recipe: name and size, and its description."""
    for recipe in shipped:
        iterations = f", K = {recipe.model.iterations}" if recipe.model.iterations else ""
        tokens = recipe.train.steps * recipe.train.global_batch * recipe.data.sequence
        size = f"{recipe.train.steps:,} steps, {_brief(tokens)} tokens"
        # Two lines each, because the columns of a table would be too narrow in a small window.
        method = recipe.model.method or "method of the checkpoint"
        console.print(line((recipe.name, "bold"), f"  {method}{iterations}, {size}"), soft_wrap=True)
        console.print(Padding(recipe.about, (0, 0, 0, 4)), style="dim")


def describe(name: str, recipe: Recipe) -> None:
    """Prints every field of a recipe and the source of its value: a paper, this recipe, its base or the defaults."""
    from adaponder.recipes import stated_in

    console.print(line((recipe.name, "bold"), f"  {recipe.fingerprint}  {recipe.about}"))
    values, stated = flat(recipe), stated_in(name)
    for key in [*values, *(key for key in recipe.provenance if key not in values)]:
        source = recipe.provenance.get(key)
        if source is not None:
            origin = f"{source.kind}: {source.note}" if source.note else source.kind
        elif key in stated:
            origin = "this recipe" if stated[key] == name else f"from {stated[key]}"
        else:
            origin = "default"
        value = values.get(key, source.value if source and key.startswith("code.") else None)
        field = key if value is None else f"{key}={value}"
        console.print(Padding(line(field, (f"  {origin}", "dim")), (0, 0, 0, 2)))


def _brief(count: int) -> str:
    """Returns the count with three digits and a unit, such as ``98.3M``."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
