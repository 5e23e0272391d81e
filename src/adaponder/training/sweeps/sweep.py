"""Trains the runs of a sweep one after another; each resumes where it stopped, and none is trained twice."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adaponder.data import Shards
from adaponder.devices import as_device
from adaponder.errors import AdaPonderError, InputError
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.training.build import config_of
from adaponder.training.checkpoint import STATE, newest_complete, verify_checkpoint
from adaponder.training.data import sampler_of, shards_folder
from adaponder.training.distributed import World
from adaponder.training.loop import Trainer
from adaponder.training.resume import differences
from adaponder.training.run import train
from adaponder.training.sweeps.plan import PlannedRun
from adaponder.training.sweeps.summary import FAILED, PENDING, STOPPED, RunSummary, pending, result_of


def examine(
    runs: Sequence[PlannedRun], *, out: Path, data: Path = Path("data"), device: str = "cpu"
) -> list[RunSummary]:
    """The summary of every run as it stands; raises where one cannot be trained. Prepares the data, trains nothing.

    A folder that holds another run than the one that belongs there is an error that names what differs.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError(
            "a sweep runs in one process: put torchrun before the single runs (--dry-run prints their commands); "
            "the sweep then finds them finished"
        )
    as_device(device)
    folders: dict[tuple[str, str, float], Path] = {}
    summaries = []
    for run in runs:
        source = run.recipe.data
        key = (source.source, source.tokenizer, source.validation)
        if key not in folders:
            folders[key] = shards_folder(run.recipe, data, World())
        summaries.append(_examine(run, out / run.name, folders[key]))
    return summaries


def _examine(run: PlannedRun, folder: Path, prepared: Path) -> RunSummary:
    """The summary of one run; ``prepared`` is the folder of its data."""
    recipe = run.recipe
    # Each run verifies the data's checksums when it starts; here that would be once more per run.
    shards, validation = (Shards.open(prepared, split, verify=False) for split in ("train", "validation"))
    sampler = sampler_of(recipe, shards)
    if validation.tokens <= recipe.data.sequence:
        raise InputError(
            f"{prepared}: {validation.tokens} validation tokens, one window takes more than "
            f"data.sequence={recipe.data.sequence}: a sweep compares validation losses; raise data.validation"
        )
    config = config_of(recipe, shards.vocab_size)
    if config is not None:
        meta = torch.device("meta")
        with meta:
            model = AdaPonderForCausalLM(config)
        # Made for its checks alone: tensors on the meta device take no memory.
        Trainer(recipe, folder, World(device=meta), model, sampler, validation, telemetry=None)
    summary = pending(run, config)
    newest = folder / "final" if (folder / "final").is_dir() else newest_complete(folder)[0]
    if newest is None:
        return summary
    finished = newest.name == "final"
    state = verify_checkpoint(newest) if finished else json.loads((newest / STATE).read_text())
    # By how many processes a finished run was trained does not matter any more; a run is resumed by as many as before.
    changes = differences(state, recipe, sampler, World(size=state["world"] if finished else 1))
    if finished and (was := state["recipe"]["train"]["eval_tokens"]) != recipe.train.eval_tokens:
        changes.append(f"train.eval_tokens: {was} → {recipe.train.eval_tokens}")
    if changes:
        raise InputError(
            f"{folder} holds another run, which differs in {'; '.join(changes)}: undo that, name another --out, "
            "or delete that folder"
        )
    return result_of(run, folder) if finished else replace(summary, step=int(state["step"]))


def rows_left(run: PlannedRun, summary: RunSummary) -> float:
    """Rows (tokens times K) that a run has still to compute; its time is about proportional to them."""
    per_step = run.recipe.train.global_batch * run.recipe.data.sequence * (summary.iterations or 1)
    return float((summary.steps - summary.step) * per_step)


@dataclass
class Pace:
    """Rows computed so far and the seconds they took."""

    rows: float = 0.0
    seconds: float = 0.0

    def add(self, rows: float, seconds: float) -> None:
        self.rows, self.seconds = self.rows + rows, self.seconds + seconds

    def seconds_for(self, rows: float) -> float | None:
        return self.seconds / self.rows * rows if self.rows else None


def carry_out(
    runs: Sequence[PlannedRun],
    summaries: Sequence[RunSummary],
    *,
    out: Path,
    data: Path = Path("data"),
    device: str = "cpu",
    quiet: bool = False,
    starting: Callable[[int, RunSummary, float | None], None] = lambda index, summary, seconds: None,
) -> Iterator[tuple[int, RunSummary]]:
    """Trains or resumes every run that is not finished and yields ``(index, summary)`` as each ends.

    A run that fails is a summary that says so, and the next begins. A run that is stopped is the last: its summary says
    ``stopped``, or ``finished`` if it was at its end anyway. ``starting(index, summary, seconds left)`` is called
    before each.
    """
    pace = Pace()
    waiting = [index for index, summary in enumerate(summaries) if summary.status == PENDING]
    for done, index in enumerate(waiting):
        run, summary = runs[index], summaries[index]
        starting(index, summary, pace.seconds_for(sum(rows_left(runs[i], summaries[i]) for i in waiting[done:])))
        began = time.perf_counter()
        ended, stop_requested = _carry_out(run, summary, out / run.name, data=data, device=device, quiet=quiet)
        if ended.status != FAILED:
            pace.add(rows_left(run, summary) - rows_left(run, ended), time.perf_counter() - began)
        _free_memory()
        yield index, ended
        if stop_requested:
            return


def _carry_out(
    run: PlannedRun, summary: RunSummary, folder: Path, *, data: Path, device: str, quiet: bool
) -> tuple[RunSummary, bool]:
    """(the summary of the run as it ended, whether the sweep was asked to stop)."""
    try:
        outcome = train(run.recipe, out=folder, resume="auto", device=device, data=data, quiet=quiet)
        if outcome.final is None:
            return replace(summary, status=STOPPED, step=outcome.step), True
        # A signal during the last step finds the run finished; it was meant for the sweep all the same.
        return result_of(run, folder), outcome.trainer is not None and outcome.trainer.stop_requested()
    except (AdaPonderError, torch.OutOfMemoryError) as error:
        return replace(summary, status=FAILED, error=str(error)), False


def _free_memory() -> None:
    """Frees what a run has left in memory, so that the next has as much as the first."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
