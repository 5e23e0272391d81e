"""Trains runs of the queue, several at a time in processes, and skips runs that have a record.

A record holds recipe, versions, data, losses of all validation documents, and measurements.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from adaponder.devices import autocast, hardware_name
from adaponder.errors import InputError, TrainingError
from adaponder.evaluation.scoring import ScoringOptions, score
from adaponder.evaluation.text import Windows, open_text, open_vocabulary
from adaponder.files import lock, read_json, write_whole
from adaponder.methods import method_class
from adaponder.terminal import console, errors, line
from adaponder.training.loop import Trainer
from adaponder.training.run import train
from benchmarks import ROOT, child_environment, stop
from benchmarks.harness import provenance
from experiments.queue import Corpus, Experiment, Queue, identity

# Yields (name, result) of each measurement on the model in the first folder with the prepared data in the second.
Measure = Callable[[Path, Path], Iterator[tuple[str, dict[str, Any]]]]

# Approximate number of log lines that a record keeps, for curves.
_LINES = 60
# The share of a run's steps, at its end, over which weights are averaged.
_AVERAGED = 0.1
# Windows per batch of validation.
_BATCH = 16
# Seconds between two polls of the processes, and between two progress lines.
_POLL, _PROGRESS = 0.5, 30.0
# The factor by which estimated seconds are increased, for safety.
_MARGIN = 1.1
# Tokens of 3,000 steps of 32 x 1,024, to which the queue's ``seconds.iteration`` refers.
_TIMED_TOKENS = 3000 * 32 * 1024
# Fields of train that, with the model and the data, decide a run's speed.
_SPEED = ("global_batch", "micro_batch", "dtype", "execution", "compile", "memory_budget", "cuda_graphs")
_SPEED += ("gradient_checkpointing",)


@dataclass(frozen=True)
class Setup:
    """The queue, folders, device and commit that all runs of one command share.

    ``path`` is the queue's file; ``data`` (from ``--data``) replaces the folder of the main corpus in ``queue``.
    """

    path: Path
    queue: Queue
    records: Path
    runs: Path
    device: str
    commit: str
    data: Path | None = None

    def record_of(self, experiment: Experiment, known: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Returns the run's record among the ``known`` ones; ``None`` if it has no complete record."""
        return record_of(experiment, known, self.queue.corpora[experiment.corpus])

    def command(self, experiment: Experiment, beside: int) -> list[str]:
        """Returns the command line that trains a run while ``beside`` other runs share the device."""
        options = {"queue": self.path, "runs": self.runs, "records": self.records, "device": self.device}
        options |= {"commit": self.commit, "beside": beside, "seeds": experiment.seed}
        options |= {} if self.data is None else {"data": self.data}
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "experiments", "run", experiment.label, *words]

    def metrics(self, experiment: Experiment) -> Path:
        return self.runs / experiment.label / "metrics.jsonl"

    def steps_taken(self, experiment: Experiment) -> int:
        """Returns the number of steps that a run has logged; 0 while its source, the run to continue, is trained."""
        try:
            return json.loads(self.metrics(experiment).read_text().splitlines()[-1])["step"] + 1
        except (OSError, IndexError, ValueError, KeyError):
            return 0


class Running(NamedTuple):
    """A started run, its process, and the file that receives its output."""

    experiment: Experiment
    process: subprocess.Popen[bytes]
    log: Path


def work_through(selected: Sequence[Experiment], setup: Setup, *, minutes: float | None, jobs: int) -> int:
    """Trains the ``selected`` runs without a record, ``jobs`` at a time; starts only runs that fit into ``minutes``.

    Returns the exit code: 0 if all started runs succeeded, 1 if one failed or ran out of time, 130 if interrupted.
    """
    begin = time.monotonic()
    known = read_records(setup.records)
    # A label in several claims is trained once, if its records lack a measurement of any of them.
    labels = {run.label for run in selected}
    waiting = [*{run.label: run for run in selected if setup.record_of(run, known) is None}.values()]
    console.print(f"{len(labels)} runs: {len(labels) - len(waiting)} have a record, {len(waiting)} to do")
    seconds = dict.fromkeys(waiting, 0.0) if minutes is None else seconds_alone(setup, waiting, known)
    setup.runs.mkdir(parents=True, exist_ok=True)
    running: list[Running] = []
    failed, reported, handler = 0, begin, signal.getsignal(signal.SIGTERM)

    def left() -> float:
        return math.inf if minutes is None else begin + 60 * minutes - time.monotonic()

    def until_done(new: Experiment) -> float:
        """Estimates the seconds until all running runs and ``new`` have ended, if ``new`` starts now."""
        work = sum(seconds[run.experiment] * undone(run.experiment, setup) for run in running)
        return setup.queue.seconds["start"] + _MARGIN * (work + seconds[new])

    try:
        # SIGTERM is handled as Ctrl-C, so that child processes end too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        while True:
            for ended in [run for run in running if run.process.poll() is not None]:
                running.remove(ended)
                failed += _failed(ended)
            # The first run that ends in time: a shorter run goes before a longer one that cannot finish.
            while len(running) < jobs and (fitting := [run for run in waiting if until_done(run) <= left()]):
                waiting.remove(fitting[0])
                running.append(start(fitting[0], setup, beside=jobs - 1))
            if not running:
                break
            if left() <= 0:
                console.print(f"{minutes:g} minutes are over: {len(running)} runs are stopped and leave no record")
                failed += len(running)
                break
            if time.monotonic() - reported >= _PROGRESS:
                reported = time.monotonic()
                console.print(_progress(running, setup, len(waiting), left()), soft_wrap=True)
            time.sleep(_POLL)
    except KeyboardInterrupt:
        console.print(f"interrupted: {len(running)} runs are stopped without a record; the same command repeats them")
        return 130
    finally:
        stop(*(run.process for run in running), patience=10.0)
        signal.signal(signal.SIGTERM, handler)
    if waiting:
        console.print(f"{len(waiting)} runs are left: none of them fits into the remaining time")
    return 1 if failed else 0


def start(experiment: Experiment, setup: Setup, *, beside: int) -> Running:
    """Starts a process that trains one run."""
    log = setup.runs / f"{experiment.label}.log"
    setup.metrics(experiment).unlink(missing_ok=True)  # of an earlier attempt
    with log.open("wb") as out:
        command, environment = setup.command(experiment, beside), child_environment(ROOT)
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    console.print(line("started ", (experiment.label, "bold"), f", log in {log}"), soft_wrap=True)
    return Running(experiment, process, log)


def _failed(ended: Running) -> bool:
    """Prints how a run ended; returns whether it failed."""
    if ended.process.returncode == 0:
        console.print(line((ended.experiment.label, "bold"), " is done"), soft_wrap=True)
        return False
    last = ended.log.read_text(errors="replace").strip().splitlines()[-1:]
    errors.print(line((f"{ended.experiment.label} failed: ", "bold red"), *last), soft_wrap=True)
    return True


def _progress(running: Sequence[Running], setup: Setup, waiting: int, left: float) -> str:
    """Returns one line: the step of each run, the number of waiting runs, and the minutes left."""
    steps = [(run.experiment.label, setup.steps_taken(run.experiment)) for run in running]
    words = " · ".join(f"{label} {f'step {step:,}' if step else 'starting'}" for label, step in steps)
    return f"{words}; {waiting} waiting" + ("" if left == math.inf else f"; {left / 60:.1f} minutes left")


def seconds_alone(
    setup: Setup, waiting: Sequence[Experiment], known: Sequence[Mapping[str, Any]]
) -> dict[Experiment, float]:
    """Estimates the seconds of each waiting run if no other shares the device; raises if one cannot be estimated."""
    hardware, estimates = hardware_name(setup.device), {}
    for run in waiting:
        if (seconds := device_seconds(run, setup.queue, known, hardware)) is None:
            raise InputError(
                f"--minutes needs a timed run: no run of this kind has been timed on {hardware}; "
                f"time one first with: python -m experiments run {run.label} --device {setup.device}"
            )
        estimates[run] = seconds
    return estimates


def device_seconds(
    experiment: Experiment, queue: Queue, records: Sequence[Mapping[str, Any]], hardware: str
) -> float | None:
    """Estimates the seconds to train a run, and the run that it continues, with no other run on the device.

    Takes the speed from records with an equal :func:`_speed_key`, else from ``queue.seconds``; ``None`` if neither was
    timed on ``hardware``.
    """
    source = 0.0 if experiment.source is None else device_seconds(experiment.source, queue, records, hardware)
    if source is None:
        return None
    recipe = experiment.resolved()
    same = _speed_key(recipe.as_dict())
    rates = [
        record["tokens_per_second"] * (record["shared_device_with"] + 1)
        for record in records
        if record["hardware"] == hardware and _speed_key(record["recipe"]) == same
    ]
    if rates:
        return source + experiment.tokens / statistics.median(rates)
    if hardware != queue.seconds["hardware"]:
        return None
    iterations = method_class(recipe.model.method).fixed_iterations or recipe.model.iterations or 1
    return source + queue.seconds["iteration"] * iterations * experiment.tokens / _TIMED_TOKENS


def _speed_key(recipe: Mapping[str, Any]) -> str:
    """Returns a key of a recipe's model, batch and execution: runs with equal keys are equally fast."""
    train = {key: recipe["train"][key] for key in _SPEED if key in recipe["train"]}
    return identity({"model": recipe["model"] | {"embedding_scale": 1.0}, "data": recipe["data"], "train": train})


def undone(experiment: Experiment, setup: Setup) -> float:
    """Returns the share of a run's steps that remain."""
    return 1 - setup.steps_taken(experiment) / experiment.shaped.train.steps


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Reads the records in ``folder``, except old ones that lack fields; adds ``identity`` and ``file`` to each."""
    required = {"recipe", "validation", "data", "embedding_scale", "shared_device_with"}
    paths = sorted(folder.glob("*.json"))
    records: list[dict[str, Any]] = [read_json(path, InputError) | {"file": path.name} for path in paths]
    return [record | {"identity": identity(record["recipe"])} for record in records if required <= record.keys()]


def records_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], corpus: Corpus) -> list[Mapping[str, Any]]:
    """Returns the records with the recipe, seed and data of a run, in the order of training."""
    same = [record for record in records if record["identity"] == experiment.identity and corpus.trained(record)]
    return sorted(same, key=lambda record: record.get("again", 0))


def record_of(experiment: Experiment, records: Sequence[Mapping[str, Any]], corpus: Corpus) -> Mapping[str, Any] | None:
    """Returns the record of a run that holds all measurements of the run; ``None`` if there is none."""
    same, required = records_of(experiment, records, corpus), set(experiment.measures)
    measured = [record for record in same if required <= record.get("measured", {}).keys()]
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
    """Returns a validation document's half: ``choose`` (to choose learning rates and variants) or ``report``.

    The last bit of the hash decides; it is independent of the first bits, which select the validation documents.
    """
    return "report" if document_hash & 1 else "choose"


def measure_documents(trainer: Trainer) -> dict[str, Any]:
    """Scores all validation documents.

    Returns the loss (nats per token) over all of them and over each half (:func:`half_of`), the mean depth, and for
    each document the hash, the summed loss (nats), the number of predicted tokens and the mean depth.
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
    masks = {"loss": halves != "", "choose": halves == "choose", "report": halves == "report"}
    losses = {
        name: float(nats[mask].sum() / tokens[mask].sum()) if tokens[mask].any() else None
        for name, mask in masks.items()
    }
    return losses | {
        "depth": float(depth.sum() / tokens.sum()),
        "documents": {
            "hash": [f"{value:016x}" for value in hashes],
            "nats": [round(float(value), 3) for value in nats],
            "tokens": [int(value) for value in tokens],
            "depth": [round(float(value), 3) for value in depth / np.maximum(tokens, 1)],
        },
    }
