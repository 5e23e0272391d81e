"""adaponder calibrate: finds thresholds for a mean depth, measures them on other text and stores them by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands import shared
from adaponder.commands.policies import about, described, load_result, watching
from adaponder.commands.shared import arg, opt
from adaponder.errors import InputError
from adaponder.terminal import console, line, table, write_json
from adaponder.version import __version__

if TYPE_CHECKING:
    from adaponder.evaluation.lab.calibration import Calibration
    from adaponder.evaluation.lab.lab import Measurement
    from adaponder.evaluation.summary import Interval

RESULT = "frontier.json"
RULES = ("gate", "uniform", "geometric", "entropy", "kl", "change", "confidence", "similarity", "random")


def calibrate(
    checkpoint: Annotated[str, arg("A checkpoint; or a frontier.json, to draw its figure again.", "CKPT")],
    *,
    data: Annotated[str | None, opt("As for eval: one half finds the thresholds, the other tests.", "TEXT")] = None,
    budget: Annotated[float | None, opt("The mean depth to reach.", "X", min=1)] = None,
    name: Annotated[str | None, opt("Of the profile; default budget-N.", "NAME")] = None,
    rule: Annotated[
        str, opt(f"What is thresholded: {', '.join(RULES)}.", "NAME", check=shared.one_of(*RULES))
    ] = "gate",
    frontier: Annotated[bool, opt("Loss at every budget from 1 to K.", flag="--frontier")] = False,
    step: Annotated[float, opt("Step between the frontier's budgets.", "X", check=shared.above_zero())] = 0.25,
    replace: Annotated[bool, opt("Replace a profile of the same name.", flag="--replace")] = False,
    out: Annotated[
        Path | None, opt("Table and figure of the frontier go here.", "DIR", check=shared.output_folder)
    ] = None,
    listed: Annotated[bool, opt("List the stored profiles.", flag="--list")] = False,
    json: shared.Json = None,
    split: shared.Split = "validation",
    window: shared.Window = None,
    stride: shared.Stride = None,
    across_documents: shared.AcrossDocuments = True,
    max_tokens: shared.MaxTokens = None,
    batch_size: shared.BatchSize = 8,
    tokenizer: shared.Tokenizer = None,
    seed: shared.Seed = 0,
    device: shared.Device = "cpu",
    dtype: shared.Dtype = "auto",
) -> Any:
    """The budget dial: find thresholds for a mean depth, verify them, and store them as a profile.

    [dim]adaponder calibrate runs/demo --budget 3.2 --data data/stdlib-train-bpe-2048[/]

    [dim]adaponder generate runs/demo --prompt "def " --profile budget-3.2[/]
    """
    if listed:
        return list_profiles(checkpoint, json=json)
    if checkpoint.endswith(".json"):
        shared.refuse(checkpoint, data=data, budget=budget, frontier=frontier, max_tokens=max_tokens)
        return redraw(Path(checkpoint), out=out or Path(checkpoint).parent)
    if data is None:
        raise InputError("--data is needed: the text on which to calibrate")
    if budget is None and not frontier:
        raise InputError("--budget is needed, the mean depth to reach, as in --budget 3.2; or --frontier")
    if name is not None and budget is None:
        raise InputError("--name: a profile is made for a --budget")
    if not frontier:
        shared.refuse("--budget without --frontier", out=out)
    elif rule != "gate":
        raise InputError(f"--rule {rule}: the frontier is the learned gate's; leave --rule or --frontier out")
    if out is not None and out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file, not a folder")
    from adaponder.evaluation.lab import profiles
    from adaponder.evaluation.lab.calibration import budgets_between, check_rule
    from adaponder.evaluation.lab.calibration import calibrate as find_thresholds
    from adaponder.evaluation.lab.calibration import frontier as frontier_rows
    from adaponder.evaluation.lab.halves import halve
    from adaponder.evaluation.lab.lab import Lab, check_budget, require_halting
    from adaponder.evaluation.scoring import fingerprint
    from adaponder.journal import FOLDER, Journal, resuming

    if budget is not None:
        check_rule(rule, budget)
    subject = shared.open_subject(checkpoint, tokenizer=tokenizer, dtype=dtype, device=device)
    require_halting(subject.model)
    iterations, exists = subject.model.config.iterations, False
    steps = budgets_between(iterations, step) if frontier else []
    if budget is not None:
        check_budget(budget, iterations, "--budget")
        name = name or f"{'budget' if rule == 'gate' else rule}-{budget:g}"
        profiles.check_name(name)
        exists = name in profiles.stored(subject.folder)  # a file that cannot be added to is refused before the work
    text = subject.text(data, split=split, max_tokens=max_tokens)
    windows = subject.windows(window, stride, across_documents)
    halves = halve(text, windows)
    result = about(subject, halves, data=data, split=split, windows=str(windows), seed=seed)
    result["command"] = "calibrate"
    console.print(described(result))
    journal = None
    if frontier and out is not None:
        settings = {"step": step, "batch size": batch_size, "weights and text": fingerprint(subject.model, text)}
        journal = Journal(out / FOLDER, result | settings)
    resumed = journal is not None and len(journal)  # a resumed call has stored the profile itself
    if exists and not replace and not resumed:
        raise InputError(f"--name {name}: there is a profile of that name; choose another, or use --replace")
    rows = []
    with resuming(journal, "row") if frontier else nullcontext(), watching() as bars:
        bars.expect((budget is not None) + (len(steps) + iterations if frontier else 0))
        lab = Lab(subject.model, halves, batch_size=batch_size, seed=seed, show=bars.show)
        if budget is not None and name is not None:
            calibration = find_thresholds(lab, budget, rule=rule)
            result |= {"rule": rule, "name": name, "calibration": calibration.as_dict()}
            show(calibration)
            path = profiles.store(subject.folder, name, profile(calibration, result))
            console.print(line("\nStored as ", (name, "bold"), f" in {path}; use it with --profile {name}"))
            bars.done()
        for row in frontier_rows(lab, steps, journal=journal) if frontier else ():
            rows.append(row)
            bars.done()
    if rows:
        result |= {"rows": [row.as_dict() for row in rows]}
        show_frontier(rows)
    write_json(json, result)
    if out is not None and journal is not None:
        save(result, out)
        journal.remove()
    return result


def profile(calibration: Calibration, result: dict[str, Any]) -> dict[str, Any]:
    """The profile to store: the policy, what it measured on held-out text, and which text and settings were used."""
    row = calibration.chosen
    told = ("rule", "data", "split", "windows", "halves", "tuning", "held_out", "intervals", "dtype", "seed")
    return {
        "policy": row.spec,
        "budget": calibration.budget,
        "depth": row.depth,
        "depth_interval": row.depth_interval,
        "tuning_depth": row.tuning_depth,
        "loss": row.loss,
        "loss_interval": row.loss_interval,
        "mflops": row.mflops,
        **{key: result[key] for key in told},
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
    }


HEAD = (
    "",
    "setting",
    "depth there",
    "loss there",
    "depth held out",
    "95 % of depth",
    "loss held out",
    "95 % of loss",
    "MFLOP/token",
)


def show(calibration: Calibration) -> None:
    """Prints each choice on both halves of the text, and how far the chosen one is from the budget."""
    rows = []
    for choice in calibration.choices:
        row = choice.row
        label = f"{row.policy} (chosen)" if choice.chosen else row.policy
        there = (_number(row.tuning_depth, 3), _number(choice.tuning_loss, 4))
        rows.append((label, row.setting, *there, *_held_out(row)))
    console.print(table(f"\nMean depth {calibration.budget:g}", HEAD, rows))
    if len(calibration.choices) > 1:
        console.print("A tau per iteration is chosen where its loss there is told apart from one tau's.", style="dim")
    chosen = calibration.chosen
    assert chosen.depth is not None  # calibrate measured it
    off = chosen.depth - calibration.budget
    console.print(f"\nOn text not used to calibrate: depth {chosen.depth:.3f}, {off:+.3f} off")
    if abs(off) > 0.05:
        console.print(
            line(
                ("warning:", "bold yellow"),
                " more than 0.05 off: calibrate on more text, or on text like the one to be read",
            )
        )


def show_frontier(rows: Sequence[Measurement]) -> None:
    """Prints one line per row: its budget, rule and setting, and what it measured on held-out text."""
    cells = []
    for row in rows:
        budget = "–" if row.budget is None else f"{row.budget:g}"
        missed = "" if row.missed is None else f" missed: {row.missed}"
        cells.append((budget, row.policy, row.setting + missed, *_held_out(row)))
    console.print(table("\nThe frontier, held out", ("budget", "by", "setting", *HEAD[4:]), cells))


def _held_out(row: Measurement) -> tuple[str, ...]:
    """The cells of depth, loss and cost on held-out text, with their 95 % intervals."""
    depth, loss = _number(row.depth, 3), _number(row.loss, 4)
    return depth, _spread(row.depth_interval, 3), loss, _spread(row.loss_interval, 3), _number(row.mflops, 2)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _spread(interval: Interval | None, digits: int) -> str:
    return "" if interval is None else f"{interval.low:.{digits}f} … {interval.high:.{digits}f}"


def _short(spec: str) -> str:
    """A policy's text form with its numbers rounded to four significant digits."""
    return re.sub(r"\d+\.[\d.e-]+", lambda number: f"{float(number.group()):.4g}", spec)


def save(result: dict[str, Any], out: Path) -> None:
    """Writes the frontier to ``out`` as JSON, CSV and Parquet, and as a figure."""
    from adaponder.analysis.policies_figure import flat

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RESULT, result)
    frame = flat(result["rows"])
    frame.to_csv(out / "frontier.csv", index=False)
    frame.to_parquet(out / "frontier.parquet", index=False)
    draw(result, out)


def draw(result: dict[str, Any], out: Path) -> list[Path]:
    """Draws the frontier; returns the files of the figure."""
    from adaponder.analysis import policies_figure as figures
    from adaponder.analysis.style import save as save_figure

    drawn = [*save_figure(figures.frontier(result["rows"]), out / "frontier")]
    console.print(line("\nThe frontier is in ", (out, "bold")))
    return drawn


def redraw(result: Path, *, out: Path) -> list[Path]:
    """Draws the figure again from ``frontier.json``, without a model; returns its files."""
    frontier = load_result(result, "calibrate", "rows")
    out.mkdir(parents=True, exist_ok=True)
    return draw(frontier, out)


def list_profiles(checkpoint: str, *, json: Path | None = None) -> dict[str, Any]:
    """Prints and returns the profiles of a checkpoint, by name; no model is opened."""
    from adaponder.checkpoints.loading import fetch
    from adaponder.evaluation.lab import profiles
    from adaponder.evaluation.summary import Interval

    stored = profiles.stored(fetch(checkpoint))
    rows = [
        (
            name,
            f"{one['budget']:g}",
            _short(one["policy"]),
            _number(one["depth"], 3),
            _spread(None if one["depth_interval"] is None else Interval(*one["depth_interval"]), 3),
            Path(one["data"]).name,
        )
        for name, one in stored.items()
    ]
    head = ("profile", "budget", "policy", "depth", "95 % of depth", "text")
    if rows:
        console.print(table(f"Profiles of {checkpoint}, depth as held out", head, rows))
    else:
        console.print(f"{checkpoint} has no profiles; adaponder calibrate makes them")
    write_json(json, {"checkpoint": checkpoint, "profiles": stored})
    return stored
