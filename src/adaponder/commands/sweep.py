"""adaponder sweep: trains a recipe with several settings, and compares the runs in one table and one figure.

Each run has its own folder. Running the command again resumes unfinished runs; if there are none, it only shows and
draws the results.
"""

from __future__ import annotations

import dataclasses
import json as jsonlib
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from adaponder.commands.shared import Device, Json, Overrides, RecipeName, folder, listed, opt
from adaponder.devices import hardware_name
from adaponder.errors import InputError
from adaponder.terminal import console, line, number, table, write_json
from adaponder.version import __version__

if TYPE_CHECKING:
    from adaponder.analysis.sensitivity import Point
    from adaponder.training.sweep import PlannedRun, RunSummary


class SweepEnd(NamedTuple):
    """The content of sweep.json, and the exit code: 130 if runs are unfinished, else 1 if any failed, else 0."""

    result: dict[str, Any]
    exit_code: int


def sweep(
    recipe: RecipeName,
    *,
    grid: Annotated[list[str] | None, opt("A field and the values to try; may be repeated.", "a.b=x,y,…")] = None,
    one_at_a_time: Annotated[
        bool, opt("Vary each axis around the recipe's own value.", flag="--one-at-a-time")
    ] = False,
    overrides: Overrides = None,
    seeds: Annotated[str | None, opt("Train every run with each seed.", "0,1,…")] = None,
    out: Annotated[Path | None, folder("Where to write a folder per run; default runs/NAME-sweep.")] = None,
    dry_run: Annotated[bool, opt("Show the runs and their commands; train nothing.", flag="--dry-run")] = False,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Train the unfinished runs of a grid of recipes; then print one table and draw one figure of all runs.

    [dim]adaponder sweep cpu/demo --grid train.ponder_weight=0,0.1,0.2 --grid train.k_max=0.1,0.2 --one-at-a-time[/]
    """
    arguments: dict[str, Any] = dict(locals()) | {"seeds": listed("--seeds", seeds, int, "[0, inf)")}
    raise typer.Exit(run_sweep(**arguments).exit_code)


def run_sweep(
    recipe: str,
    grid: Sequence[str] | None = None,
    *,
    one_at_a_time: bool = False,
    overrides: Sequence[str] | None = None,
    seeds: Sequence[int] = (),
    out: Path | None = None,
    dry_run: bool = False,
    device: str = "cpu",
    json: Path | None = None,
    quiet: bool = False,
) -> SweepEnd:
    """Trains the unfinished runs of a sweep, without progress bars if ``quiet``; then shows and saves all results."""
    from adaponder.training.build import config_of
    from adaponder.training.sweep import FAILED, PENDING, STOPPED, carry_out, examine, pending, plan

    name, overrides = recipe, overrides or ()
    folder = out or Path("runs") / f"{name.removesuffix('.yaml').strip('./').replace('/', '-')}-sweep"
    runs = plan(name, grid or (), overrides=overrides, one_at_a_time=one_at_a_time, seeds=seeds, out=folder)
    settings: dict[str, Any] = {"recipe": name, "overrides": list(overrides), "one_at_a_time": one_at_a_time}
    if dry_run:
        summaries = [pending(run, config_of(run.recipe)) for run in runs]
        show_plan(name, runs, summaries, folder, device)
        result = settings | {"runs": [dataclasses.asdict(summary) for summary in summaries]}
        write_json(json, result)
        return SweepEnd(result, 0)
    _create(folder, default=out is None)
    with console.status("checking every run, and preparing data if needed"):
        summaries = examine(runs, out=folder, device=device)
    versions = {"adaponder": __version__} | {name: version(name) for name in ("torch", "transformers")}
    settings |= {"device": hardware_name(device), "versions": versions}
    todo = sum(summary.status == PENDING for summary in summaries)
    console.print(line(f"{len(runs)} runs in ", (folder, "bold"), f": {len(runs) - todo} done before, {todo} to do"))
    result = _write(settings, summaries, folder)

    def starting(index: int, summary: RunSummary, seconds: float | None) -> None:
        step = f", from step {summary.step}" if summary.step else ""
        eta = f"; about {_duration(seconds)} for all remaining runs" if seconds is not None else ""
        console.rule(f"run {index + 1} of {len(runs)}: {summary.name}{step}{eta}", align="left")

    for index, summary in carry_out(runs, summaries, out=folder, device=device, quiet=quiet, starting=starting):
        summaries[index] = summary
        console.print(_ended(summary), soft_wrap=True)
        result = _write(settings, summaries, folder)
    show(name, summaries)
    draw(result, folder)
    write_json(json, result)
    unfinished = sum(summary.status in (STOPPED, PENDING) for summary in summaries)
    if unfinished:
        console.print(f"stopped with {unfinished} of {len(runs)} runs to do; run the same command to resume")
    failed = any(summary.status == FAILED for summary in summaries)
    return SweepEnd(result, 130 if unfinished else 1 if failed else 0)


def _create(folder: Path, *, default: bool) -> None:
    """Creates ``folder``; raises if it was given as ``--out`` (``default`` is false) and its parent does not exist."""
    if not default and not folder.parent.is_dir():
        problem = "is a file, not a folder" if folder.parent.exists() else "does not exist"
        raise InputError(f"--out {folder}: {folder.parent} {problem}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be written to: {error}") from error


def show_plan(
    name: str, runs: Sequence[PlannedRun], summaries: Sequence[RunSummary], folder: Path, device: str
) -> None:
    """Prints the runs and, for each run, the command that trains it in its folder, on this or another machine."""
    rows = [(r.name, r.seed, r.steps, number(r.requested_depth, ".2f"), r.fingerprint) for r in summaries]
    console.print(table(f"{len(runs)} runs of {name}", ("run", "seed", "steps", "requested depth", "recipe"), rows))
    console.print_whole(f"\nmkdir -p {shlex.quote(str(folder))}")
    for run in runs:
        sets = [word for override in run.overrides for word in ("--set", override)]
        words = ["adaponder", "train", name, *sets, "--out", str(folder / run.name), "--resume", "auto"]
        console.print_whole(shlex.join([*words, "--device", device]))


def show(name: str, summaries: Sequence[RunSummary]) -> None:
    """Prints a table with one line per setting (the mean over its seeds), and the errors of failed runs."""
    from adaponder.analysis.sensitivity import points
    from adaponder.training.sweep import FAILED

    averaged = points([dataclasses.asdict(summary) for summary in summaries])
    axes = list(averaged[0].fields)
    # A heading is the last component of the field's name, or the whole name if two axes end alike.
    short = [axis.rpartition(".")[2] for axis in axes]
    heads = [name if short.count(name) == 1 else axis for axis, name in zip(axes, short, strict=True)] or ["recipe"]
    columns = (*heads, "emb. scale", "loss", "requested", "realised", "halted", "tok/s", "runs")
    console.print(table(f"\nSweep of {name} (validation)", columns, [_cells(point, name) for point in averaged]))
    for summary in summaries:
        if summary.status == FAILED:
            console.print(f"{summary.name} failed: {summary.error}", soft_wrap=True)


def _cells(point: Point, name: str) -> tuple[str, ...]:
    """Returns one line of the table of :func:`show`."""
    from adaponder.analysis.sensitivity import text_of

    values = [text_of(value) for value in point.fields.values()] or [name]
    return (
        *values,
        number(point.embedding_scale, ".4g"),
        "—" if point.loss is None else f"{point.loss:.4f}",
        number(point.requested, ".2f"),
        "—" if point.depth is None else f"{point.depth:.2f}",
        "—" if point.halted is None else "/".join(f"{share:.0%}" for share in point.halted),
        number(point.tokens_per_second, ",.0f"),
        f"{point.loss.count if point.loss else 0} of {point.runs}",
    )


def _ended(summary: RunSummary) -> str:
    """Returns the line to print when a run has ended."""
    from adaponder.training.sweep import FAILED, FINISHED

    if summary.status == FAILED:
        return f"failed: {summary.error}"
    if summary.status == FINISHED:
        loss, depth = number(summary.validation_loss, ".4f"), number(summary.validation_depth, ".2f")
        return f"validation loss {loss} at mean depth {depth}"
    return f"stopped at step {summary.step} of {summary.steps}"


def _duration(seconds: float) -> str:
    """Formats a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _write(settings: dict[str, Any], summaries: Sequence[RunSummary], folder: Path) -> dict[str, Any]:
    """Writes sweep.json and sweep.csv, each atomically, and returns the content of sweep.json."""
    from adaponder.analysis.sensitivity import points
    from adaponder.files import write_whole

    runs = [dataclasses.asdict(summary) for summary in summaries]
    averages = []
    for point in points(runs):
        spreads = {"loss": point.loss, "depth": point.depth}
        averages.append(
            dataclasses.asdict(point) | {name: value and value._asdict() for name, value in spreads.items()}
        )
    result = settings | {"runs": runs, "points": averages}
    write_whole(folder / "sweep.json", (jsonlib.dumps(result, indent=2, allow_nan=False) + "\n").encode())
    write_whole(folder / "sweep.csv", as_csv(runs).encode())
    return result


def as_csv(runs: Sequence[dict[str, Any]]) -> str:
    """Returns CSV with one line per run and a column for each varied setting and each iteration's halted share."""
    import pandas as pd

    lines = []
    for run in runs:
        others = {key: value for key, value in run.items() if key not in ("name", "fields", "validation_halted")}
        shares = {f"validation_halted_{gate}": share for gate, share in enumerate(run["validation_halted"] or [], 1)}
        lines.append({"name": run["name"]} | run["fields"] | others | shares)
    return pd.DataFrame(lines, dtype=object).to_csv(index=False)


def draw(result: dict[str, Any], folder: Path) -> None:
    """Saves the sensitivity figure of the finished runs in ``folder``, as PNG and SVG."""
    from adaponder.analysis.sensitivity import sensitivity
    from adaponder.analysis.style import save
    from adaponder.training.sweep import FINISHED

    if not any(run["status"] == FINISHED for run in result["runs"]):
        console.print("no run has finished yet: no figure")
        return
    png, svg = save(sensitivity(result["runs"]), folder / "sensitivity")
    console.print(line("→ ", (folder / "sweep.json", "bold"), f", sweep.csv, {png.name}, {svg.name}"), soft_wrap=True)
