"""Trains runs of the queue in processes, several at a time, and skips runs that have a record."""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adaponder.devices import hardware_name
from adaponder.errors import InputError
from adaponder.methods import method_class
from adaponder.terminal import console, errors, line
from benchmarks import ROOT, child_environment, stop
from experiments.queue import Experiment, Queue, identity
from experiments.records import read_records, record_of

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
        """Returns the number of steps that a run has logged; 0 while the run that it continues is trained."""
        try:
            return json.loads(self.metrics(experiment).read_text().splitlines()[-1])["step"] + 1
        except (OSError, IndexError, ValueError, KeyError):
            return 0


class Running(NamedTuple):
    """A started run, its process, and the file that receives its output."""

    experiment: Experiment
    process: subprocess.Popen[bytes]
    log: Path


def work_through(chosen: Sequence[Experiment], setup: Setup, *, minutes: float | None, jobs: int) -> int:
    """Trains the ``chosen`` runs without a record, ``jobs`` at a time, as long as a run fits into ``minutes``.

    Returns the exit code: 0 if every run succeeded, 1 if a run failed, 130 if interrupted.
    """
    begin = time.monotonic()
    known = read_records(setup.records)
    # A label in several claims is trained once, if its records lack a measurement of any of them.
    labels = {run.label for run in chosen}
    waiting = [*{run.label: run for run in chosen if setup.record_of(run, known) is None}.values()]
    console.print(f"{len(labels)} runs: {len(labels) - len(waiting)} have a record, {len(waiting)} to do")
    seconds = dict.fromkeys(waiting, 0.0) if minutes is None else seconds_alone(setup, waiting, known)
    setup.runs.mkdir(parents=True, exist_ok=True)
    running: list[Running] = []
    failed, reported, handler = 0, begin, signal.getsignal(signal.SIGTERM)

    def left() -> float:
        return math.inf if minutes is None else begin + 60 * minutes - time.monotonic()

    def until_done(new: Experiment) -> float:
        """Estimates the seconds until all runs end, if the run ``new`` shares the device with those that run."""
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
        console.print(f"{len(waiting)} runs are left: none of them fits into the time")
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
    before = 0.0 if experiment.source is None else device_seconds(experiment.source, queue, records, hardware)
    if before is None:
        return None
    recipe = experiment.resolved()
    same = _speed_key(recipe.as_dict())
    rates = [
        record["tokens_per_second"] * (record["shared_device_with"] + 1)
        for record in records
        if record["hardware"] == hardware and _speed_key(record["recipe"]) == same
    ]
    if rates:
        return before + experiment.tokens / statistics.median(rates)
    if hardware != queue.seconds["hardware"]:
        return None
    iterations = method_class(recipe.model.method).fixed_iterations or recipe.model.iterations or 1
    return before + queue.seconds["iteration"] * iterations * experiment.tokens / _TIMED_TOKENS


def _speed_key(recipe: Mapping[str, Any]) -> str:
    """Returns a key of a recipe's model, batch and execution: runs with equal keys are equally fast."""
    train = {key: recipe["train"][key] for key in _SPEED if key in recipe["train"]}
    return identity({"model": recipe["model"] | {"embedding_scale": 1.0}, "data": recipe["data"], "train": train})


def undone(experiment: Experiment, setup: Setup) -> float:
    """Returns the share of a run's steps that remain."""
    return 1 - setup.steps_taken(experiment) / experiment.shaped.train.steps
