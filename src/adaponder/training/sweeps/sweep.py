"""A sweep is a list of runs: each has its own folder, resumes where it stopped, and is never run twice."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adaponder.config import AdaPonderConfig
from adaponder.data import Sampler, Shards
from adaponder.devices import as_device
from adaponder.errors import AdaPonderError, InputError, TrainingError
from adaponder.methods import method_class
from adaponder.modeling.model import AdaPonderForCausalLM
from adaponder.recipes import Recipe
from adaponder.training.checkpoint import STATE, newest_complete, verify_checkpoint
from adaponder.training.distributed import World
from adaponder.training.loop import Trainer
from adaponder.training.run import differences, shards_folder, train
from adaponder.training.schedule import objective_at
from adaponder.training.sweeps.grid import Run, config_of

FINISHED, FAILED, STOPPED, PENDING = "finished", "failed", "stopped", "pending"


@dataclass(frozen=True)
class Record:
    """One run as a line of the sweep's table; what is not known (yet) is ``None``.

    ``embedding_scale`` is the model's, a number. ``requested_depth``: see :func:`requested_depth`. ``validation_*``:
    loss, mean depth and the share of tokens halted after iterations 1 … K-1, at the end of the run.
    ``tokens_per_second``: the median of what training logged.
    """

    name: str
    fields: Mapping[str, Any]
    seed: int
    fingerprint: str
    status: str
    step: int
    steps: int
    method: str
    iterations: int | None
    embedding_scale: float | None
    requested_depth: float | None
    validation_loss: float | None = None
    validation_depth: float | None = None
    validation_halted: list[float] | None = None
    tokens_per_second: float | None = None
    error: str | None = None


def requested_depth(recipe: Recipe, config: AdaPonderConfig | None) -> float | None:
    """Mean iterations per token that the objective of the recipe's last step asks for.

    The ponder loss ranks all (token, gate) pairs, K - 1 of them a token, and pushes the lowest share k towards closed.
    A closed gate is one iteration less, so what is asked for is ``K - k (K - 1)``; where lambda is 0, K.
    Lambda says how hard it is asked, not how much. What comes of it, ``validation_depth``, may lie on either side:
    pairs are pushed and need not arrive, and a token that halts early skips gates that were never pushed.
    ``train.target_depth`` is asked for as it stands, mor asks for the sum of its capacities, methods that never halt
    for K; ouro names no depth: ``None``.
    """
    if config is None:
        return None
    method = method_class(config.method)
    if method.has_ponder_term and recipe.train.target_depth is not None:
        return recipe.train.target_depth
    objective = objective_at(recipe.train, recipe.train.steps - 1)
    return method.requested_depth(config, objective.ponder_fraction if objective.ponder_weight > 0 else 0.0)


def examine(runs: Sequence[Run], *, out: Path, data: Path = Path("data"), device: str = "cpu") -> list[Record]:
    """Makes sure that every run can be run, and says how far each is. Prepares the data, once for all; trains nothing.

    A folder that holds another run than the one that belongs there is an error that names what differs.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError(
            "a sweep runs in one process: put torchrun before the single runs (--dry-run prints their commands); "
            "the sweep then finds them finished"
        )
    as_device(device)
    folders: dict[tuple[str, str, float], Path] = {}
    records = []
    for run in runs:
        source = run.recipe.data
        key = (source.source, source.tokenizer, source.validation)
        if key not in folders:
            folders[key] = shards_folder(run.recipe, data, World())
        records.append(_examine(run, out / run.name, folders[key]))
    return records


def _examine(run: Run, folder: Path, prepared: Path) -> Record:
    recipe = run.recipe
    # Each run verifies the data's checksums when it starts; here that would be once more per run.
    shards, validation = (Shards.open(prepared, split, verify=False) for split in ("train", "validation"))
    plan = recipe.train
    sampler = Sampler(shards, sequence=recipe.data.sequence, global_batch=plan.global_batch, seed=plan.seed)
    if validation.tokens <= recipe.data.sequence:
        raise InputError(
            f"{prepared}: {validation.tokens} validation tokens, one window takes more than "
            f"data.sequence={recipe.data.sequence}: a sweep compares validation losses; raise data.validation"
        )
    config = config_of(recipe, shards.vocab_size)
    if config is not None:
        nowhere = torch.device("meta")
        with nowhere:
            model = AdaPonderForCausalLM(config)
        # Making the trainer checks all that it checks, and on this device costs nothing.
        Trainer(recipe, folder, World(device=nowhere), model, sampler, validation, telemetry=None)
    record = pending(run, config)
    newest = folder / "final" if (folder / "final").is_dir() else newest_complete(folder)[0]
    if newest is None:
        return record
    finished = newest.name == "final"
    state = verify_checkpoint(newest) if finished else json.loads((newest / STATE).read_text())
    # A finished run is what it is, whoever trained it; one to be resumed must be resumed by as many processes.
    changes = differences(state, recipe, sampler, World(size=state["world"] if finished else 1))
    if finished and (was := state["recipe"]["train"]["eval_tokens"]) != plan.eval_tokens:
        changes.append(f"train.eval_tokens: {was} → {plan.eval_tokens}")
    if changes:
        raise InputError(
            f"{folder} holds another run, which differs in {'; '.join(changes)}: undo that, name another --out, "
            "or delete that folder"
        )
    return result_of(run, folder) if finished else replace(record, step=int(state["step"]))


def pending(run: Run, config: AdaPonderConfig | None) -> Record:
    """The line of a run of which nothing is known yet but its recipe."""
    recipe = run.recipe
    return Record(
        name=run.name,
        fields=dict(run.fields),
        seed=recipe.train.seed,
        fingerprint=recipe.fingerprint,
        status=PENDING,
        step=0,
        steps=recipe.train.steps,
        method=recipe.model.method,
        iterations=None if config is None else config.iterations,
        embedding_scale=None if config is None else config.table_scale,
        requested_depth=requested_depth(recipe, config),
    )


def result_of(run: Run, folder: Path) -> Record:
    """What a finished run's folder says."""
    record = pending(run, AdaPonderConfig.from_pretrained(folder / "final"))
    path, last = folder / "metrics.jsonl", record.steps - 1
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found = next((line for line in reversed(lines) if "validation_loss" in line and line["step"] == last), None)
    if found is None:
        raise TrainingError(f"{path} has no validation at step {last}: delete {folder} to run it again")
    if not math.isfinite(found["validation_loss"]):
        return replace(record, status=FAILED, step=last + 1, error=f"validation loss is {found['validation_loss']}")
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return replace(
        record,
        status=FINISHED,
        step=last + 1,
        validation_loss=found["validation_loss"],
        validation_depth=found["validation_depth"],
        validation_halted=found["validation_halted"],
        tokens_per_second=statistics.median(speeds) if speeds else None,
    )


# --- running -------------------------------------------------------------------------------------------------------


def rows_left(run: Run, record: Record) -> float:
    """Tokens times K that a run has still to read: what its time goes by."""
    per_step = run.recipe.train.global_batch * run.recipe.data.sequence * (record.iterations or 1)
    return float((record.steps - record.step) * per_step)


@dataclass
class Pace:
    """How long what is left will take, going by what was done."""

    rows: float = 0.0
    seconds: float = 0.0

    def add(self, rows: float, seconds: float) -> None:
        self.rows, self.seconds = self.rows + rows, self.seconds + seconds

    def seconds_for(self, rows: float) -> float | None:
        return self.seconds / self.rows * rows if self.rows else None


def carry_out(
    runs: Sequence[Run],
    records: Sequence[Record],
    *,
    out: Path,
    data: Path = Path("data"),
    device: str = "cpu",
    quiet: bool = False,
    starting: Callable[[int, Record, float | None], None] = lambda index, record, seconds: None,
) -> Iterator[tuple[int, Record]]:
    """Trains or resumes every run that is not finished and yields ``(index, record)`` as each ends.

    A run that fails is a record that says so, and the next begins. One that was asked to stop is the last: its record
    says ``stopped``, or ``finished`` if it was at its end anyway. ``starting(index, record, seconds left)`` comes
    before each.
    """
    pace = Pace()
    waiting = [index for index, record in enumerate(records) if record.status == PENDING]
    for place, index in enumerate(waiting):
        run, record = runs[index], records[index]
        starting(index, record, pace.seconds_for(sum(rows_left(runs[i], records[i]) for i in waiting[place:])))
        began = time.perf_counter()
        ended, asked_to_stop = _carry_out(run, record, out / run.name, data=data, device=device, quiet=quiet)
        if ended.status != FAILED:
            pace.add(rows_left(run, record) - rows_left(run, ended), time.perf_counter() - began)
        _forget()
        yield index, ended
        if asked_to_stop:
            return


def _carry_out(run: Run, record: Record, folder: Path, *, data: Path, device: str, quiet: bool) -> tuple[Record, bool]:
    """(how the run ended, whether the sweep was asked to stop)."""
    try:
        done = train(run.recipe, out=folder, resume="auto", device=device, data=data, quiet=quiet)
        if done.final is None:
            return replace(record, status=STOPPED, step=done.step), True
        # A signal during the last step finds the run finished; it was meant for the sweep all the same.
        return result_of(run, folder), done.trainer is not None and done.trainer.stop_asked()
    except (AdaPonderError, torch.OutOfMemoryError) as error:
        return replace(record, status=FAILED, error=str(error)), False


def _forget() -> None:
    """The next run finds the memory as the first one did."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
