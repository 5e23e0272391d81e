"""adaponder train: trains a recipe, or resumes it, in a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaponder.commands.recipes import show_recipe
from adaponder.commands.shared import Device, Json, Overrides, RecipeName, folder, opt
from adaponder.terminal import console, line, table, write_json

if TYPE_CHECKING:
    from adaponder.training.run import Outcome


def train(
    recipe: RecipeName,
    *,
    overrides: Overrides = None,
    seed: Annotated[int | None, opt("Short for --set train.seed=N.", "N", min=0)] = None,
    out: Annotated[Path | None, folder("The run folder; default runs/NAME.")] = None,
    resume: Annotated[
        str | None, opt("A checkpoint; auto: the run's newest intact one, else start. Finished runs stay.", "DIR")
    ] = None,
    weights_only: Annotated[bool, opt("Load only the weights from --resume.", flag="--weights-only")] = False,
    allow_changes: Annotated[
        bool, opt("Resume even if the recipe or the number of processes differs.", flag="--allow-changes")
    ] = False,
    wandb: Annotated[str | None, opt("Also log to this Weights & Biases project.", "PROJECT")] = None,
    verbose: Annotated[bool, opt("Show every field of the recipe.", flag="--verbose")] = False,
    device: Device = "cpu",
    json: Json = None,
) -> Any:
    """Train a recipe on this machine, or on several with torchrun.

    [dim]adaponder train cpu/demo --set train.steps=100[/]
    [dim]torchrun --nproc-per-node 8 -m adaponder train paper/adaponder-70m --device cuda --resume auto[/]
    """
    from adaponder.recipes import load_recipe
    from adaponder.training.build import with_method
    from adaponder.training.resume import check_resume
    from adaponder.training.run import train as train_recipe

    overrides = [*(overrides or ()), *([] if seed is None else [f"train.seed={seed}"])]
    loaded = load_recipe(recipe, overrides)
    out = out or Path("runs") / loaded.name.replace("/", "-")
    resuming: dict[str, Any] = {"weights_only": weights_only, "allow_changes": allow_changes}
    check_resume(resume, **resuming)
    loaded = with_method(loaded, out, resume)
    if out.parent == Path("runs"):
        out.parent.mkdir(parents=True, exist_ok=True)
    show_recipe(recipe, loaded, overrides, verbose=verbose)
    outcome = train_recipe(loaded, out=out, resume=resume, device=device, wandb=wandb, **resuming)
    if outcome.world.leads:
        written = outcome.final or f"{out} (resume with --resume auto)"
        console.print(line(f"step {outcome.step} of {loaded.train.steps} → ", (written, "bold")))
        result = {"recipe": loaded.as_dict(), "step": outcome.step, "final": str(outcome.final or "")}
        write_json(json, result | _compared(outcome))
        if outcome.final is not None:
            console.print_next("eval", out, "--data", loaded.data.source, *_every_depth(loaded.model.iterations))
    if outcome.final is None:
        raise typer.Exit(130)  # interrupted
    return outcome


def _every_depth(iterations: int | None) -> list[str]:
    """Returns the option of ``eval`` that scores all depths; [] if K is unknown because a checkpoint is continued."""
    return ["--depths", ",".join(map(str, range(1, iterations + 1)))] if iterations else []


def _compared(outcome: Outcome) -> dict[str, Any]:
    """Prints and returns loss and depth before and after continued training of a checkpoint; {} for other training."""
    trainer = outcome.trainer
    if trainer is None or outcome.final is None or trainer.before is None or trainer.after is None:
        return {}
    before, after = trainer.before, trainer.after
    rows = [
        ("validation loss", f"{before['validation_loss']:.4f}", f"{after['validation_loss']:.4f}"),
        ("mean depth", f"{before['validation_depth']:.3f}", f"{after['validation_depth']:.3f}"),
    ]
    shares = zip(before["validation_halted"], after["validation_halted"], strict=True)
    rows += [(f"halted after {depth}", *(f"{share:.1%}" for share in pair)) for depth, pair in enumerate(shares, 1)]
    console.print(table("held-out text", ("", "before", "after"), rows))
    return {"before": before, "after": after}
