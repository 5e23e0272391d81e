"""Command line of the experiments: ``python -m experiments list|next|claim|run|results|corpus``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adaponder.commands.shared import arg, listed, opt
from adaponder.errors import InputError
from adaponder.terminal import console, line, table
from benchmarks.cli import program, run_program
from experiments.queue import Experiment, Queue, read_queue

if TYPE_CHECKING:
    from experiments.runner import Setup

QUEUE = Path(__file__).with_name("queue.yaml")
SeedsOption = Annotated[str | None, opt("These seeds instead of the queue's.", "0,1,…")]
JobsOption = Annotated[int, opt("Runs that share the device.", "N", min=1, max=64)]
MinutesOption = Annotated[float | None, opt("Start only runs that end within this time.", "M", min=0.01)]
OneClaim = Annotated[str | None, arg("Only the runs of this claim.", "CLAIM")]
QueueOption = Annotated[Path, opt("The queue of runs.", "YAML")]


@dataclass(frozen=True)
class QueueOptions:
    """Options of all commands that read the queue."""

    queue: QueueOption = QUEUE
    records: Annotated[Path | None, opt("Records; default: beside the queue.", "DIR")] = None
    data: Annotated[Path | None, opt("Prepared main corpus; default: the queue's.", "DIR")] = None

    def setup(self, runs: Path = Path(), device: str = "cpu", commit: str = "") -> Setup:
        """Reads the queue; ``--data`` replaces the folder and the hash of the main corpus."""
        from experiments.runner import Setup

        queue = read_queue(self.queue)
        if self.data is not None:
            main = replace(queue.main, folder=str(self.data), hash=_data_hash(self.data, queue))
            queue = replace(queue, corpora={**queue.corpora, "": main})
        records = self.records or self.queue.parent / "records"
        return Setup(self.queue, queue, records, runs, device, commit, self.data)


@dataclass(frozen=True)
class TrainOptions(QueueOptions):
    """Options of the commands that train runs."""

    runs: Annotated[Path, opt("Run folders and logs.", "DIR")] = Path("runs/experiments")
    device: Annotated[str, opt("cpu, cuda, cuda:1, …", "NAME")] = "cpu"
    commit: Annotated[str | None, opt("Commit to name in records, without git.", "NAME")] = None

    @cached_property
    def training_setup(self) -> Setup:
        from benchmarks.harness import commit_of

        commit = commit_of(self.commit, required=True, paths=("src", "experiments"))
        return self.setup(self.runs, self.device, commit)


def list_runs(*, claim: OneClaim = None, seeds: SeedsOption = None, options: QueueOptions) -> None:
    """Shows runs, their states and their results."""
    if seeds and claim is None:
        raise InputError("--seeds needs a claim, whose seeds it replaces")
    setup = options.setup()
    _show(setup, setup.queue.of_claim(claim, _seeds(seeds)) if claim else setup.queue.experiments)


def next_runs(*, minutes: MinutesOption = None, jobs: JobsOption = 1, options: TrainOptions) -> None:
    """Trains the runs of the queue that have no record, in the order of the queue."""
    _train(options.training_setup, options.training_setup.queue.experiments, minutes, jobs)


def claim(
    *,
    name: Annotated[str, arg("A claim of the queue.", "CLAIM")],
    seeds: SeedsOption = None,
    minutes: MinutesOption = None,
    jobs: JobsOption = 1,
    options: TrainOptions,
) -> None:
    """Trains the runs of one claim."""
    _train(options.training_setup, options.training_setup.queue.of_claim(name, _seeds(seeds)), minutes, jobs)


def run(
    *,
    label: Annotated[str, arg("The run's label, as list shows it.", "LABEL")],
    seeds: SeedsOption = None,
    beside: Annotated[int, typer.Option(min=0, hidden=True)] = 0,
    options: TrainOptions,
) -> None:
    """Trains one run in this process and writes its record, with the measurements that its claims need."""
    from experiments.measures import TIMED, measuring
    from experiments.runner import carry_out

    setup = options.training_setup
    queue = setup.queue
    known = [*queue.experiments, *(run.with_seed(seed) for run in queue.experiments for seed in _seeds(seeds))]
    if (experiment := next((run for run in known if run.label == label), None)) is None:
        raise InputError(f"{label}: no such run in the queue; python -m experiments list shows the labels")
    names = [name for name in queue.measures_of(experiment) if name not in TIMED or not beside]
    measure = measuring(names, device=options.device, dtype=experiment.shaped.train.dtype)
    path = carry_out(experiment, setup, beside=beside, measure=measure)
    console.print(line("record in ", (path, "bold")), soft_wrap=True)


def results() -> None:
    """Writes docs/results.md, its tables and figures and README's table from the records."""
    from experiments.page import write

    write(QUEUE.parent)


def corpus(
    out: Annotated[Path, opt("Folder for corpus-NN.jsonl.xz.", "DIR")],
    wheels: Annotated[Path | None, opt("Downloaded wheels; default: OUT/wheels.", "DIR")] = None,
) -> None:
    """Builds the open corpus from the wheels in experiments/corpus.lock; every sha256 is checked."""
    from experiments.corpus import build

    build(out, wheels=wheels)


app = program(
    "experiments",
    "Trains the runs that test the paper's claims, one record each, and writes the results page from the records.",
    {"list": list_runs, "next": next_runs, "claim": claim, "run": run, "results": results, "corpus": corpus},
)


def _train(setup: Setup, selected: Sequence[Experiment], minutes: float | None, jobs: int) -> None:
    """Trains the selected runs that have no record, shows all selected runs, and exits with the exit code."""
    from experiments.measures import TIMED
    from experiments.runner import work_through

    left_out = {
        f"are left out until their text is prepared: {corpus.prepare}": [run for run in selected if run.corpus == name]
        for name, corpus in setup.queue.corpora.items()
        if corpus.folder is not None and not (Path(corpus.folder) / "manifest.json").is_file()
    }
    if jobs > 1:
        timed = [run for run in selected if set(run.measures) & set(TIMED)]
        left_out["that time the device are left out: start them with --jobs 1"] = timed
    for reason, runs in left_out.items():
        if runs:
            console.print(f"{len(runs)} runs {reason}", soft_wrap=True)
            selected = [run for run in selected if run not in runs]
    code = work_through(selected, setup, minutes=minutes, jobs=jobs)
    _show(setup, selected)
    raise typer.Exit(code)


def _data_hash(folder: Path, queue: Queue) -> str:
    """Returns the hash of the prepared data in ``folder``; prints a notice if it is not that of the main corpus."""
    from adaponder.data import Shards

    if not (folder / "manifest.json").is_file():
        raise InputError(f"--data {folder}: no prepared data is there; prepare it with: {queue.main.prepare}")
    # Each run verifies every byte when it opens the data.
    data_hash = Shards.open(folder, "train", verify=False).content_hash()
    if data_hash != queue.main.hash:
        notice = f" {folder} has hash {data_hash}, the queue's records {queue.main.hash}: its records stand apart"
        console.print(line(("other data:", "yellow"), notice), soft_wrap=True)
    return data_hash


def _seeds(text: str | None) -> tuple[int, ...]:
    return listed("--seeds", text, int, "[0, 2147483647]")


def _show(setup: Setup, selected: Sequence[Experiment]) -> None:
    """Prints a table per claim with the label, state, loss and depth of each run."""
    from experiments.runner import read_records

    known = read_records(setup.records)
    for name in dict.fromkeys(experiment.claim for experiment in selected):
        rows = []
        for run in (run for run in selected if run.claim == name):
            cells = ("—", "—", "—", "waiting")
            if (record := setup.record_of(run, known)) is not None:
                last, scale = record["validation"][-1], f"{record['embedding_scale']:.4g}"
                cells = (scale, f"{last['validation_loss']:.4f}", f"{last['validation_depth']:.2f}", "done")
            rows.append((run.label, *cells))
        columns = ("run", "emb. scale", "loss", "depth", "state")
        console.print(table(f"\n{name}: {setup.queue.claims[name]}", columns, rows))


if __name__ == "__main__":
    run_program(app)
