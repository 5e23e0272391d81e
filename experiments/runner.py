"""Trains runs of the queue, several at a time, each in its own process; a run that has a record is skipped."""

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
from benchmarks import ROOT, child_environment
from experiments.queue import Experiment, Queue, identity
from experiments.records import read_records, record_of

# Seconds between two looks at the processes, and between two progress lines.
_POLL, _PROGRESS = 0.5, 30.0
# Runs may take this much longer than estimated.
_MARGIN = 1.1
# The tokens of 3,000 steps of 32 x 1,024, for which the queue states the seconds of an iteration.
_TIMED_TOKENS = 3000 * 32 * 1024
# Fields of train that, with the model and the data, decide a run's speed.
_SPEED = ("global_batch", "micro_batch", "dtype", "execution", "compile", "memory_budget", "gradient_checkpointing")


@dataclass(frozen=True)
class Setup:
    """The queue, folders, device and commit that all runs of one command share.

    ``path`` is the queue's file; ``data``, from ``--data``, replaces the main corpus of that file in ``queue``.
    """

    path: Path
    queue: Queue
    records: Path
    runs: Path
    device: str
    commit: str
    data: Path | None = None

    def record_of(self, experiment: Experiment, known: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Returns the run's record among the ``known`` records, if any."""
        return record_of(experiment, known, self.queue.corpora[experiment.corpus])

    def command(self, experiment: Experiment, beside: int) -> list[str]:
        """Returns the command line of the process that trains one run beside ``beside`` others."""
        options = {"queue": self.path, "runs": self.runs, "records": self.records, "device": self.device}
        options |= {"commit": self.commit, "beside": beside, "seeds": experiment.seed}
        options |= {} if self.data is None else {"data": self.data}
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "experiments", "run", experiment.label, *words]

    def metrics(self, experiment: Experiment) -> Path:
        return self.runs / experiment.label / "metrics.jsonl"

    def steps_taken(self, experiment: Experiment) -> int:
        """Returns the number of steps that a run has logged; 0 before the first, and while its source is trained."""
        try:
            return json.loads(self.metrics(experiment).read_text().splitlines()[-1])["step"] + 1
        except (OSError, IndexError, ValueError, KeyError):
            return 0


class Running(NamedTuple):
    """A run that has been started: its process and the file with its output."""

    experiment: Experiment
    process: subprocess.Popen[bytes]
    log: Path


def work_through(chosen: Sequence[Experiment], setup: Setup, *, minutes: float | None, jobs: int) -> int:
    """Trains ``jobs`` runs at a time until no run is left that fits into the time; returns the exit code.

    0 if every run succeeded, 1 if one failed, 130 if interrupted.
    """
    begin = time.monotonic()
    known = read_records(setup.records)
    # A run may serve several claims under one label: it is trained once, if one of them lacks its record.
    labels = {experiment.label: experiment for experiment in reversed(chosen)}
    unserved = {run.label for run in chosen if setup.record_of(run, known) is None}
    waiting = [experiment for experiment in list(labels.values())[::-1] if experiment.label in unserved]
    console.print(f"{len(labels)} runs: {len(labels) - len(waiting)} have a record, {len(waiting)} to do")
    seconds = dict.fromkeys(waiting, 0.0) if minutes is None else seconds_alone(setup, waiting, known)
    setup.runs.mkdir(parents=True, exist_ok=True)
    running: list[Running] = []
    failed, reported, handler = 0, begin, signal.getsignal(signal.SIGTERM)

    def left() -> float:
        return math.inf if minutes is None else begin + 60 * minutes - time.monotonic()

    def until_done(new: Experiment) -> float:
        work = sum(seconds[run.experiment] * undone(run.experiment, setup) for run in running)
        return wall_seconds(work + seconds[new], setup.queue)

    try:
        # As Ctrl-C, so that child processes end too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        while True:
            for ended in [run for run in running if run.process.poll() is not None]:
                running.remove(ended)
                failed += _report(ended)
            # The first run that ends in time; a shorter one goes first where a longer one cannot finish.
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
        _stop(running)
        signal.signal(signal.SIGTERM, handler)
    if waiting:
        console.print(f"{len(waiting)} runs are left: none of them fits into the time")
    return 1 if failed else 0


def start(experiment: Experiment, setup: Setup, *, beside: int) -> Running:
    """Starts one run in its own process."""
    log = setup.runs / f"{experiment.label}.log"
    setup.metrics(experiment).unlink(missing_ok=True)  # left by an earlier attempt, whose steps do not count
    with log.open("wb") as out:
        command, environment = setup.command(experiment, beside), child_environment(ROOT)
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    console.print(line("started ", (experiment.label, "bold"), f", log in {log}"), soft_wrap=True)
    return Running(experiment, process, log)


def _report(ended: Running) -> bool:
    """Prints how a run ended; returns whether it failed."""
    failed = ended.process.returncode != 0
    if failed:
        last = ended.log.read_text(errors="replace").strip().splitlines()[-1:]
        errors.print(line((f"{ended.experiment.label} failed: ", "bold red"), *last), soft_wrap=True)
    else:
        console.print(line((ended.experiment.label, "bold"), " is done"), soft_wrap=True)
    return failed


def _stop(running: Sequence[Running]) -> None:
    """Ends processes with SIGTERM, and after 10 seconds with SIGKILL."""
    for run in running:
        run.process.send_signal(signal.SIGTERM)
    for run in running:
        try:
            run.process.wait(10)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


def _progress(running: Sequence[Running], setup: Setup, waiting: int, left: float) -> str:
    """Returns one line: the step of each run, the number of waiting runs, and the minutes left."""
    steps = [(run.experiment.label, setup.steps_taken(run.experiment)) for run in running]
    words = " · ".join(f"{label} {f'step {step:,}' if step else 'starting'}" for label, step in steps)
    return f"{words}; {waiting} waiting" + ("" if left == math.inf else f"; {left / 60:.1f} minutes left")


def seconds_alone(
    setup: Setup, waiting: Sequence[Experiment], known: Sequence[Mapping[str, Any]]
) -> dict[Experiment, float]:
    """Returns the seconds that each run takes alone on the device; raises if one cannot be estimated."""
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
    """Estimates the seconds to train a run, and before it its source, with no other run on the device.

    Uses records of runs with equal :func:`_speed_key`, else ``queue.seconds``; ``None`` if neither is for ``hardware``.
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
    """Returns a key that is equal for runs with the same model, batch and execution, hence the same speed."""
    train = {key: recipe["train"][key] for key in _SPEED if key in recipe["train"]}
    return identity({"model": recipe["model"] | {"embedding_scale": 1.0}, "data": recipe["data"], "train": train})


def wall_seconds(work: float, queue: Queue) -> float:
    """Estimates the seconds until runs that share the device are all done, with one of them yet to start.

    ``work`` is the sum of the seconds that each still needs alone.
    """
    return queue.seconds["start"] + _MARGIN * work


def undone(experiment: Experiment, setup: Setup) -> float:
    """Returns the share of a run's steps that are still to be taken."""
    return 1 - setup.steps_taken(experiment) / experiment.shaped.train.steps
