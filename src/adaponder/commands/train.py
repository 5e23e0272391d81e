"""adaponder train: trains a recipe in a run folder."""

from __future__ import annotations

from pathlib import Path

from adaponder.commands.options import TrainOptions
from adaponder.commands.recipes import show_recipe
from adaponder.recipes import load_recipe
from adaponder.terminal import console, line, write_json
from adaponder.training.run import Outcome, train


def run(options: TrainOptions) -> Outcome:
    """Prints the recipe, trains it, and prints where the final model is, or how to resume."""
    recipe = load_recipe(options.recipe, options.overrides)
    out = options.out or Path("runs") / recipe.name.replace("/", "-")
    out.parent.mkdir(parents=True, exist_ok=True) if out.parent == Path("runs") else None
    show_recipe(options.recipe, recipe, options.overrides, verbose=options.verbose)
    done = train(
        recipe,
        out=out,
        resume=options.resume,
        device=options.device,
        weights_only=options.weights_only,
        allow_changes=options.allow_changes,
        wandb=options.wandb,
    )
    if done.world.leads:
        where = done.final or f"{out} (resume with --resume auto)"
        console.print(line(f"step {done.step} of {recipe.train.steps} → ", (where, "bold")))
        write_json(options.json, {"recipe": recipe.as_dict(), "step": done.step, "final": str(done.final or "")})
    return done
