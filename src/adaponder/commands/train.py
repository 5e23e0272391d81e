"""adaponder train: a recipe in, a run folder out; and adaponder recipes: what there is to choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from rich.padding import Padding

from adaponder.recipe import Recipe, load_recipe, recipe_names
from adaponder.terminal import console, line, write_json
from adaponder.training.run import Outcome, train


def run(
    name: str,
    *,
    overrides: list[str],
    out: Path | None,
    resume: str | None,
    device: str,
    weights_only: bool,
    allow_changes: bool,
    wandb: str | None = None,
    json: Path | None = None,
) -> Outcome:
    recipe = load_recipe(name, overrides)
    out = out or Path("runs") / recipe.name.replace("/", "-")
    out.parent.mkdir(parents=True, exist_ok=True) if out.parent == Path("runs") else None
    show_recipe(recipe, overrides)
    done = train(
        recipe,
        out=out,
        resume=resume,
        device=device,
        weights_only=weights_only,
        allow_changes=allow_changes,
        wandb=wandb,
    )
    if done.world.leads:
        where = done.final or f"{out} (resume with --resume auto)"
        console.print(line(f"step {done.step} of {recipe.train.steps} → ", (where, "bold")))
        write_json(json, {"recipe": recipe.as_dict(), "step": done.step, "final": str(done.final or "")})
    return done


def show_recipe(recipe: Recipe, overrides: list[str]) -> None:
    """The resolved recipe, what was overridden, and its hash: what is about to be done, before it is."""
    console.print(line((recipe.name, "bold"), f"  {recipe.fingerprint}  {recipe.about}"))
    changed = {override.partition("=")[0] for override in overrides}
    for section, values in yaml.safe_load(recipe.to_yaml()).items():
        if isinstance(values, dict) and section != "provenance":
            marked = [
                (f"  {key}={_short(value)}", "bold yellow" if f"{section}.{key}" in changed else "")
                for key, value in values.items()
                if value is not None
            ]
            console.print(line((section, "bold"), *marked), soft_wrap=True)


def _short(value: Any) -> str:
    return "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}" if isinstance(value, dict) else str(value)


def list_recipes(*, json: Path | None = None) -> None:
    recipes = [load_recipe(name) for name in recipe_names()]
    for recipe in recipes:
        readings = f", K = {recipe.model.iterations}" if recipe.model.iterations else ""
        size = f"{recipe.train.steps:,} steps, {_tokens(recipe) / 1e9:.3g}B tokens"
        # Two lines each: in a column of a narrow window, names and sentences would be cut to pieces.
        console.print(line((recipe.name, "bold"), f"  {recipe.model.method}{readings}, {size}"), soft_wrap=True)
        console.print(Padding(recipe.about, (0, 0, 0, 4)), style="dim")
    write_json(json, {recipe.name: recipe.as_dict() for recipe in recipes})


def _tokens(recipe: Recipe) -> int:
    return recipe.train.steps * recipe.train.global_batch * recipe.data.sequence
