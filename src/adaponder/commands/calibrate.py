"""adaponder calibrate: finds thresholds for a mean depth, measures them on held-out text, and stores them by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands import shared
from adaponder.commands.policies import bar_of_scorings, described, halved, load_result, setting_of, write_rows
from adaponder.commands.shared import arg, opt
from adaponder.errors import InputError
from adaponder.terminal import console, line, number, progress_bars, spread, table, write_json
from adaponder.version import __version__

if TYPE_CHECKING:
    from adaponder.evaluation.lab.lab import Calibration, Measurement

RESULT = "frontier.json"
RULES = ("gate", "uniform", "geometric", "entropy", "kl", "change", "confidence", "similarity", "random")


@shared.command
def calibrate(
    checkpoint: Annotated[str, arg("A checkpoint; or a frontier.json, to draw its figure again.", "CKPT")],
    *,
    data: Annotated[str | None, opt("The text, as for eval: one half to tune on, one to measure.", "TEXT")] = None,
    budget: Annotated[float | None, opt("The mean depth to reach.", "X", min=1)] = None,
    name: Annotated[str | None, opt("Name of the profile; default budget-N.", "PROFILE")] = None,
    rule: Annotated[
        str, opt(f"The policy to calibrate: {', '.join(RULES)}.", "NAME", check=shared.one_of(*RULES))
    ] = "gate",
    frontier: Annotated[bool, opt("Measure the loss at every budget from 1 to K.", flag="--frontier")] = False,
    step: Annotated[float, opt("Step between the frontier's budgets.", "X", check=shared.within("(0, inf)"))] = 0.25,
    replace: Annotated[bool, opt("Replace a stored profile of the same name.", flag="--replace")] = False,
    out: Annotated[Path | None, shared.folder("Where to write the frontier's table and figure.")] = None,
    listed: Annotated[bool, opt("List the stored profiles.", flag="--list")] = False,
    json: shared.Json = None,
    reading: shared.Reading,
    opening: shared.Opening,
) -> Any:
    """Find thresholds for a mean depth, measure them on held-out text, and store them as a profile.

    [dim]adaponder calibrate runs/demo --budget 3.2 --data data/stdlib-train-bpe-2048[/]
    [dim]adaponder generate runs/demo --prompt "def " --profile budget-3.2[/]
    """
    if listed:
        return list_profiles(checkpoint, json=json)
    if checkpoint.endswith(".json"):
        shared.refuse(checkpoint, data=data, budget=budget, frontier=frontier, max_tokens=reading.max_tokens)
        return draw(load_result(Path(checkpoint), "calibrate", "rows"), out or Path(checkpoint).parent)
    if data is None:
        raise InputError("--data is needed: the text on which to calibrate")
    if budget is None and not frontier:
        raise InputError("--budget is needed, the mean depth to reach, as in --budget 3.2; or --frontier")
    if name is not None and budget is None:
        raise InputError("--name needs --budget: a profile is stored for a budget")
    if not frontier:
        shared.refuse("--budget without --frontier", out=out)
    elif rule != "gate":
        raise InputError(f"--rule {rule}: the frontier is the learned gate's; leave --rule or --frontier out")
    from adaponder.evaluation.lab import lab as calibration
    from adaponder.evaluation.lab import profiles
    from adaponder.evaluation.lab.lab import Lab, check_budget, require_halting
    from adaponder.evaluation.scoring import fingerprint
    from adaponder.journal import FOLDER, Journal, resuming

    if budget is not None:
        calibration.check_rule(rule, budget)
    subject = shared.open_subject(checkpoint, opening)
    require_halting(subject.model)
    iterations = subject.model.config.iterations
    budgets = calibration.budgets_between(iterations, step) if frontier else []
    exists = False
    if budget is not None:
        check_budget(budget, iterations, "--budget")
        name = name or f"{'budget' if rule == 'gate' else rule}-{budget:g}"
        profiles.check_name(name)
        exists = name in profiles.stored(subject.folder)  # also raises if the stored profiles are damaged
    text, halves, result = halved(subject, data, reading)
    result["command"] = "calibrate"
    console.print(described(result))
    journal = None
    if out is not None:
        settings = {"step": step, "batch size": reading.batch_size}
        journal = Journal(out / FOLDER, result | settings | {"weights and text": fingerprint(subject.model, text)})
    resumed = journal is not None and len(journal)  # the interrupted call has stored the profile
    if exists and not replace and not resumed:
        raise InputError(f"--name {name}: a profile with that name exists; choose another name, or use --replace")
    with resuming(journal, "row") if frontier else nullcontext(), progress_bars() as progress:
        show_bar = bar_of_scorings(progress)
        lab = Lab(subject.model, halves, batch_size=reading.batch_size, seed=reading.seed, show=show_bar)
        if budget is not None and name is not None:
            thresholds = calibration.calibrate(lab, budget, rule=rule)
            result |= {"rule": rule, "name": name, "calibration": thresholds.as_dict()}
            show(thresholds)
            path = profiles.store(subject.folder, name, profile(thresholds, result))
            console.print(line("\nStored as ", (name, "bold"), f" in {path}; use it with --profile {name}"))
        if frontier:
            measurements = calibration.frontier(lab, budgets, journal=journal)
            rows = list(progress.track(measurements, len(budgets) + iterations, description="rows"))
            result["rows"] = [row.as_dict() for row in rows]
            show_frontier(rows)
    write_json(json, result)
    if name is not None:
        console.print_next("generate", checkpoint, "--interactive", "--profile", name)
    if out is not None and journal is not None:
        write_rows(result, out / RESULT)
        draw(result, out)
        journal.remove()
    return result


def profile(calibration: Calibration, result: dict[str, Any]) -> dict[str, Any]:
    """Returns the profile to store: the policy, its measurements, and the text and settings used."""
    row = calibration.chosen.as_dict()
    measured = ("depth", "depth_interval", "tuning_depth", "loss", "loss_interval", "mflops")
    how = ("rule", "data", "split", "windows", "halves", "tuning", "held_out", "intervals", "dtype", "seed")
    about = {"policy": row["spec"], "budget": calibration.budget} | {key: row[key] for key in measured}
    about |= {key: result[key] for key in how}
    return about | {"made": datetime.now(UTC).isoformat(timespec="seconds"), "version": __version__}


HELD_OUT = ("depth held out", "95 % of depth", "loss held out", "95 % of loss", "MFLOP/token")


def show(calibration: Calibration) -> None:
    """Prints the measurements of each tuned policy on both halves, and how far the chosen one is from the budget."""
    rows = []
    for choice in calibration.choices:
        row = choice.row
        label = f"{row.policy} (chosen)" if choice.chosen else row.policy
        tuning = (number(row.tuning_depth, ".3f"), number(choice.tuning_loss, ".4f"))
        rows.append((label, row.setting, *tuning, *_held_out(row)))
    columns = ("", "setting", "tuning depth", "tuning loss", *HELD_OUT)
    console.print(table(f"\nMean depth {calibration.budget:g}", columns, rows))
    if len(calibration.choices) > 1:
        console.print("A tau per iteration is chosen if its tuning loss is significantly below one tau's.", style="dim")
    chosen = calibration.chosen
    assert chosen.depth is not None  # calibrate measured it
    off = chosen.depth - calibration.budget
    console.print(f"\nOn text not used to calibrate: depth {chosen.depth:.3f}, {off:+.3f} off")
    if abs(off) > 0.05:
        advice = " more than 0.05 off: calibrate on more text, or on text like the one to be read"
        console.print(line(("warning:", "bold yellow"), advice))


def show_frontier(rows: Sequence[Measurement]) -> None:
    """Prints one line per row: budget, policy, setting, and measurements on held-out text."""
    cells = [(number(row.budget, "g"), row.policy, setting_of(row), *_held_out(row)) for row in rows]
    console.print(table("\nThe frontier, held out", ("budget", "policy", "setting", *HELD_OUT), cells))


def _held_out(row: Measurement) -> tuple[str, ...]:
    """Returns the cells of the columns :data:`HELD_OUT`: depth and loss with their 95 % intervals, and cost."""
    depth, loss = number(row.depth, ",.3f"), number(row.loss, ",.4f")
    return depth, spread(row.depth_interval), loss, spread(row.loss_interval), number(row.mflops, ",.2f")


def draw(result: dict[str, Any], out: Path) -> list[Path]:
    """Draws the frontier; returns the files written."""
    from adaponder.analysis import policies_figure as figures
    from adaponder.analysis.style import save as save_figure

    drawn = save_figure(figures.frontier(result["rows"]), out / "frontier")
    console.print(line("\nThe frontier is in ", (out, "bold")))
    return list(drawn)


def list_profiles(checkpoint: str, *, json: Path | None = None) -> dict[str, Any]:
    """Prints and returns the profiles of a checkpoint by name, without opening the model."""
    from adaponder.checkpoints.loading import fetch
    from adaponder.evaluation.lab import profiles

    stored = profiles.stored(fetch(checkpoint))
    rows = []
    for name, about in stored.items():
        # Numbers of a policy are shown with four significant digits.
        policy = re.sub(r"\d+\.[\d.e-]+", lambda match: f"{float(match.group()):.4g}", about["policy"])
        depth = (number(about["depth"], ".3f"), spread(about["depth_interval"]))
        rows.append((name, f"{about['budget']:g}", policy, *depth, Path(about["data"]).name))
    if rows:
        head = ("profile", "budget", "policy", "depth", "95 % of depth", "text")
        console.print(table(f"Profiles of {checkpoint}, depth on held-out text", head, rows))
    else:
        console.print(f"{checkpoint} has no profiles; adaponder calibrate stores them")
    write_json(json, {"checkpoint": checkpoint, "profiles": stored})
    return stored
