"""Where a run goes on: from which checkpoint, unless it is finished, and only if the recipe is still the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from adaponder.data import Sampler
from adaponder.errors import CheckpointError, InputError, TrainingError
from adaponder.recipes import FREE_TRAIN, Recipe
from adaponder.registry import scale_from_scratch, scale_of
from adaponder.terminal import console, line
from adaponder.training.build import config_of
from adaponder.training.checkpoint import OPTIMIZER, newest_complete, verify_checkpoint
from adaponder.training.distributed import World
from adaponder.training.randomness import parse_random_states


class Start(NamedTuple):
    """Where a run begins: a checkpoint's folder (``None``: from scratch), its step, its depth controller's state.

    ``random_state`` is that of the random generators in an exact resume, by kind of device: to be restored last, since
    making a model draws.
    """

    folder: Path | None
    step: int
    controller_state: dict[str, Any] | None = None
    random_state: dict[str, Tensor] | None = None


def check_resume(resume: str | None, *, weights_only: bool, allow_changes: bool) -> None:
    """Raises where options cannot mean what they say, before anything is read or written."""
    for flag, given in (("--weights-only", weights_only), ("--allow-changes", allow_changes)):
        if given and resume is None:
            raise InputError(f"{flag} is of a checkpoint: name one with --resume, or leave it out")
    if resume in (None, "auto"):
        return
    if not Path(resume).is_dir():
        raise CheckpointError(f"--resume {resume}: there is no such folder; auto takes the newest checkpoint in --out")
    if (Path(resume) / "checkpoints").is_dir():
        raise CheckpointError(
            f"--resume {resume} is a run folder: name one of the checkpoints in {Path(resume) / 'checkpoints'}, "
            "or auto, which takes the newest in --out"
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
    """The checkpoint to go on from; raises where the run would not be the one that the checkpoint is of."""
    folder = _newest(out, world) if resume == "auto" else None if resume is None else Path(resume)
    if folder is None:
        return Start(None, 0)
    state = verify_checkpoint(folder, weights_only=weights_only)
    if weights_only:
        return Start(folder, 0)
    if not (folder / OPTIMIZER).is_file() or "rng" not in state:
        raise CheckpointError(f"{folder} has no optimizer or RNG state: exact resume is impossible; use --weights-only")
    if state["tokenizer"] != sampler.shards.tokenizer_hash:
        raise CheckpointError(f"{folder} was trained with another tokenizer than the data's: refused")
    changes = differences(state, recipe, sampler, world)
    if changes and not allow_changes:
        raise TrainingError(
            "the run differs from its checkpoint in " + "; ".join(changes) + "; undo that, or say --allow-changes"
        )
    if shapes := [change for change in changes if change.startswith("model.")]:
        raise TrainingError(
            f"a checkpoint is resumed as the model it is, and this one differs in {'; '.join(shapes)}; "
            "start a new run, with model.backbone naming the checkpoint to start from"
        )
    random_states = parse_random_states(state["rng"])
    start = Start(folder, int(state["step"]), state.get("controller"), random_states[world.rank % len(random_states)])
    if world.leads:
        _tell(start, changes, states=len(random_states), world=world)
    return start


def _newest(out: Path, world: World) -> Path | None:
    """The newest whole checkpoint of the run folder; what is wrong with newer ones is said."""
    folder, passed_over = newest_complete(out)
    if world.leads:
        for reason in passed_over:
            console.print(line(("passed over:", "yellow"), f" {reason}"), soft_wrap=True)
    return folder


def _tell(start: Start, changes: list[str], *, states: int, world: World) -> None:
    """Says from where an exact resume goes on, and what of it may be otherwise than before."""
    kind = world.device.type
    console.print(f"resuming at step {start.step} from {start.folder}", soft_wrap=True)
    if changes:
        console.print(line(("it was trained with", "yellow"), f" other settings: {'; '.join(changes)}"), soft_wrap=True)
    if kind not in (start.random_state or {}):
        console.print(f"it holds no random state of {kind}: dropout, if there is any, draws anew", soft_wrap=True)
    if states < world.size:
        console.print(
            f"it holds random states of {states} of {world.size} processes, and the others go on "
            "from these: dropout, if there is any, may draw otherwise",
            soft_wrap=True,
        )


def is_finished(recipe: Recipe, out: Path, world: World, *, weights_only: bool, allow_changes: bool) -> bool:
    """Whether ``out`` holds the whole final model of ``recipe``, so that nothing is left to train.

    Data and processes are not compared: they decide nothing any more. A final model of another recipe (more steps,
    say) is an error that names the difference; with ``allow_changes`` the run goes on from its newest checkpoint and
    makes a new final model. A final model that is damaged does not count: the run goes on and makes it again.
    """
    final = out / "final"
    if not final.is_dir():
        return False
    try:
        state = verify_checkpoint(final)
    except CheckpointError as error:
        if world.leads:
            console.print(line(("passed over:", "yellow"), f" {error}"), soft_wrap=True)
        return False
    if weights_only:
        raise InputError(
            f"--out {out} holds a finished run, which would be lost: to train on from its weights name a new folder, "
            f"with --resume {final} --weights-only"
        )
    changes = recipe_changes(state["recipe"], recipe)
    if changes and not allow_changes:
        raise TrainingError(
            f"--out {out} holds a finished run, which differs in {'; '.join(changes)}; name another folder, "
            "or say --allow-changes: its newest checkpoint then goes on, and a new final model takes the place of this"
        )
    if changes and newest_complete(out)[0] is None:
        raise CheckpointError(
            f"--out {out} holds a finished run and no checkpoint to go on from: to train on from its weights name a "
            f"new folder, with --resume {final} --weights-only"
        )
    return not changes


def recipe_changes(was: dict[str, Any], recipe: Recipe) -> list[str]:
    """Each field that decides the result and differs from the recipe a checkpoint holds, as ``field: was → is``."""
    now = json.loads(json.dumps(recipe.as_dict()))
    was = was | {"model": was["model"] | {"embedding_scale": _recorded_scale(was["model"])}}
    config, changes = config_of(recipe), []
    for section in ("model", "data", "train"):
        for name in sorted(set(was[section]) | set(now[section])):
            free = section == "train" and name in FREE_TRAIN
            before, after = was[section].get(name), now[section].get(name)
            change = f"{section}.{name}: {before} → {after}"
            if name == "embedding_scale" and config is not None:  # sqrt(d) and the number it comes to are the same
                before, after = (
                    scale_of(scale, config.hidden_size) if isinstance(scale, str) else scale
                    for scale in (before, after)
                )
            if before != after and not free:
                changes.append(change)
    return changes


def _recorded_scale(model: dict[str, Any]) -> Any:
    """The embedding scale in a recorded recipe's ``model``; one left open is what training from scratch used then.

    Records have named it since every method begins with ``scale_from_scratch``; before, only these three did.
    """
    scale = model.get("embedding_scale")
    if scale is not None or isinstance(model["backbone"], str):
        return scale
    return scale_from_scratch(model["method"]) if model["method"] in ("adaponder", "ponder", "loop") else 1.0


def differences(state: dict[str, Any], recipe: Recipe, sampler: Sampler, world: World) -> list[str]:
    """Everything in which a resumed run would differ from its checkpoint, as ``field: was → is``."""
    changes = recipe_changes(state["recipe"], recipe)
    if state["world"] != world.size:
        changes.append(f"processes: {state['world']} → {world.size}")
    if state["data"] != sampler.shards.content_hash():
        changes.append("the data itself")
    return changes
