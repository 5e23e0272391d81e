"""The record of one run: hardware, versions, commit, data, resolved recipe, losses, and measurements on its model."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adaponder.devices import hardware_name
from adaponder.errors import InputError
from adaponder.files import lock, read_json, write_whole
from benchmarks.record import provenance
from experiments.identity import identity
from experiments.queue import Corpus, Experiment
from experiments.training import AveragingTrainer, measure_documents, train_run

# Maps the final model's folder and the prepared data to named measurements, one after another.
Measure = Callable[[Path, Path], Iterator[tuple[str, dict[str, Any]]]]

# Log lines that a record keeps, for curves.
_LINES = 60


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Reads every record of a run of the queue in ``folder``, with its ``identity`` and ``file``.

    Records of other kinds are left out, and so are those older than the queue, which lack the embedding scale or the
    hash of the data.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        record = read_json(path, InputError)
        if {"recipe", "validation", "data", "embedding_scale", "shared_device_with"} <= record.keys():
            records.append(record | {"identity": identity(record["recipe"]), "file": path.name})
    return records


def records_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], corpus: Corpus) -> list[Mapping[str, Any]]:
    """Returns the records of this recipe, seed and data, the first run first."""
    same = [record for record in records if record["identity"] == experiment.identity and corpus.trained(record)]
    return sorted(same, key=lambda record: record.get("again", 0))


def record_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], corpus: Corpus) -> Mapping[str, Any] | None:
    """Returns the record of this run if there is one that holds all of the run's measurements."""
    same = records_of(experiment, records, corpus)
    measured = [record for record in same if set(experiment.measures) <= record.get("measured", {}).keys()]
    return next(iter(measured[experiment.again :]), None)


def result(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the last validation: ``validation_loss``, ``validation_depth``, ``validation_halted``."""
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
    """Trains one run and writes its record; returns the record's path.

    ``measure`` is called with the final model's folder and the prepared data; the record is written before that, and
    again after each measurement, so that a run that is cut keeps what it has. ``beside`` is the number of other runs
    that share the device; tokens per second are those of this run alone.
    """
    trainer, final = train_run(experiment, data=data, runs=runs, device=device)
    record = _training_record(experiment, trainer, final.parent, device=device, commit=commit, beside=beside)
    record |= {"corpus": corpus.name} | _documents(trainer) | {"measured": {}}
    name = identity(record["recipe"])[:8]
    records.mkdir(parents=True, exist_ok=True)
    with _locked(records):  # two trainings of one run may end in the same second
        earlier = [
            other.get("again", 0)
            for other in read_records(records)
            if other["identity"][:8] == name and corpus.trained(other)
        ]
        record["again"] = max(earlier, default=-1) + 1
        again = f"-again-{record['again']}" if record["again"] else ""
        path = records / f"{experiment.setting}-seed-{experiment.seed}-{name}{again}.json"
        write_run(path, record)
    for title, measurement in () if measure is None else measure(final, trainer.sampler.shards.folder):
        record["measured"][title] = measurement
        write_run(path, record)
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks ``folder`` against other processes, so that none takes the name of another's record."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def write_run(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record as indented JSON with each list of numbers on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}]+\]", lambda match: re.sub(r"\n\s*", "", match[0]).replace(",", ", "), text)
    write_whole(path, (text + "\n").encode())


def _training_record(
    experiment: Experiment, trainer: AveragingTrainer, out: Path, *, device: str, commit: str, beside: int
) -> dict[str, Any]:
    """Returns what a record says of the training itself."""
    recipe = trainer.recipe
    resolved = recipe.as_dict()
    if experiment.source is not None:
        # The folder of the continued run on this machine does not decide what was computed.
        resolved["model"]["backbone"] = experiment.resolved().model.backbone
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    on_gpu = torch.device(device).type == "cuda"
    return {
        "experiment": experiment.label,
        "claim": experiment.claim,
        "command": f"python -m experiments run {experiment.label}",
        **provenance(device, commit=commit),
        "hardware": hardware_name(device),
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


def _documents(trainer: AveragingTrainer) -> dict[str, Any]:
    """Measures every validation document with the final weights and with the averaged ones; nothing for puzzles."""
    if trainer.validation is None or trainer.sampler.shards.manifest.puzzles:
        return {}
    final = measure_documents(trainer)
    trainer.load_averaged()
    averaged = measure_documents(trainer)
    averaged["documents"].pop("hash")  # as above
    return {"final": final, "averaged": {"steps": trainer.averaged_steps} | averaged}
