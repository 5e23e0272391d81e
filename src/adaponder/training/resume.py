"""Finds the checkpoint from which a run continues; refuses one that was trained with other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from adaponder.data import Sampler
from adaponder.errors import CheckpointError, InputError, TrainingError
from adaponder.recipes import FREE_TRAIN, Recipe
from adaponder.registry import scale_of
from adaponder.terminal import console, line
from adaponder.training.build import config_of
from adaponder.training.checkpoint import OPTIMIZER, newest_complete, verify_checkpoint
from adaponder.training.distributed import World


class Start(NamedTuple):
    """The start of a run: step, states to restore, and the checkpoint that they come from."""

    folder: Path | None  # None: the run starts from its recipe
    step: int
    controller_state: dict[str, Any] | None = None
    random_state: dict[str, str] | None = None  # by kind of device; restored last, since building a model draws


def check_resume(resume: str | None, *, weights_only: bool, allow_changes: bool) -> None:
    """Raises if options contradict each other, before anything is read or written."""
    for flag, is_set in (("--weights-only", weights_only), ("--allow-changes", allow_changes)):
        if is_set and resume is None:
            raise InputError(f"{flag} needs a checkpoint: name one with --resume, or drop it")
    if resume in (None, "auto"):
        return
    if not Path(resume).is_dir():
        raise CheckpointError(f"--resume {resume}: no such folder; auto uses the newest checkpoint in --out")
    if (Path(resume) / "checkpoints").is_dir():
        raise CheckpointError(
            f"--resume {resume} is a run folder: name one of the checkpoints in {Path(resume) / 'checkpoints'}, "
            "or use auto for the newest in --out"
        )


def find_start(
    recipe: Recipe,
    out: Path,
    resume: str | None,
    sampler: Sampler,
    world: World,
    *,
    weights_only: bool,
    allow_changes: bool,
) -> Start:
    """Returns the start of a run; raises if the settings differ from those with which the checkpoint was trained."""
    folder = None if resume is None else Path(resume)
    if resume == "auto":
        folder, skipped = newest_complete(out)
        for reason in skipped if world.leads else []:
            _warn("skipped:", reason)
    if folder is None:
        return Start(None, 0)
    state = verify_checkpoint(folder, weights_only=weights_only)
    if weights_only:
        return Start(folder, 0)
    if not (folder / OPTIMIZER).is_file() or not isinstance(state.get("rng"), list):
        raise CheckpointError(f"{folder} has no optimizer or RNG state: exact resume is impossible; use --weights-only")
    if state["tokenizer"] != sampler.shards.tokenizer_hash:
        raise CheckpointError(f"{folder} was trained with another tokenizer: prepare the data with that one")
    changes = differences(state, recipe, sampler, world)
    if changes and not allow_changes:
        raise TrainingError(
            "the run differs from its checkpoint in " + "; ".join(changes) + "; undo that, or add --allow-changes"
        )
    if shapes := [change for change in changes if change.startswith("model.")]:
        raise TrainingError(
            f"a resumed run keeps the checkpoint's model, but the recipe differs in {'; '.join(shapes)}; "
            "start a new run, with model.backbone set to that checkpoint"
        )
    saved = state["rng"]
    start = Start(folder, int(state["step"]), state.get("controller"), saved[world.rank % len(saved)])
    if world.leads:
        _print_start(start, changes, states=len(saved), world=world)
    return start


def _warn(label: str, text: str) -> None:
    console.print(line((label, "yellow"), f" {text}"), soft_wrap=True)


def _print_start(start: Start, changes: list[str], *, states: int, world: World) -> None:
    """Prints the step at which the run continues, and how it may differ from the earlier run.

    ``states`` is the number of processes whose random states the checkpoint holds.
    """
    console.print(f"resuming at step {start.step} from {start.folder}", soft_wrap=True)
    if changes:
        _warn("it was trained with", f"other settings: {'; '.join(changes)}")
    kinds = start.random_state or {}
    if world.device.type not in kinds or states < world.size:
        held = f"random states of {states} of {world.size} processes, for {', '.join(kinds)}"
        console.print(f"the checkpoint holds {held}; dropout, if any, may draw other numbers", soft_wrap=True)


def is_finished(recipe: Recipe, out: Path, world: World, *, weights_only: bool, allow_changes: bool) -> bool:
    """Returns whether ``out`` holds the complete final model of ``recipe``, so that nothing is left to train.

    Returns false if there is no final model, or if it is damaged. If there is one, ``weights_only`` raises, because
    the run would overwrite it. A different recipe (more steps, say) raises and lists the differences; with
    ``allow_changes`` it returns false, so that the run continues from its newest checkpoint, or raises without one.
    """
    final = out / "final"
    if not final.is_dir():
        return False
    try:
        state = verify_checkpoint(final)
    except CheckpointError as error:
        if world.leads:
            _warn("skipped:", str(error))
        return False
    if weights_only:
        raise InputError(
            f"--out {out} holds a finished run, which would be lost: to train from its weights name a new folder, "
            f"with --resume {final} --weights-only"
        )
    changes = recipe_changes(state["recipe"], recipe)
    if changes and not allow_changes:
        raise TrainingError(
            f"--out {out} holds a finished run, which differs in {'; '.join(changes)}; name another folder, or add "
            "--allow-changes to continue from its newest checkpoint and replace its final model"
        )
    if changes and newest_complete(out)[0] is None:
        raise CheckpointError(
            f"--out {out} holds a finished run and no checkpoint to continue from: to train from its weights name a "
            f"new folder, with --resume {final} --weights-only"
        )
    return not changes


def recipe_changes(saved: dict[str, Any], recipe: Recipe) -> list[str]:
    """Returns ``field: old → new`` for each field that affects the result and differs from the ``saved`` recipe."""
    current = json.loads(json.dumps(recipe.as_dict()))
    config, changes = config_of(recipe), []
    for section in ("model", "data", "train"):
        for name in sorted(set(saved[section]) | set(current[section])):
            before, after = saved[section].get(name), current[section].get(name)
            if before == after or (section == "train" and name in FREE_TRAIN):
                continue
            if name == "embedding_scale" and config is not None:
                values = {scale_of(v, config.hidden_size) if isinstance(v, str) else v for v in (before, after)}
                if len(values) == 1:  # sqrt(d) and its value are the same
                    continue
            changes.append(f"{section}.{name}: {before} → {after}")
    return changes


def differences(state: dict[str, Any], recipe: Recipe, sampler: Sampler, world: World) -> list[str]:
    """Returns a text such as ``field: old → new`` for each difference between a resumed run and its checkpoint."""
    changes = recipe_changes(state["recipe"], recipe)
    if state["world"] != world.size:
        changes.append(f"processes: {state['world']} → {world.size}")
    if state["data"] != sampler.shards.content_hash():
        changes.append("the data itself")
    return changes
