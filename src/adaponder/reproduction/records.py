"""The record of one run: hardware, versions, commit, data, resolved recipe and what came of it."""

from __future__ import annotations

import datetime
import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adaponder.bench.record import versions
from adaponder.devices import hardware_name
from adaponder.errors import InputError, TrainingError
from adaponder.files import read_json, write_whole
from adaponder.reproduction.queue import Corpus, Experiment, identity
from adaponder.training.loop import Trainer
from adaponder.training.run import train

# From the final model's folder and the prepared data to measurements, each with its name, as they are made.
Measure = Callable[[Path, Path], Iterator[tuple[str, dict[str, Any]]]]

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


def records_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], corpus: Corpus) -> list[Mapping[str, Any]]:
    """The records of this recipe, seed and data, the first run of them first."""
    wanted = experiment.identity
    same = [each for each in records if each["identity"] == wanted and corpus.trained(each)]
    return sorted(same, key=lambda record: record.get("again", 0))


def record_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], corpus: Corpus) -> Mapping[str, Any] | None:
    """The record of this run, if there is one: with all that the run is to measure."""
    found = records_of(experiment, records, corpus)
    measured = [each for each in found if set(experiment.measures) <= each.get("measured", {}).keys()]
    return next(iter(measured[experiment.again :]), None)


def result(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last validation: ``validation_loss``, ``validation_depth``, ``validation_halted``."""
    return record["validation"][-1]


def carry_out(
    experiment: Experiment,
    *,
    data: Path | None,
    corpus: Corpus,
    runs: Path,
    records: Path,
    device: str,
    commit: str,
    beside: int,
    measure: Measure | None = None,
) -> Path:
    """Trains one run from its first step to its last and writes its record; a folder left by an earlier try is removed.

    The run that it continues is trained first if ``runs`` does not hold its final model. ``measure`` is called with the
    final model's folder and the prepared data; the record is written before that, and again with each measurement.
    ``beside`` is how many other runs share the device; tokens per second are those of this run alone.
    """
    if experiment.source is not None and not (runs / experiment.source.label / "final").is_dir():
        _trained(experiment.source, data=data, runs=runs, device=device)
    trainer, final = _trained(experiment, data=data, runs=runs, device=device)
    record = _record(experiment, trainer, final.parent, device=device, commit=commit, beside=beside)
    record |= {"corpus": corpus.name, "measured": {}}
    name = identity(record["recipe"])[:8]
    known = read_records(records) if records.is_dir() else []
    earlier = [each["again"] for each in map(_counted, known) if each["identity"][:8] == name and corpus.trained(each)]
    record["again"] = max(earlier, default=-1) + 1
    again = f"-again-{record['again']}" if record["again"] else ""
    path = records / f"{experiment.setting}-seed-{experiment.seed}-{name}{again}.json"
    _write(path, record)
    # A run that is cut while it is measured keeps the record of its training and of what was measured before.
    for name, found in () if measure is None else measure(final, trainer.sampler.shards.folder):
        record["measured"][name] = found
        _write(path, record)
    return path


def _write(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def _counted(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with ``again``, which the first of its kind may lack."""
    return {"again": 0} | dict(record)


def _trained(experiment: Experiment, *, data: Path | None, runs: Path, device: str) -> tuple[Trainer, Path]:
    """The trainer at its last step, and the folder of the final model."""
    out = runs / experiment.label
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    outcome = train(experiment.resolved(data, runs), out=out, device=device)
    if outcome.final is None:
        raise TrainingError(
            f"{experiment.label} was stopped at step {outcome.step}: no record; the next try repeats it"
        )
    assert outcome.trainer is not None  # the folder was empty, so this run has trained
    return outcome.trainer, outcome.final


def _record(
    experiment: Experiment, trainer: Trainer, out: Path, *, device: str, commit: str, beside: int
) -> dict[str, Any]:
    recipe = trainer.recipe
    # Where its source lay on this machine is no part of what was computed.
    resolved = recipe.as_dict()
    if experiment.source is not None:
        resolved["model"]["backbone"] = experiment.resolved().model.backbone
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
        "recipe": resolved,
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
