"""The record of one run: hardware, versions, commit, data, resolved recipe and what came of it."""

from __future__ import annotations

import datetime
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adaponder.bench.record import versions
from adaponder.devices import hardware_name
from adaponder.errors import InputError, TrainingError
from adaponder.files import read_json, write_whole
from adaponder.reproduction.queue import Experiment, identity
from adaponder.training.loop import Trainer
from adaponder.training.run import train

# Enough of a run's log for its curves.
_LINES = 60


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every record of one run of a queue in ``folder``, with its ``identity``; other kinds of record are left out.

    So are records from before there was a queue, which name neither their embedding scale nor their data's hash.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        record = read_json(path, InputError)
        if {"recipe", "validation", "data", "embedding_scale", "shared_device_with"} <= record.keys():
            records.append(record | {"identity": identity(record["recipe"]), "file": path.name})
    return records


def record_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], data: str) -> Mapping[str, Any] | None:
    """The record of this run on the data of that hash, if there is one."""
    wanted = identity(experiment.resolved().as_dict())
    return next((each for each in records if each["identity"] == wanted and each["data"] == data), None)


def result(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last validation: ``validation_loss``, ``validation_depth``, ``validation_halted``."""
    return record["validation"][-1]


def carry_out(
    experiment: Experiment, *, data: Path, runs: Path, records: Path, device: str, commit: str, beside: int
) -> Path:
    """Trains one run from its first step to its last and writes its record; a folder left by an earlier try is removed.

    ``beside`` is how many other runs share the device; tokens per second are those of this run alone.
    """
    recipe = experiment.resolved(data)
    out = runs / experiment.label
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    outcome = train(recipe, out=out, device=device)
    if outcome.final is None:
        raise TrainingError(
            f"{experiment.label} was stopped at step {outcome.step}: no record; the next try repeats it"
        )
    assert outcome.trainer is not None  # the folder was empty, so this run has trained
    record = _record(experiment, outcome.trainer, out, device=device, commit=commit, beside=beside)
    path = records / f"{experiment.label}-{identity(record['recipe'])[:8]}.json"
    records.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())
    return path


def _record(
    experiment: Experiment, trainer: Trainer, out: Path, *, device: str, commit: str, beside: int
) -> dict[str, Any]:
    recipe = trainer.recipe
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    on_gpu = torch.device(device).type == "cuda"
    return {
        "experiment": experiment.label,
        "claim": experiment.claim,
        "command": f"adaponder reproduce --run {experiment.label}",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "hardware": hardware_name(device),
        "versions": versions(),
        "recipe": recipe.as_dict(),
        "recipe_hash": recipe.fingerprint,
        "seed": recipe.train.seed,
        "data": trainer.sampler.shards.content_hash(),
        "embedding_scale": trainer.model.config.table_scale,
        "parameters": trainer.model.num_parameters(),
        "parameters_added": sum(parameter.numel() for parameter in trainer.model.method.parameters()),
        "shared_device_with": beside,
        "seconds": lines[-1]["time"] - lines[0]["time"],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steps),
        "peak_memory_gib": torch.cuda.max_memory_allocated(torch.device(device)) / 2**30 if on_gpu else None,
        "validation": [line for line in lines if "validation_loss" in line],
        "along_the_way": steps[:: max(1, len(steps) // _LINES)],
    }
