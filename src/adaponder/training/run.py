"""Trains one recipe in one run folder, from its first step, or from where it stopped, to its final model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from adaponder.checkpoints.special_tokens import align
from adaponder.data import Shards
from adaponder.errors import TrainingError
from adaponder.files import write_whole
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import Recipe
from adaponder.terminal import console
from adaponder.training.build import build_model, config_of, weights_dtype
from adaponder.training.data import open_data, require_own_tokenizer, sampler_of
from adaponder.training.distributed import World, join
from adaponder.training.files import room_on_disk
from adaponder.training.loop import Trainer
from adaponder.training.lora import attach
from adaponder.training.ownership import owned, stop_signals
from adaponder.training.randomness import restore_random_state
from adaponder.training.remarks import remark
from adaponder.training.resume import Start, check_resume, find_start, is_finished
from adaponder.training.telemetry import Telemetry


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        final: folder of the final model; ``None`` where the run was stopped before.
        step: the steps taken in all.
        trainer: ``None`` where the run had been finished before.
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
    trainer_class: type[Trainer] = Trainer,
) -> Outcome:
    """Trains ``recipe`` in folder ``out``.

    ``resume``: ``None`` starts anew and needs an empty folder; ``auto`` goes on from the newest whole checkpoint, or
    starts, and leaves a finished run as it is (see :func:`is_finished`); a path goes on from that checkpoint and no
    other. ``weights_only`` takes a checkpoint's weights and starts step 0 with them. ``allow_changes`` lets a resumed
    run differ from what its checkpoint was trained with. ``wandb`` names a Weights & Biases project to log to
    as well. ``trainer_class`` takes the steps; a subclass may do more around each of them.
    """
    config_of(recipe)  # raises where no model can be built, before any data is prepared
    check_resume(resume, weights_only=weights_only, allow_changes=allow_changes)
    with join(device) as world, owned(out, world, resume):
        if resume == "auto" and is_finished(recipe, out, world, weights_only=weights_only, allow_changes=allow_changes):
            if world.leads:
                console.print(f"finished: {out / 'final'} is whole; nothing was changed", soft_wrap=True)
            return Outcome(out / "final", recipe.train.steps, None, world)
        # Until there is a step to end, an interruption ends the command at once: preparing goes on where it stopped.
        shards, validation = open_data(recipe, data, world)
        with stop_signals() as stop_requested:
            sampler = sampler_of(recipe, shards)
            start = find_start(
                recipe, out, resume, sampler, world, weights_only=weights_only, allow_changes=allow_changes
            )
            # What it refuses leaves the folder empty, so that the same command can be put right.
            trainer = trainer_class(
                recipe=recipe,
                run=out,
                world=world,
                model=_model_at(start, recipe, shards),
                sampler=sampler,
                validation=validation if validation.tokens > recipe.data.sequence else None,
                telemetry=None,
                step=start.step,
                resumed_from=None if weights_only else start.folder,
                controller_state=start.controller_state,
                stop_requested=stop_requested,
            )
            if world.leads:
                write_whole(out / "recipe.yaml", recipe.to_yaml().encode(), TrainingError)
                remark(recipe, shards, validation, world)
                trainer.telemetry = Telemetry(out, steps=recipe.train.steps, start=start.step, quiet=quiet, wandb=wandb)
            try:
                with room_on_disk():
                    trainer.measure_before()
                    if start.random_state is not None:
                        restore_random_state(start.random_state, world.device)
                    finished = trainer.train()
                return Outcome(trainer.finish() if finished else None, trainer.step, trainer, world)
            finally:
                if trainer.telemetry is not None:
                    trainer.telemetry.close()


def _model_at(start: Start, recipe: Recipe, shards: Shards) -> AdaPonderForCausalLM:
    """The recipe's new model, or that of the checkpoint to go on from; its special tokens are the data's."""
    if start.folder is None:
        require_own_tokenizer(recipe, shards)
        model = build_model(recipe, shards.vocab_size)
    else:
        # Its checksums were compared just now, and its special tokens are set below.
        model = AdaPonderForCausalLM.from_pretrained(start.folder, dtype=weights_dtype(recipe), verify=False).train()
    align(model, shards.end_id, from_scratch=isinstance(recipe.model.backbone, dict))
    attach(model, recipe.train, start.folder if start.step else None)
    return model


def open_finished(recipe: Recipe, out: Path, *, data: Path = Path("data")) -> Trainer:
    """A trainer that holds the final model of a finished run, to evaluate it with; it must not train or save."""
    world = World()
    shards, validation = open_data(recipe, data, world)
    return Trainer(
        recipe=recipe,
        run=out,
        world=world,
        model=AdaPonderForCausalLM.from_pretrained(out / "final", dtype=weights_dtype(recipe)).train(),
        sampler=sampler_of(recipe, shards),
        validation=validation if validation.tokens > recipe.data.sequence else None,
        telemetry=None,
        step=recipe.train.steps,
    )
