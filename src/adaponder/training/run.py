"""Trains one recipe in one run folder: from the first step or a checkpoint to the final model."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from adaponder.checkpoints.special_tokens import align
from adaponder.data import Shards
from adaponder.devices import product_dtype
from adaponder.errors import InputError, TrainingError
from adaponder.files import lock, write_whole
from adaponder.methods import method_class
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import Recipe
from adaponder.terminal import console
from adaponder.training.build import build_model, config_of, weights_dtype, with_method
from adaponder.training.checkpoint import restore_random_state
from adaponder.training.data import open_data, require_own_tokenizer, sampler_of
from adaponder.training.distributed import World, join
from adaponder.training.loop import Trainer
from adaponder.training.lora import attach
from adaponder.training.resume import Start, check_resume, find_start, is_finished
from adaponder.training.telemetry import Telemetry, room_to_write


class Outcome(NamedTuple):
    """Result of :func:`train`."""

    final: Path | None  # folder of the final model; None if the run was stopped before its end
    step: int  # number of steps taken in all
    trainer: Trainer | None  # None if the run was already finished
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
    trainer_class: type[Trainer] = Trainer,
) -> Outcome:
    """Trains ``recipe`` in the run folder ``out``.

    Args:
        resume: ``None`` starts a new run in an empty folder; ``auto`` continues from the newest complete checkpoint, if
            any, and leaves a finished run unchanged (see :func:`is_finished`); a path names a checkpoint.
        data: the folder for prepared data.
        weights_only: take only the weights from the checkpoint and start at step 0.
        allow_changes: allow a resumed run to have other settings than its checkpoint.
        wandb: a Weights & Biases project to log to as well.
    """
    check_resume(resume, weights_only=weights_only, allow_changes=allow_changes)
    recipe = with_method(recipe, out, resume)
    config_of(recipe)  # raises if no model can be built, before any data is prepared
    with join(device) as world, locked_run_folder(out, world, resume):
        if resume == "auto" and is_finished(recipe, out, world, weights_only=weights_only, allow_changes=allow_changes):
            if world.leads:
                console.print(f"already finished: {out / 'final'} is complete; nothing was changed", soft_wrap=True)
            return Outcome(out / "final", recipe.train.steps, None, world)
        # During the preparation of data, Ctrl-C ends the process at once; a rerun continues the preparation.
        shards, validation = open_data(recipe, data, world)
        with stop_signals() as stop_requested:
            sampler = sampler_of(recipe, shards)
            start = find_start(
                recipe, out, resume, sampler, world, weights_only=weights_only, allow_changes=allow_changes
            )
            # If this raises, the run folder is still empty, so that the corrected command can use it.
            trainer = trainer_class(
                *(recipe, out, world, _model_at(start, recipe, shards), sampler, validation),
                step=start.step,
                resumed_from=None if weights_only else start.folder,
                controller_state=start.controller_state,
                stop_requested=stop_requested,
            )
            if world.leads:
                write_whole(out / "recipe.yaml", recipe.to_yaml().encode(), TrainingError)
                _print_remarks(recipe, shards, validation, world)
                trainer.telemetry = Telemetry(out, steps=recipe.train.steps, start=start.step, quiet=quiet, wandb=wandb)
            try:
                with room_to_write():
                    trainer.measure_before()
                    if start.random_state is not None:
                        restore_random_state(start.random_state, world.device)
                    finished = trainer.train()
                return Outcome(trainer.finish() if finished else None, trainer.step, trainer, world)
            finally:
                if trainer.telemetry is not None:
                    trainer.telemetry.close()


def _model_at(start: Start, recipe: Recipe, shards: Shards) -> AdaPonderForCausalLM:
    """Returns the checkpoint's model, or a new model if ``start`` has none, with the data's special tokens."""
    if start.folder is None:
        require_own_tokenizer(recipe, shards)
        model = build_model(recipe, shards.vocab_size)
    else:
        # Its checksums were verified just before, and its special tokens are set below.
        model = AdaPonderForCausalLM.from_pretrained(start.folder, dtype=weights_dtype(recipe), verify=False).train()
    align(model, shards.end_id, from_scratch=isinstance(recipe.model.backbone, dict))
    attach(model, recipe.train, start.folder if start.step else None)
    return model


def open_finished(recipe: Recipe, out: Path, *, data: Path = Path("data")) -> Trainer:
    """Returns a trainer with the final model of a finished run, for evaluation only."""
    world = World()
    shards, validation = open_data(recipe, data, world)
    model = AdaPonderForCausalLM.from_pretrained(out / "final", dtype=weights_dtype(recipe)).train()
    return Trainer(recipe, out, world, model, sampler_of(recipe, shards), validation, step=recipe.train.steps)


@contextmanager
def locked_run_folder(out: Path, world: World, resume: str | None) -> Iterator[None]:
    """Context manager that creates and locks the run folder; raises if it is in use or, for a new run, not empty.

    Refuses to resume from another folder's checkpoint if this folder holds checkpoints or a final model.
    """
    if not world.leads:
        world.wait()
        yield
        return
    if not out.parent.is_dir():
        wrong = "is a file, not a folder" if out.parent.exists() else "does not exist"
        raise InputError(f"--out {out}: {out.parent} {wrong}")
    new = not out.exists()
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
            raise InputError(f"--out {out} is not empty: name a new folder, or continue with --resume auto")
        if resume not in (None, "auto"):
            _require_own_checkpoint(out, Path(resume))
        with room_to_write(out / ".lock"):
            holder.truncate(0)
            holder.write(f"process {os.getpid()} on {socket.gethostname()}")
            holder.flush()
        world.wait()
        try:
            yield
        finally:
            if [path.name for path in out.iterdir()] == [".lock"]:  # failed before its first file
                (out / ".lock").unlink()
                if new:
                    out.rmdir()


def _require_own_checkpoint(out: Path, resumed: Path) -> None:
    """Raises if ``out`` holds checkpoints or a final model, and ``resumed`` is not one of these checkpoints."""
    existing = [*(out / "checkpoints").glob("step-*"), *out.glob("final")]
    if existing and resumed.resolve().parent != (out / "checkpoints").resolve():
        raise InputError(
            f"--out {out} holds {existing[0].name} of a run, which would be lost, and --resume {resumed} is not a "
            "checkpoint of that run: name a new folder, or continue that run with --resume auto"
        )


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Context manager that yields a function: whether SIGINT or SIGTERM arrived. A second signal ends the process."""
    signals: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if signals:
            os._exit(130)
        signals.append(number)
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_remarks(recipe: Recipe, shards: Shards, validation: Shards, world: World) -> None:
    """Prints what the user might not expect of this recipe on this machine and data, one sentence per line."""
    train, has_ponder_term = recipe.train, method_class(recipe.model.method).has_ponder_term
    pressed, gates_begin = has_ponder_term and bool(train.ponder_weight), train.gates_begin(pressed=has_ponder_term)
    remarks = []
    computed_in = str(product_dtype(train.dtype, world.device)).removeprefix("torch.")
    if computed_in != train.dtype:
        remarks.append(f"train.dtype={train.dtype} is for GPUs: on this CPU the run computes in {computed_in}")
    if pressed and gates_begin > train.ponder_start:
        remarks.append(
            f"train.gate_start={train.gate_start} is after ponder_start={train.ponder_start}: until then the ponder "
            "loss has no effect, because gates are not updated"
        )
    elif gates_begin >= train.steps:
        remarks.append(
            f"gates would train from step {gates_begin:,}, which is after train.steps={train.steps}: they keep their "
            "initial values (train.gate_start)"
        )
    elif gates_begin:
        remarks.append(f"gates train from step {gates_begin:,} on (train.gate_start)")
    if pressed and train.ponder_start >= train.steps:
        remarks.append(f"train.ponder_start={train.ponder_start} is not before train.steps={train.steps}: unused")
    if validation.tokens <= recipe.data.sequence:
        remarks.append(
            f"there will be no validation loss: {shards.folder} has {validation.tokens:,} validation tokens, "
            f"data.sequence={recipe.data.sequence} needs more; prepare more documents, or a larger share of them"
        )
    for name, value in {"tokenizer": recipe.data.tokenizer, "validation": recipe.data.validation}.items():
        if (prepared := shards.manifest.fingerprint.get(name, value)) != value:
            remarks.append(f"{shards.folder} was prepared with {name}={prepared}; the recipe's data.{name} is ignored")
    for remark in remarks:
        console.print(remark, soft_wrap=True)
