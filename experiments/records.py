"""Trains a run and writes its record: recipe, versions, data, losses of all validation documents, measurements."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from adaponder.devices import autocast, hardware_name
from adaponder.errors import InputError, TrainingError
from adaponder.evaluation.scoring import ScoringOptions, score
from adaponder.evaluation.text import Windows, open_text, open_vocabulary
from adaponder.files import lock, read_json, write_whole
from adaponder.training.loop import Trainer
from adaponder.training.run import train
from benchmarks.harness import provenance
from experiments.queue import Corpus, Experiment, identity

if TYPE_CHECKING:
    from experiments.runner import Setup

# Yields (name, result) of each measurement on the model in the first folder with the prepared data in the second.
Measure = Callable[[Path, Path], Iterator[tuple[str, dict[str, Any]]]]

# About so many log lines go into a record, for curves.
_LINES = 60
# The share of a run's steps, at its end, over which weights are averaged.
_AVERAGED = 0.1
# Windows per batch of validation.
_BATCH = 16


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Reads the records of runs in ``folder``, without those older than the queue; adds ``identity`` and ``file``."""
    wanted = {"recipe", "validation", "data", "embedding_scale", "shared_device_with"}
    paths = sorted(folder.glob("*.json"))
    every: list[dict[str, Any]] = [read_json(path, InputError) | {"file": path.name} for path in paths]
    return [record | {"identity": identity(record["recipe"])} for record in every if wanted <= record.keys()]


def records_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], corpus: Corpus) -> list[Mapping[str, Any]]:
    """Returns the records with the recipe, seed and data of a run, in the order of training."""
    wanted = experiment.identity
    same = [record for record in records if record["identity"] == wanted and corpus.trained(record)]
    return sorted(same, key=lambda record: record.get("again", 0))


def record_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], corpus: Corpus) -> Mapping[str, Any] | None:
    """Returns the record of a run that holds all measurements of the run; ``None`` if there is none."""
    same, wanted = records_of(experiment, records, corpus), set(experiment.measures)
    measured = [record for record in same if wanted <= record.get("measured", {}).keys()]
    return next(iter(measured[experiment.again :]), None)


def carry_out(experiment: Experiment, setup: Setup, *, beside: int, measure: Measure | None = None) -> Path:
    """Trains one run and writes its record; returns the path of the record.

    The record is written before ``measure`` is called and again after each measurement, so that an interruption loses
    only the current measurement. ``beside`` is the number of other runs that share the device.
    """
    corpus, records = setup.queue.corpora[experiment.corpus], setup.records
    folder = None if corpus.folder is None else Path(corpus.folder)
    trainer, final = train_run(experiment, folder, setup.runs, setup.device)
    record = _training_record(experiment, trainer, final.parent, setup, beside)
    record |= {"corpus": corpus.name} | _documents(trainer) | {"measured": {}}
    name = identity(record["recipe"])
    records.mkdir(parents=True, exist_ok=True)
    # Two trainings of one run may end at the same time: the lock keeps their records from taking the same name.
    descriptor = os.open(records, os.O_RDONLY)
    try:
        lock(descriptor, wait=True)
        earlier = [other for other in read_records(records) if other["identity"] == name and corpus.trained(other)]
        record["again"] = max((other.get("again", 0) for other in earlier), default=-1) + 1
        again = f"-again-{record['again']}" if record["again"] else ""
        path = records / f"{experiment.setting}-seed-{experiment.seed}-{name[:8]}{again}.json"
        _write(path, record)
    finally:
        os.close(descriptor)
    for title, measurement in () if measure is None else measure(final, trainer.sampler.shards.folder):
        record["measured"][title] = measurement
        _write(path, record)
    return path


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record as indented JSON, with each list of plain values on one line."""
    text = json.dumps(record, indent=1, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}]+\]", lambda match: re.sub(r"\n\s*", "", match[0]).replace(",", ", "), text)
    write_whole(path, (text + "\n").encode())


def _training_record(
    experiment: Experiment, trainer: AveragingTrainer, out: Path, setup: Setup, beside: int
) -> dict[str, Any]:
    """Returns the fields of a record that describe the training and its losses."""
    recipe, device = trainer.recipe, setup.device
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
        **provenance(device, commit=setup.commit),
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


class AveragingTrainer(Trainer):
    """A trainer that averages the weights over the last tenth of its steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.averaged: dict[str, Tensor] = {}
        self.averaged_steps = 0

    @torch.no_grad()
    def _after_step(self, phase_end: int) -> bool:
        steps = self.recipe.train.steps
        if self.step >= steps - max(1, int(_AVERAGED * steps)):
            self.averaged_steps += 1
            for name, parameter in self.model.named_parameters():
                if self.averaged_steps == 1:
                    self.averaged[name] = parameter.detach().clone()
                self.averaged[name].lerp_(parameter.detach(), 1 / self.averaged_steps)
        return super()._after_step(phase_end)


def train_run(experiment: Experiment, data: Path | None, runs: Path, device: str) -> tuple[AveragingTrainer, Path]:
    """Trains a run from its first step; returns its trainer and the folder of its final model.

    The run that it continues is trained first, unless ``runs`` holds the final model of that run.
    """
    if experiment.source is not None and not (runs / experiment.source.label / "final").is_dir():
        train_run(experiment.source, data, runs, device)
    out = runs / experiment.label
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    outcome = train(experiment.resolved(data, runs), out=out, device=device, trainer_class=AveragingTrainer)
    if outcome.final is None:
        raise TrainingError(f"{experiment.label} was stopped at step {outcome.step}: it leaves no record; run it again")
    assert isinstance(outcome.trainer, AveragingTrainer)  # the folder was empty, so this run has trained
    return outcome.trainer, outcome.final


def _documents(trainer: AveragingTrainer) -> dict[str, Any]:
    """Measures all validation documents with the final and with the averaged weights; returns {} for puzzles."""
    if trainer.validation is None or trainer.sampler.shards.manifest.puzzles:
        return {}
    final = measure_documents(trainer)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(trainer.averaged[name])  # the final weights are in the run's folder
    averaged = measure_documents(trainer)
    averaged["documents"].pop("hash")  # ``final`` holds the same hashes
    return {"final": final, "averaged": {"steps": trainer.averaged_steps} | averaged}


def half_of(document_hash: int) -> str:
    """Returns a validation document's half: ``choose`` (for choosing rates and variants) or ``report`` (for losses).

    The last bit of the hash decides; it is independent of the first bits, which select the validation documents.
    """
    return "report" if document_hash & 1 else "choose"


def measure_documents(trainer: Trainer) -> dict[str, Any]:
    """Scores all validation documents.

    Returns the loss (nats per token) over all of them and over each half (:func:`half_of`), the mean depth, and by
    document the hash, the summed loss (nats), the number of predicted tokens and the mean depth.
    """
    recipe, shards = trainer.recipe, trainer.sampler.shards
    text = open_text(str(shards.folder), open_vocabulary(str(shards.folder / "tokenizer.json")), whose="the run")
    windows = Windows(recipe.data.sequence, across_documents=recipe.data.attend_across_documents)
    options: dict[str, Any] = {"how": ScoringOptions(execution="dense"), "batch_size": _BATCH, "shape": trainer.shape}
    with autocast(recipe.train.dtype, trainer.world.device):
        scores = score(trainer.model, text, windows, **options)
    folder, parts = shards.folder / "validation", shards.manifest.splits["validation"]
    tables = [pq.read_table(folder / part.docs_name, columns=["hash"]) for part in parts]
    hashes = [value for table in tables for value in table.column("hash").to_pylist()]
    document = text.document[text.counted]
    nats, depth, tokens = (
        np.bincount(document, weights=values[text.counted], minlength=len(hashes))
        for values in (scores.nll, scores.depth, np.ones(len(text.document)))
    )
    halves = np.array([half_of(value) for value in hashes])
    chosen = {"loss": halves != "", "choose": halves == "choose", "report": halves == "report"}
    return {
        **{name: float(nats[at].sum() / tokens[at].sum()) if tokens[at].any() else None for name, at in chosen.items()},
        "depth": float(depth.sum() / tokens.sum()),
        "documents": {
            "hash": [f"{value:016x}" for value in hashes],
            "nats": [round(float(value), 3) for value in nats],
            "tokens": [int(value) for value in tokens],
            "depth": [round(float(value), 3) for value in depth / np.maximum(tokens, 1)],
        },
    }
