"""One run folder from its first step to its final model: who owns it, where it resumes, when it must not."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adaponder.checkpoints.special_tokens import align
from adaponder.data import Sampler, Shards
from adaponder.data.prepare import prepare
from adaponder.errors import CheckpointError, InputError, TrainingError
from adaponder.files import lock, write_whole
from adaponder.modeling.model import AdaPonderForCausalLM
from adaponder.recipes import Recipe, TrainRecipe
from adaponder.terminal import console, line
from adaponder.training.build import build_model
from adaponder.training.checkpoint import OPTIMIZER, newest_complete, verify_checkpoint
from adaponder.training.distributed import World, join, local_share
from adaponder.training.files import room_on_disk, room_to_write
from adaponder.training.finished import is_finished, recipe_changes
from adaponder.training.loop import Trainer, data_hash
from adaponder.training.sweeps.grid import config_of
from adaponder.training.telemetry import Telemetry


class Outcome(NamedTuple):
    """How a run ended: its final model, or ``None`` where it was asked to stop first; and at which step.

    ``trainer`` is ``None`` where the run had been finished before.
    """

    final: Path | None
    step: int
    trainer: Trainer | None
    world: World


def train(
    recipe: Recipe,
    *,
    out: Path,
    resume: str | None = None,
    device: str = "cpu",
    data: Path = Path("data"),
    weights_only: bool = False,
    allow_changes: bool = False,
    wandb: str | None = None,
    quiet: bool = False,
) -> Outcome:
    """Trains ``recipe`` in folder ``out``.

    ``resume``: ``None`` starts anew and needs an empty folder; ``auto`` goes on from the newest whole checkpoint, or
    starts, and leaves a finished run as it is (see :func:`is_finished`); a path goes on from that checkpoint and no
    other. ``weights_only`` takes a checkpoint's weights and starts step 0 with them. ``allow_changes`` lets a resumed
    run differ from what its checkpoint was trained with. ``wandb`` names a Weights & Biases project to log to: nothing
    leaves the machine unasked.
    """
    config_of(recipe)  # what no model can be built from is told before any data is prepared
    if resume not in (None, "auto") and not Path(resume).is_dir():
        raise CheckpointError(f"--resume {resume}: there is no such folder; auto takes the newest checkpoint in --out")
    with join(device) as world, owned(out, world, resume):
        if resume == "auto" and is_finished(recipe, out, world, weights_only=weights_only, allow_changes=allow_changes):
            if world.leads:
                console.print(f"finished: {out / 'final'} is whole; nothing was changed", soft_wrap=True)
            return Outcome(out / "final", recipe.train.steps, None, world)
        # Until there is a step to end, an interruption ends the command at once: preparing goes on where it stopped.
        shards, validation = open_data(recipe, data, world)
        with stop_signals() as stop:
            sampler = sampler_of(recipe, shards)
            found = find_start(
                recipe, out, resume, sampler, world, weights_only=weights_only, allow_changes=allow_changes
            )
            if found.folder is None:
                model = build_model(recipe, shards.vocab_size)
            else:
                # Its checksums were compared just now, and its special tokens are set below.
                model = AdaPonderForCausalLM.from_pretrained(found.folder, dtype=_dtype(recipe), verify=False).train()
            align(model, shards.end_id, from_scratch=isinstance(recipe.model.backbone, dict))
            telemetry = None
            if world.leads:
                write_whole(out / "recipe.yaml", recipe.to_yaml().encode(), TrainingError)
                _remark(recipe.train, world)
                _remark_on_data(recipe, shards, validation)
                telemetry = Telemetry(out, steps=recipe.train.steps, start=found.step, quiet=quiet, wandb=wandb)
            try:
                trainer = Trainer(
                    recipe=recipe,
                    run=out,
                    world=world,
                    model=model,
                    sampler=sampler,
                    validation=validation if validation.tokens > recipe.data.sequence else None,
                    telemetry=telemetry,
                    step=found.step,
                    resumed_from=None if weights_only else found.folder,
                    steered=found.steered,
                    stop_asked=stop,
                )
                with room_on_disk():
                    finished = trainer.train()
                return Outcome(trainer.finish() if finished else None, trainer.step, trainer, world)
            finally:
                if telemetry is not None:
                    telemetry.close()


def open_finished(recipe: Recipe, out: Path, *, data: Path = Path("data")) -> Trainer:
    """A trainer that holds the final model of a finished run, to look at it: to evaluate, not to train or save."""
    world = World()
    shards, validation = open_data(recipe, data, world)
    return Trainer(
        recipe=recipe,
        run=out,
        world=world,
        model=AdaPonderForCausalLM.from_pretrained(out / "final", dtype=_dtype(recipe)).train(),
        sampler=sampler_of(recipe, shards),
        validation=validation if validation.tokens > recipe.data.sequence else None,
        telemetry=None,
        step=recipe.train.steps,
    )


def sampler_of(recipe: Recipe, shards: Shards) -> Sampler:
    plan = recipe.train
    return Sampler(shards, sequence=recipe.data.sequence, global_batch=plan.global_batch, seed=plan.seed)


def open_data(recipe: Recipe, data: Path, world: World) -> tuple[Shards, Shards]:
    """The recipe's training and validation tokens, prepared if need be; processes of a machine share the hashing."""
    folder = shards_folder(recipe, data, world)
    share = local_share()
    return Shards.open(folder, "train", share=share), Shards.open(folder, "validation", share=share)


def shards_folder(recipe: Recipe, data: Path, world: World) -> Path:
    """The prepared folder that the recipe names, or one prepared from what it names, once, under ``data``."""
    source = Path(recipe.data.source)
    if os.path.isfile(source / "manifest.json"):
        return source
    name = f"{source.name}-{recipe.data.tokenizer.replace(':', '-').replace('/', '-')}"
    folder = data / name
    if world.leads:
        made = prepare(
            [recipe.data.source],
            out=folder,
            tokenizer=recipe.data.tokenizer,
            validation=recipe.data.validation,
            workers=min(8, os.cpu_count() or 1),
        )
        for remark in made.remarks():
            console.print(line((f"{folder}:", "yellow"), f" {remark}"), soft_wrap=True)
    world.wait()
    return folder


class Start(NamedTuple):
    folder: Path | None
    step: int
    steered: dict[str, Any] | None = None


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
    """The checkpoint to go on from, after making sure that going on means what it says."""
    if resume is None:
        return Start(None, 0)
    if resume == "auto":
        folder, passed_over = newest_complete(out)
        if world.leads:
            for reason in passed_over:
                console.print(line(("passed over:", "yellow"), f" {reason}"), soft_wrap=True)
        if folder is None:
            return Start(None, 0)
    else:
        folder = Path(resume)
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
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["rng"]), dtype=torch.uint8))
    if world.leads:
        console.print(f"resuming at step {state['step']} from {folder}", soft_wrap=True)
    return Start(folder, int(state["step"]), state.get("controller"))


def differences(state: dict[str, Any], recipe: Recipe, sampler: Sampler, world: World) -> list[str]:
    """Each field in which a resumed run would differ, as ``field: was → is``."""
    found = recipe_changes(state["recipe"], recipe)
    if state["world"] != world.size:
        found.append(f"processes: {state['world']} → {world.size}")
    if state["data"] != data_hash(sampler.shards):
        found.append("the data itself")
    return found


@contextmanager
def owned(out: Path, world: World, resume: str | None) -> Iterator[None]:
    """Holds the run folder: it must be writable, empty unless resuming, and nobody else's."""
    if not world.leads:
        world.wait()
        yield
        return
    if not out.parent.is_dir():
        wrong = "is a file, not a folder" if out.parent.exists() else "does not exist"
        raise InputError(f"--out {out}: {out.parent} {wrong}")
    try:
        out.mkdir(exist_ok=True)
        holder = (out / ".lock").open("a+")
    except OSError as error:
        raise InputError(f"--out {out} cannot be written to: {error}") from error
    with holder:
        if not lock(holder.fileno()):
            holder.seek(0)
            raise InputError(f"--out {out} is in use by {holder.read().strip() or 'another run'}")
        if resume is None and any(path.name != ".lock" for path in out.iterdir()):
            raise InputError(f"--out {out} is not empty: name a new folder, or --resume auto to go on")
        with room_to_write(out / ".lock"):
            holder.truncate(0)
            holder.write(f"process {os.getpid()} on {socket.gethostname()}")
            holder.flush()
        world.wait()
        yield


@contextmanager
def stop_signals() -> Iterator[Any]:
    """The first SIGINT or SIGTERM asks to stop at the next step boundary; the second ends the process at once."""
    asked = []

    def handle(number: int, frame: Any) -> None:
        if asked:
            os._exit(130)
        asked.append(number)
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remark(plan: TrainRecipe, world: World) -> None:
    """Says what a user might not expect of the recipe here."""
    if plan.dtype == "bfloat16" and world.device.type == "cpu":
        console.print("train.dtype=bfloat16 is for GPUs: on this CPU the run computes in float32")
    if plan.ponder_weight and plan.gates_begin > plan.ponder_start:
        console.print(
            line(
                (f"train.gate_start={plan.gate_start} lies after ponder_start={plan.ponder_start}:", "yellow"),
                " until then the ponder loss presses on gates that do not move",
            ),
            soft_wrap=True,
        )
    elif plan.gates_begin:
        console.print(f"gates begin to learn at step {plan.gates_begin:,} (train.gate_start)")
    if plan.ponder_weight and plan.ponder_start >= plan.steps:
        console.print(
            line(
                (f"train.ponder_start={plan.ponder_start} is not before the end, train.steps={plan.steps}:", "yellow"),
                " nothing will press on the gates",
            ),
            soft_wrap=True,
        )


def _remark_on_data(recipe: Recipe, shards: Shards, validation: Shards) -> None:
    """Says what a user might not expect of the tokens."""
    if validation.tokens <= recipe.data.sequence:
        console.print(
            line(
                ("there will be no validation loss:", "yellow"),
                f" {shards.folder} has {validation.tokens:,} tokens for it, data.sequence={recipe.data.sequence} needs "
                "more; prepare more documents, or a larger share of them",
            ),
            soft_wrap=True,
        )
    made = shards.manifest.fingerprint
    stated = {"tokenizer": recipe.data.tokenizer, "validation": recipe.data.validation}
    if differing := [f"{name} {made[name]}" for name, value in stated.items() if made.get(name, value) != value]:
        said = f"{shards.folder} was prepared with {' and '.join(differing)}: that holds, not the recipe's"
        console.print(said, soft_wrap=True)


def _dtype(recipe: Recipe) -> torch.dtype:
    return torch.float64 if recipe.train.dtype == "float64" else torch.float32
