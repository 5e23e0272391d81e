"""adaponder calibrate: finds thresholds for a mean depth, measures them on other text and stores them by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adaponder.checkpoints.loading import fetch
from adaponder.commands.options import CalibrateOptions
from adaponder.commands.policies import about, described, load_result, watching
from adaponder.commands.subject import open_subject
from adaponder.errors import InputError
from adaponder.evaluation.lab import profiles
from adaponder.evaluation.lab.calibration import Calibration, budgets_between, calibrate, check_rule
from adaponder.evaluation.lab.calibration import frontier as frontier_rows
from adaponder.evaluation.lab.halves import halve
from adaponder.evaluation.lab.lab import Lab, Measurement, check_budget, require_halting
from adaponder.evaluation.scoring import fingerprint
from adaponder.evaluation.summary import Interval
from adaponder.evaluation.text import Text
from adaponder.journal import FOLDER, Journal, resuming
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.terminal import console, line, table, write_json
from adaponder.version import __version__

RESULT = "frontier.json"


def run(options: CalibrateOptions) -> dict[str, Any]:
    """Stores thresholds for ``options.budget`` as a profile; with ``options.frontier``, measures every budget."""
    budget, name, rule = options.budget, options.name, options.rule
    data = _checked_data(options)
    subject = open_subject(options)
    require_halting(subject.model)
    most, there = subject.model.config.iterations, False
    steps = budgets_between(most, options.step) if options.frontier else []
    if budget is not None:
        check_budget(budget, most, "--budget")
        name = name or f"{'budget' if rule == 'gate' else rule}-{budget:g}"
        profiles.check_name(name)
        there = name in profiles.stored(subject.folder)  # what could not be added to is refused before the work
    text = subject.text(data, options)
    windows = subject.windows(options)
    halves = halve(text, windows)
    result = about(subject, halves, data=data, split=options.split, windows=str(windows), seed=options.seed)
    result["command"] = "calibrate"
    console.print(described(result))
    journal = _journal(options, result, subject.model, text)
    if (
        there and not options.replace and not (journal is not None and len(journal))
    ):  # one that goes on has stored it itself
        raise InputError(f"--name {name}: there is a profile of that name; choose another, or say --replace")
    rows = []
    with resuming(journal, "row") if options.frontier else nullcontext(), watching() as bars:
        bars.expect((budget is not None) + (len(steps) + most if options.frontier else 0))
        lab = Lab(subject.model, halves, batch_size=options.batch_size, seed=options.seed, show=bars.show)
        if budget is not None and name is not None:
            calibration = calibrate(lab, budget, rule=rule)
            result |= {"rule": rule, "name": name, "calibration": calibration.as_dict()}
            show(calibration)
            path = profiles.store(subject.folder, name, profile(calibration, result))
            console.print(line("\nStored as ", (name, "bold"), f" in {path}; use it with --profile {name}"))
            bars.done()
        for row in frontier_rows(lab, steps, journal=journal) if options.frontier else ():
            rows.append(row)
            bars.done()
    if rows:
        result |= {"rows": [row.as_dict() for row in rows]}
        show_frontier(rows)
    write_json(options.json, result)
    if options.out is not None and journal is not None:
        save(result, options.out)
        journal.remove()
    return result


def _journal(
    options: CalibrateOptions, result: dict[str, Any], model: AdaPonderForCausalLM, text: Text
) -> Journal | None:
    """The frontier's rows that an interrupted call of the same command has measured; ``None`` without ``--out``."""
    if not options.frontier or options.out is None:
        return None
    settings = {
        "step": options.step,
        "batch size": options.batch_size,
        "weights and text": fingerprint(model, text),
    }
    return Journal(options.out / FOLDER, result | settings)


def _checked_data(options: CalibrateOptions) -> str:
    """The text to calibrate on; raises where options are missing or contradict each other."""
    if options.data is None:
        raise InputError("--data: say on which text to calibrate")
    if options.budget is None and not options.frontier:
        raise InputError("--budget: say which mean depth is wanted, as in --budget 3.2, or ask for --frontier")
    if options.budget is not None:
        check_rule(options.rule, options.budget)
    if options.name is not None and options.budget is None:
        raise InputError("--name: a profile is made for a --budget")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out}: a file is in the way")
    return options.data


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
                " more than 0.05 off: calibrate on more text, or on text like that to come",
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
    folder = fetch(checkpoint)
    stored = profiles.stored(folder)
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
