"""adaponder train: trains a recipe in a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaponder.commands.options import TrainOptions
from adaponder.commands.recipes import show_recipe
from adaponder.recipes import load_recipe
from adaponder.terminal import console, line, table, write_json
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
        result = {"recipe": recipe.as_dict(), "step": done.step, "final": str(done.final or "")}
        write_json(options.json, result | _compared(done))
    return done


def _compared(done: Outcome) -> dict[str, Any]:
    """Prints loss and depth before and after training on from a checkpoint; returns what ``--json`` writes of it."""
    trainer = done.trainer
    if trainer is None or done.final is None or trainer.before is None or trainer.after is None:
        return {}
    before, after = trainer.before, trainer.after
    rows = [
        ("validation loss", f"{before['validation_loss']:.4f}", f"{after['validation_loss']:.4f}"),
        ("mean depth", f"{before['validation_depth']:.3f}", f"{after['validation_depth']:.3f}"),
    ]
    shares = zip(before["validation_halted"], after["validation_halted"], strict=True)
    rows += [(f"halted after {depth}", f"{one:.1%}", f"{other:.1%}") for depth, (one, other) in enumerate(shares, 1)]
    console.print(table("held-out text", ("", "before", "after"), rows))
    return {"before": before, "after": after}
