"""adaponder reproduce: trains the runs that a claim needs, several at once; a run that has a record is skipped."""

from __future__ import annotations

import json as jsonlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adaponder.bench.record import checkout, commit_of
from adaponder.commands.options import ReproduceOptions
from adaponder.data import Shards
from adaponder.devices import hardware_name
from adaponder.errors import InputError
from adaponder.reproduction.queue import Corpus, Experiment, Queue, read_queue
from adaponder.reproduction.records import carry_out, read_records, record_of, result
from adaponder.reproduction.schedule import choose, device_seconds, wall_seconds
from adaponder.terminal import console, errors, line, table, write_json

# Seconds between two looks at the runs, and between two lines about them.
_LOOK, _SAY = 0.5, 30.0


@dataclass(frozen=True)
class Setup:
    """What all runs of one command share: the queue's file, text, folders of runs and records, device and commit."""

    queue: Path
    corpora: Mapping[str, Corpus]
    runs: Path
    records: Path
    device: str
    commit: str

    def command(self, experiment: Experiment, beside: int) -> list[str]:
        """The command line of the process that trains one run, with ``beside`` others at the same time."""
        paths = {"queue": self.queue, "data": self.corpora[""].folder, "runs": self.runs, "records": self.records}
        options = paths | {"device": self.device, "commit": self.commit, "beside": beside, "run": experiment.label}
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "adaponder", "reproduce", *words, f"--seeds={experiment.seed}"]


def run(options: ReproduceOptions) -> int:
    """Lists the runs, writes the results page, or trains one run, a claim's runs or the whole queue.

    Returns the exit code.
    """
    path = options.queue or checkout() / "experiments" / "queue.yaml"
    queue = read_queue(path)
    records = options.records or path.parent / "records"
    claim, seeds = options.claim, options.seeds
    alone = [claim is not None, options.listed and claim is None, options.following, options.one is not None]
    if sum([*alone, options.results]) != 1:
        raise InputError("name a claim, or say --next, --list, --run LABEL or --results; --list shows the claims")
    if seeds and claim is None and options.one is None:
        raise InputError("--seeds: name the claim whose runs are to have them; the queue has its own")
    if options.results:
        from adaponder.commands import results

        return results.run(queue, read_records(records), path.parent)
    if options.listed:
        chosen = queue.of_claim(claim, seeds) if claim else list(queue.experiments)
        show(queue, chosen, read_records(records), _corpora(queue, options.data), json=options.json)
        return 0
    corpora = _corpora(queue, options.data or Path(queue.main.folder or ""))
    setup = Setup(path, corpora, options.runs, records, options.device, commit_of(options.commit, needed=True))
    if options.one is not None:
        _one(queue, _by_label(queue, options.one, seeds), setup, beside=options.beside)
        return 0
    chosen = _prepared(queue.of_claim(claim, seeds) if claim else list(queue.experiments), corpora)
    chosen = _untimed(chosen) if options.jobs > 1 else chosen
    code = _work_through(queue, chosen, setup, minutes=options.minutes, jobs=options.jobs)
    show(queue, chosen, read_records(records), corpora, json=options.json)
    return code


def _one(queue: Queue, experiment: Experiment, setup: Setup, *, beside: int) -> None:
    """Trains one run in this process, measures what any claim wants of it, and writes its record."""
    from adaponder.commands.measures import TIMED, measuring

    wanted = [name for name in queue.measures_of(experiment) if name not in TIMED or not beside]
    corpus = setup.corpora[experiment.corpus]
    written = carry_out(
        experiment,
        data=None if corpus.folder is None else Path(corpus.folder),
        corpus=corpus,
        runs=setup.runs,
        records=setup.records,
        device=setup.device,
        commit=setup.commit,
        beside=beside,
        measure=measuring(wanted, device=setup.device, dtype=experiment.resolved().train.dtype),
    )
    console.print(line("record in ", (written, "bold")), soft_wrap=True)


def _corpora(queue: Queue, data: Path | None) -> dict[str, Corpus]:
    """The queue's corpora, with the prepared text in ``data``, if it is given, as the main one."""
    if data is None:
        return dict(queue.corpora)
    return dict(queue.corpora) | {"": replace(queue.main, folder=str(data), hash=_data_hash(data, queue))}


def _prepared(chosen: Sequence[Experiment], corpora: Mapping[str, Corpus]) -> list[Experiment]:
    """The runs whose corpus is there; prints how the others' is made."""
    missing = {
        corpus
        for corpus in {corpora[each.corpus] for each in chosen}
        if corpus.folder is not None and not (Path(corpus.folder) / "manifest.json").is_file()
    }
    for corpus in sorted(missing, key=lambda each: each.name):
        count = sum(each.corpus == corpus.name for each in chosen)
        console.print(f"{count} runs are left out until their text is prepared: {corpus.prepare}", soft_wrap=True)
    return [each for each in chosen if corpora[each.corpus] not in missing]


def _untimed(chosen: Sequence[Experiment]) -> list[Experiment]:
    """The runs that may share the device; prints how many may not."""
    from adaponder.commands.measures import TIMED

    alone = [each for each in chosen if set(each.measures) & set(TIMED)]
    if alone:
        console.print(f"{len(alone)} runs that time the device are left out: start them with --jobs 1")
    return [each for each in chosen if each not in alone]


def _data_hash(folder: Path, queue: Queue) -> str:
    """The hash of the prepared data in ``folder``; prints a notice if the queue has another."""
    if not (folder / "manifest.json").is_file():
        raise InputError(f"--data {folder}: no prepared data is there; prepare it with: {queue.main.prepare}")
    # Without checksums: each run compares every byte when it opens the data.
    data_hash = Shards.open(folder, "train", verify=False).content_hash()
    if data_hash != queue.data_hash:
        console.print(
            line(("other data:", "yellow"), f" {folder} has hash {data_hash}, the queue's records {queue.data_hash};"),
            line("records of this data stand apart"),
            soft_wrap=True,
        )
    return data_hash


def _by_label(queue: Queue, label: str, seeds: Sequence[int]) -> Experiment:
    """The run of that label, with the queue's seeds or with ``seeds``."""
    every = [each for claim in queue.claims for each in [*queue.of_claim(claim), *queue.of_claim(claim, seeds)]]
    match = next((each for each in every if each.label == label), None)
    if match is None:
        raise InputError(
            f"--run {label}: no such run in the queue; adaponder reproduce --list --json PATH writes their labels"
        )
    return match


# --- several at once ------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A run that has been started: its process and the file with what it prints."""

    experiment: Experiment
    process: subprocess.Popen[bytes]
    log: Path


def _work_through(queue: Queue, chosen: Sequence[Experiment], setup: Setup, *, minutes: float | None, jobs: int) -> int:
    """Trains ``jobs`` runs at a time until none is left that fits; returns the exit code.

    0 if all went well, 1 if a run failed, 130 if interrupted.
    """
    begin = time.monotonic()
    known = read_records(setup.records)
    # A run may serve several claims, under one label: it is trained once, and waits if one of them is not served.
    labels = {each.label: each for each in reversed(chosen)}
    unserved = {each.label for each in chosen if record_of(each, known, setup.corpora[each.corpus]) is None}
    runs = list(labels.values())[::-1]
    waiting = [each for each in runs if each.label in unserved]
    console.print(f"{len(runs)} runs: {len(runs) - len(waiting)} have a record, {len(waiting)} to do")
    alone = _seconds_alone(queue, waiting, known, setup.device, limited=minutes is not None)
    setup.runs.mkdir(parents=True, exist_ok=True)
    running: list[_Running] = []
    failed, said, before = 0, begin, signal.getsignal(signal.SIGTERM)

    def left() -> float | None:
        return None if minutes is None else begin + 60 * minutes - time.monotonic()

    try:
        signal.signal(signal.SIGTERM, _interrupt)
        while True:
            for ended in [each for each in running if each.process.poll() is not None]:
                running.remove(ended)
                failed += _report(ended)
            while len(running) < jobs:
                each = choose(waiting, _until_all_end(queue, running, setup, alone), left=left())
                if each is None:
                    break
                waiting.remove(each)
                running.append(_start(each, setup, beside=jobs - 1))
            if not running:
                break
            if (rest := left()) is not None and rest <= 0:
                console.print(f"{minutes:g} minutes are over: {len(running)} runs are cut and leave no record")
                failed += len(running)
                break
            if time.monotonic() - said >= _SAY:
                said = time.monotonic()
                console.print(_progress(running, setup, waiting, left()), soft_wrap=True)
            time.sleep(_LOOK)
    except KeyboardInterrupt:
        console.print(f"stopped: {len(running)} runs are cut and leave no record; the same command repeats them")
        return 130
    finally:
        _end(running)
        signal.signal(signal.SIGTERM, before)
    if waiting:
        console.print(f"{len(waiting)} runs are left: none of them fits into the time")
    return 1 if failed else 0


def _interrupt(*_: object) -> None:
    """Treats SIGTERM as Ctrl-C, so that the runs which were started end too."""
    raise KeyboardInterrupt


def _seconds_alone(
    queue: Queue, waiting: Sequence[Experiment], known: Sequence[Mapping[str, Any]], device: str, *, limited: bool
) -> dict[Experiment, float]:
    """Seconds that each run takes alone on the device; all 0 if time is not ``limited``."""
    if not limited:
        return dict.fromkeys(waiting, 0.0)
    hardware, found = hardware_name(device), {}
    for each in waiting:
        seconds = device_seconds(each, queue, known, hardware)
        if seconds is None:
            raise InputError(
                f"--minutes: no run of this kind has been timed on {hardware}, so nobody knows what fits; "
                f"time one first: adaponder reproduce --run {each.label} --device {device}"
            )
        found[each] = seconds
    return found


def _start(experiment: Experiment, setup: Setup, *, beside: int) -> _Running:
    """Starts one run in a process of its own."""
    log = setup.runs / f"{experiment.label}.log"
    _metrics(experiment, setup).unlink(missing_ok=True)  # of an earlier try: the steps it took are not this one's
    with log.open("wb") as out:
        process = subprocess.Popen(setup.command(experiment, beside), stdout=out, stderr=subprocess.STDOUT)
    console.print(line("started ", (experiment.label, "bold"), f", log in {log}"), soft_wrap=True)
    return _Running(experiment, process, log)


def _report(ended: _Running) -> bool:
    """Prints how a run ended; returns whether it failed."""
    failed = ended.process.returncode != 0
    if failed:
        last = ended.log.read_text(errors="replace").strip().splitlines()[-1:]
        errors.print(line((f"{ended.experiment.label} failed: ", "bold red"), *last), soft_wrap=True)
    else:
        console.print(line((ended.experiment.label, "bold"), " is done"), soft_wrap=True)
    return failed


def _progress(running: Sequence[_Running], setup: Setup, waiting: Sequence[Experiment], left: float | None) -> str:
    """One line: the step of each run, how many wait, and the minutes left if there is a limit."""
    steps = [(each.experiment.label, _step(each.experiment, setup)) for each in running]
    parts = [f"{label} {f'step {step:,}' if step else 'starting'}" for label, step in steps]
    rest = "" if left is None else f"; {left / 60:.1f} minutes left"
    return f"{' · '.join(parts)}; {len(waiting)} waiting{rest}"


def _until_all_end(
    queue: Queue, running: Sequence[_Running], setup: Setup, alone: Mapping[Experiment, float]
) -> Callable[[Experiment], float]:
    """What tells how long it takes until a new run and those that are running are all done."""
    rest = sum(alone[each.experiment] * _undone(each.experiment, setup) for each in running)
    return lambda new: wall_seconds(rest + alone[new], queue)


def _undone(experiment: Experiment, setup: Setup) -> float:
    """The share of a run's steps that are still to be taken; 1 while it trains what it continues."""
    return 1 - _step(experiment, setup) / experiment.resolved().train.steps


def _metrics(experiment: Experiment, setup: Setup) -> Path:
    return setup.runs / experiment.label / "metrics.jsonl"


def _step(experiment: Experiment, setup: Setup) -> int:
    """The steps that a run has taken and written down; 0 before the first."""
    try:
        last = _metrics(experiment, setup).read_text().splitlines()[-1]
        return jsonlib.loads(last)["step"] + 1
    except (OSError, IndexError, ValueError, KeyError):
        return 0


def _end(running: Sequence[_Running]) -> None:
    """Ends the runs that still go on: with SIGTERM, and after 10 seconds with SIGKILL."""
    for each in running:
        each.process.send_signal(signal.SIGTERM)
    for each in running:
        try:
            each.process.wait(10)
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()


# --- showing --------------------------------------------------------------------------------------------------------


def show(
    queue: Queue,
    chosen: Sequence[Experiment],
    records: Sequence[Mapping[str, Any]],
    corpora: Mapping[str, Corpus],
    *,
    json: Path | None = None,
) -> None:
    """Prints one table per claim: its runs, whether each is done, and its loss and depth."""
    entries = []
    for claim in dict.fromkeys(each.claim for each in chosen):
        rows = []
        for each in (each for each in chosen if each.claim == claim):
            record = record_of(each, records, corpora[each.corpus])
            entries.append(_entry(each, record))
            # One column says what a run is, so that a narrow window does not part its settings from its figures.
            setting = " ".join([each.recipe, *(change.partition(".")[2] for change in each.changes)]) + _continued(each)
            loss, depth, scale = ("—", "—", "—") if record is None else _figures(record)
            rows.append((setting, str(each.seed), scale, loss, depth, entries[-1]["state"]))
        columns = ("run", "seed", "emb. scale", "loss", "depth", "state")
        console.print(table(f"\n{claim}: {queue.claims[claim]}", columns, rows))
    write_json(json, {"data": corpora[""].hash, "runs": entries})


def _continued(experiment: Experiment) -> str:
    """What a run continues and on which text, where that is not the rule."""
    source = "" if experiment.source is None else f" from {experiment.source.setting}"
    return source + (f" on {experiment.corpus}" if experiment.corpus else "")


def _entry(experiment: Experiment, record: Mapping[str, Any] | None) -> dict[str, Any]:
    """A run as ``--json`` lists it; with a record, also its file and its result."""
    entry = {"claim": experiment.claim, "recipe": experiment.recipe, "set": list(experiment.changes)}
    entry |= {"seed": experiment.seed, "label": experiment.label, "state": "waiting" if record is None else "done"}
    return entry if record is None else entry | {"record": record["file"]} | dict(result(record))


def _figures(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """Loss, mean depth and embedding scale, as a table shows them."""
    last = result(record)
    return f"{last['validation_loss']:.4f}", f"{last['validation_depth']:.2f}", f"{record['embedding_scale']:.4g}"
