"""adaponder train: a recipe in, a run folder out."""

from __future__ import annotations

from pathlib import Path

from adaponder.commands.recipes import show_recipe
from adaponder.recipes import load_recipe
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
    verbose: bool = False,
    json: Path | None = None,
) -> Outcome:
    recipe = load_recipe(name, overrides)
    out = out or Path("runs") / recipe.name.replace("/", "-")
    out.parent.mkdir(parents=True, exist_ok=True) if out.parent == Path("runs") else None
    show_recipe(name, recipe, overrides, verbose=verbose)
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
