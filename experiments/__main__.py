"""Command line of the experiments: ``python -m experiments list|next|claim|run|results|corpus``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from adaponder.errors import AdaPonderError, ConfigError, InputError
from adaponder.terminal import console, errors, line, table, write_json
from experiments.queue import Corpus, Experiment, Queue, read_queue

HERE = Path(__file__).parent
app = typer.Typer(
    name="python -m experiments",
    help="Trains the runs that test the paper's claims, one record each, and writes the results page from the records.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

QueueOption = Annotated[Path, typer.Option("--queue", metavar="YAML", help="The queue of runs.")]
RecordsOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Records; default: beside the queue.")]
RunsOption = Annotated[Path, typer.Option(metavar="DIR", help="Run folders and logs.")]
DataOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Prepared main corpus; default: the queue's.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
CommitOption = Annotated[str | None, typer.Option(metavar="NAME", help="Commit to name in records, without git.")]
SeedsOption = Annotated[str, typer.Option(metavar="0,1,…", help="These seeds instead of the queue's.")]
JobsOption = Annotated[int, typer.Option(min=1, max=64, help="Runs that share the device.")]
MinutesOption = Annotated[float | None, typer.Option(min=0.01, help="Start only runs that end within this time.")]
JsonOption = Annotated[Path | None, typer.Option(metavar="PATH", help="Write the listed runs as JSON.")]
QUEUE, RUNS = HERE / "queue.yaml", Path("runs/experiments")


@dataclass(frozen=True)
class Place:
    """The queue and its corpora, the records and the run folders of a command."""

    path: Path
    queue: Queue
    records: Path
    corpora: Mapping[str, Corpus]
    data: Path | None


def _place(queue: Path, records: Path | None, data: Path | None) -> Place:
    read = read_queue(queue)
    corpora = dict(read.corpora)
    if data is not None:
        corpora[""] = replace(read.main, folder=str(data), hash=_data_hash(data, read))
    return Place(queue, read, records or queue.parent / "records", corpora, data)


@app.command("list")
def list_runs(
    claim: Annotated[str | None, typer.Argument(help="Only the runs of this claim.")] = None,
    seeds: SeedsOption = "",
    queue: QueueOption = QUEUE,
    records: RecordsOption = None,
    data: DataOption = None,
    json: JsonOption = None,
) -> None:
    """Shows runs, their states and their results."""
    place = _place(queue, records, data)
    if seeds and claim is None:
        raise InputError("--seeds needs a claim: the queue has its own seeds")
    chosen = place.queue.of_claim(claim, _numbers(seeds)) if claim else list(place.queue.experiments)
    _show(place, chosen, json)


@app.command("next")
def next_runs(
    minutes: MinutesOption = None,
    jobs: JobsOption = 1,
    device: DeviceOption = "cpu",
    queue: QueueOption = QUEUE,
    records: RecordsOption = None,
    runs: RunsOption = RUNS,
    data: DataOption = None,
    commit: CommitOption = None,
    json: JsonOption = None,
) -> None:
    """Trains the next runs of the whole queue, in its order."""
    place = _place(queue, records, data)
    _train(place, list(place.queue.experiments), minutes, jobs, device, runs, commit, json)


@app.command()
def claim(
    name: Annotated[str, typer.Argument(help="A claim of the queue.")],
    seeds: SeedsOption = "",
    minutes: MinutesOption = None,
    jobs: JobsOption = 1,
    device: DeviceOption = "cpu",
    queue: QueueOption = QUEUE,
    records: RecordsOption = None,
    runs: RunsOption = RUNS,
    data: DataOption = None,
    commit: CommitOption = None,
    json: JsonOption = None,
) -> None:
    """Trains the runs of one claim."""
    place = _place(queue, records, data)
    _train(place, place.queue.of_claim(name, _numbers(seeds)), minutes, jobs, device, runs, commit, json)


@app.command()
def run(
    label: Annotated[str, typer.Argument(help="The run's label, as list --json writes it.")],
    seeds: SeedsOption = "",
    device: DeviceOption = "cpu",
    queue: QueueOption = QUEUE,
    records: RecordsOption = None,
    runs: RunsOption = RUNS,
    data: DataOption = None,
    commit: CommitOption = None,
    beside: Annotated[int, typer.Option(min=0, hidden=True)] = 0,
) -> None:
    """Trains one run in this process and writes its record, with what any claim measures on it."""
    from benchmarks.record import commit_of
    from experiments.measures import TIMED, measuring
    from experiments.records import carry_out

    place = _place(queue, records, data)
    experiment = _by_label(place.queue, label, _numbers(seeds))
    names = [name for name in place.queue.measures_of(experiment) if name not in TIMED or not beside]
    corpus = place.corpora[experiment.corpus]
    written = carry_out(
        experiment,
        data=None if corpus.folder is None else Path(corpus.folder),
        corpus=corpus,
        runs=runs,
        records=place.records,
        device=device,
        commit=commit_of(commit, required=True, paths=("src", "experiments")),
        beside=beside,
        measure=measuring(names, device=device, dtype=experiment.resolved().train.dtype),
    )
    console.print(line("record in ", (written, "bold")), soft_wrap=True)


@app.command()
def results(queue: QueueOption = QUEUE) -> None:
    """Writes docs/results.md, its tables and figures and README's table from the records."""
    from experiments import results as pages
    from experiments.records import read_records

    pages.write(read_queue(queue), read_records(queue.parent / "records"), queue.parent)


@app.command()
def corpus(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for corpus-NN.jsonl.xz.")],
    wheels: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for downloaded wheels; default: OUT/wheels.")
    ] = None,
) -> None:
    """Builds the open corpus from the wheels in experiments/corpus.lock; every sha256 is checked."""
    from experiments.corpus import build

    build(out, wheels=wheels)


# --- training -------------------------------------------------------------------------------------------------------


def _train(
    place: Place,
    chosen: Sequence[Experiment],
    minutes: float | None,
    jobs: int,
    device: str,
    runs: Path,
    commit: str | None,
    json: Path | None,
) -> None:
    """Trains those of the ``chosen`` runs that have no record, shows all of them, and exits with the exit code."""
    from benchmarks.record import commit_of
    from experiments.measures import TIMED
    from experiments.runner import Setup, work_through

    commit = commit_of(commit, required=True, paths=("src", "experiments"))
    setup = Setup(place.path, place.corpora, runs, place.records, device, commit, place.data)
    chosen = _prepared(chosen, place.corpora)
    if jobs > 1:
        alone = [each for each in chosen if set(each.measures) & set(TIMED)]
        if alone:
            console.print(f"{len(alone)} runs that time the device are left out: start them with --jobs 1")
        chosen = [each for each in chosen if each not in alone]
    code = work_through(place.queue, chosen, setup, minutes=minutes, jobs=jobs)
    _show(place, chosen, json)
    raise typer.Exit(code)


def _prepared(chosen: Sequence[Experiment], corpora: Mapping[str, Corpus]) -> list[Experiment]:
    """Returns the runs whose corpus is prepared; prints how to prepare the others."""
    missing = {
        name
        for name, corpus in corpora.items()
        if corpus.folder is not None and not (Path(corpus.folder) / "manifest.json").is_file()
    }
    for name in sorted(missing):
        if count := sum(each.corpus == name for each in chosen):
            text = f"{count} runs are left out until their text is prepared: {corpora[name].prepare}"
            console.print(text, soft_wrap=True)
    return [each for each in chosen if each.corpus not in missing]


def _data_hash(folder: Path, queue: Queue) -> str:
    """Returns the hash of the prepared data in ``folder``; prints a notice if the queue's is another."""
    from adaponder.data import Shards

    if not (folder / "manifest.json").is_file():
        raise InputError(f"--data {folder}: no prepared data is there; prepare it with: {queue.main.prepare}")
    # Each run verifies every byte when it opens the data.
    data_hash = Shards.open(folder, "train", verify=False).content_hash()
    if data_hash != queue.data_hash:
        console.print(
            line(("other data:", "yellow"), f" {folder} has hash {data_hash}, the queue's records {queue.data_hash};"),
            line("records of this data stand apart"),
            soft_wrap=True,
        )
    return data_hash


def _by_label(queue: Queue, label: str, seeds: Sequence[int]) -> Experiment:
    """Returns the run of that label, with the queue's seeds or with ``seeds``."""
    every = [each for name in queue.claims for each in [*queue.of_claim(name), *queue.of_claim(name, seeds)]]
    match = next((each for each in every if each.label == label), None)
    if match is None:
        raise InputError(f"{label}: no such run in the queue; python -m experiments list --json PATH writes the labels")
    return match


def _numbers(text: str) -> list[int]:
    if not all(part.strip().isdigit() for part in text.split(",") if text):
        raise InputError(f"--seeds {text} must be numbers separated by commas, such as 0,1,2")
    return [int(part) for part in text.split(",") if text]


# --- showing --------------------------------------------------------------------------------------------------------


def _show(place: Place, chosen: Sequence[Experiment], json: Path | None) -> None:
    """Prints one table per claim: its runs, whether each is done, and its loss and depth."""
    from experiments.records import read_records, record_of, result

    known, entries = read_records(place.records), []
    for name in dict.fromkeys(each.claim for each in chosen):
        rows = []
        for each in (each for each in chosen if each.claim == name):
            record = record_of(each, known, place.corpora[each.corpus])
            entry: dict[str, Any] = {"claim": name, "recipe": each.recipe, "set": list(each.changes)}
            entry |= {"seed": each.seed, "label": each.label, "state": "waiting" if record is None else "done"}
            figures = ("—", "—", "—")
            if record is not None:
                last = result(record)
                entry |= {"record": record["file"]} | dict(last)
                loss, depth = f"{last['validation_loss']:.4f}", f"{last['validation_depth']:.2f}"
                figures = (f"{record['embedding_scale']:.4g}", loss, depth)
            entries.append(entry)
            # One column describes the run, so that a narrow terminal keeps its settings beside its figures.
            words = [each.recipe, *(change.partition(".")[2] for change in each.changes)]
            words += [f"from {each.source.setting}"] if each.source else []
            words += [f"on {each.corpus}"] if each.corpus else []
            rows.append((" ".join(words), str(each.seed), *figures, entry["state"]))
        columns = ("run", "seed", "emb. scale", "loss", "depth", "state")
        console.print(table(f"\n{name}: {place.queue.claims[name]}", columns, rows))
    write_json(json, {"data": place.corpora[""].hash, "runs": entries})


def main() -> None:
    """Runs a command; exit codes are 0 (done), 1 (failed), 2 (wrong use), 130 (interrupted)."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except AdaPonderError as error:
        errors.print(line(("error:", "bold red"), " ", " ".join(str(error).split())), soft_wrap=True)
        sys.exit(2 if isinstance(error, (InputError, ConfigError)) else 1)


if __name__ == "__main__":
    main()
