"""adaponder policies: tunes every policy to the same mean depth on one half of a text, measures it on the other."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands import shared
from adaponder.commands.shared import arg, opt
from adaponder.errors import InputError
from adaponder.terminal import console, counted, line, progress_bars, table, write_json

if TYPE_CHECKING:
    from rich.progress import Progress

    from adaponder.evaluation.lab.halves import Halves
    from adaponder.evaluation.lab.lab import Measurement
    from adaponder.evaluation.text import Text

HEAD = ("policy", "causal", "tuned", "tuning depth", "depth held out", "loss", "to learned gate", "95 %", "MFLOP/token")
RESULT = "policies.json"


@shared.command
def policies(
    checkpoint: Annotated[str, arg("A checkpoint; or a policies.json, to draw its figures again.", "CKPT")],
    *,
    data: Annotated[str | None, opt("The text to compare on, as for eval.", "TEXT")] = None,
    budgets: Annotated[str | None, opt("Mean depths to compare at; default: the gate's own.", "1.5,2.5")] = None,
    rates: Annotated[str | None, opt("Rates of the geometric schedules; default 0.9,0.5.", "0.9,0.5")] = None,
    out: Annotated[Path | None, shared.folder("Where to write tables and figures.")] = None,
    json: shared.Json = None,
    reading: shared.Reading,
    opening: shared.Opening,
) -> Any:
    """Compare policies: tune each to the same mean depth on one half of a text, and measure it on the other half.

    If the command is interrupted, finished measurements stay in --out, and the same command resumes from them.

    [dim]adaponder policies runs/demo --data data/stdlib-train-bpe-2048 --budgets 2,3 --out lab/[/]
    """
    depths = shared.listed("--budgets", budgets, float)
    schedule_rates = shared.listed("--rates", rates, float, "(0, 1]")
    if checkpoint.endswith(".json"):
        shared.refuse(checkpoint, data=data, budgets=budgets, rates=rates, max_tokens=reading.max_tokens)
        return draw(load_result(Path(checkpoint), "policies", "rows", "budgets"), out or Path(checkpoint).parent)
    if data is None:
        raise InputError("--data is needed: the text on which to compare policies")
    from adaponder.evaluation.lab.lab import RATES, Lab, check_budget, require_halting
    from adaponder.evaluation.scoring import fingerprint
    from adaponder.journal import FOLDER, Journal, resuming

    subject = shared.open_subject(checkpoint, opening)
    require_halting(subject.model)
    schedule_rates = schedule_rates or RATES
    for budget in depths:
        check_budget(budget, subject.model.config.iterations, "--budgets")
    text, halves, origin = halved(subject, data, reading)
    journal = None
    if out is not None:
        settings = {"budgets": list(depths) or None, "rates": list(schedule_rates), "batch size": reading.batch_size}
        journal = Journal(out / FOLDER, origin | settings | {"weights and text": fingerprint(subject.model, text)})
    with resuming(journal, "row"), progress_bars() as progress:
        lab = Lab(
            subject.model, halves, batch_size=reading.batch_size, seed=reading.seed, show=bar_of_scorings(progress)
        )
        own_depth = lab.own_depth()
        measured_at = lab.budgets(depths, own_depth)
        rows = [lab.trained(own_depth)]
        count = len(measured_at) * len(lab.dials(schedule_rates))
        compared = lab.compare(measured_at, rates=schedule_rates, journal=journal)
        rows += progress.track(compared, count, description="rows")
    values = [row.as_dict() for row in rows]
    result = origin | {"command": "policies", "own_depth": own_depth, "budgets": list(measured_at), "rows": values}
    console.print(described(result))
    for budget in measured_at:
        console.print(budget_table(rows, budget))
    console.print(f"\n{FOOTNOTES}", style="dim")
    write_json(json, result)
    if out is not None and journal is not None:
        save(result, out)
        journal.remove()
    return result


def halved(subject: shared.Subject, data: str, reading: shared.Reading) -> tuple[Text, Halves, dict[str, Any]]:
    """Reads a text and splits it in halves; returns the text, the halves, and the facts about them for a result."""
    from adaponder.evaluation.lab.halves import halve
    from adaponder.evaluation.summary import FEW

    text, windows = reading.text(subject, data), reading.windows(subject)
    halves = halve(text, windows)
    count = len(halves.held_out.own_text.starts)
    intervals = f"95 %, {halves.drawn} resampled"
    if count < FEW:
        intervals = f"left out, {counted(count, halves.drawn.removesuffix('s'))} being too few to resample"
    facts = shared.facts_of(subject.name, subject.model) | reading.facts(data, windows)
    facts |= {"iterations": subject.model.config.iterations, "halves": halves.how, "intervals": intervals}
    for name, half in (("tuning", halves.tuning), ("held_out", halves.held_out)):
        facts[name] = {"tokens": half.tokens, "learned": half.learned, "documents": half.documents}
    return text, halves, facts


def bar_of_scorings(progress: Progress) -> Callable[[str, int], Callable[[int], None]]:
    """Adds a progress bar; returns show(title, total), which restarts it and returns a function that advances it."""
    task = progress.add_task("", total=None)

    def show(title: str, total: int) -> Callable[[int], None]:
        progress.reset(task, total=total, description=title)
        return lambda tokens: progress.advance(task, tokens)

    return show


def described(result: dict[str, Any]) -> str:
    """Returns the line above the tables: text, halves, windows and intervals."""
    sizes = []
    for half in ("tuning", "held_out"):
        tokens, learned = result[half]["tokens"], result[half]["learned"]
        sizes.append(counted(tokens, "token") + ("" if learned == tokens else f" ({learned:,} learned)"))
    how = f"{result['halves']}; {result['windows']}; intervals {result['intervals']}"
    return f"{result['data']}: tuned on {sizes[0]}, measured on {sizes[1]}; {how}"


FOOTNOTES = (
    "to learned gate: loss minus the learned gate's at the same budget, paired; * significant at 95 %. Held-out "
    "depths differ a little: compare both.\n"
    "ranked: the lowest gates of each window are pruned, as in section 5.2 of the paper. Not causal: looks at later "
    "tokens (the oracle at the target itself), cannot generate.\n"
    "KL, hidden-state change and similarity compare two iterations: every token is read at least twice.\n"
    "MFLOP/token counts the logits that entropy, KL and the top-two gap compute only to decide."
)


def budget_table(rows: Sequence[Measurement], budget: float) -> Any:
    """Returns the table of one budget; the first line is the policy as trained."""
    shown = [cells(row) for row in rows if row.budget in (None, budget)]
    return table(f"\nMean depth {budget:.3f}, tuned on one half and measured on the other", HEAD, shown)


def cells(row: Measurement) -> tuple[str, ...]:
    """Returns one line of the table: a cell for each column of :data:`HEAD`."""
    flag = "yes" if row.causal else "NO"
    if row.depth is None or row.loss is None or row.mflops is None:
        return (row.policy, flag, f"cannot: {row.missed}", "–", "–", "–", "–", "", "–")
    gap, interval = "", ""
    if row.difference is not None:
        gap = f"{row.difference.mean:+.4f}" + ("*" if row.difference.significant else " ")
        interval = "" if row.difference.interval is None else str(row.difference.interval)
    tuning_depth = "" if row.tuning_depth is None else f"{row.tuning_depth:.3f}"
    measured = (f"{row.depth:.3f}", f"{row.loss:.4f}", gap, interval, f"{row.mflops:,.2f}")
    return (row.policy, flag, setting_of(row), tuning_depth, *measured)


def setting_of(row: Measurement) -> str:
    """Returns the cell with a row's tuned setting and, if the budget was missed, the reason."""
    return row.setting + ("" if row.missed is None else f" missed: {row.missed}")


def save(result: dict[str, Any], out: Path) -> None:
    """Writes the result as JSON, CSV and Parquet, and its figures, into ``out``."""
    from adaponder.journal import on_interrupt

    write_rows(result, out / RESULT)
    path = shlex.quote(str(out / RESULT))
    with on_interrupt(f"the result is complete; adaponder policies {path} draws its figures"):
        draw(result, out)


def write_rows(result: dict[str, Any], path: Path) -> None:
    """Writes a result as JSON, and its rows as CSV and Parquet beside it."""
    from adaponder.analysis.policies_figure import flat

    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    frame = flat(result["rows"])
    frame.to_csv(path.with_suffix(".csv"), index=False)
    frame.to_parquet(path.with_suffix(".parquet"), index=False)


def draw(result: dict[str, Any], out: Path) -> list[Path]:
    """Draws every figure of a result into ``out``; returns the files written."""
    from adaponder.analysis import policies_figure as figures
    from adaponder.analysis.style import save as save_figure

    drawn = [*save_figure(figures.loss_against_compute(result["rows"]), out / "loss-against-compute")]
    for budget in result["budgets"]:
        suffix = "" if len(result["budgets"]) == 1 else f"-{budget:g}"
        drawn += save_figure(figures.differences(result["rows"], budget), out / f"policies{suffix}")
        drawn += save_figure(figures.keep_probability(result["rows"], budget), out / f"keep-probability{suffix}")
    console.print(line(f"\n{len(drawn) // 2} figures, each as PNG and SVG, are in ", (out, "bold")))
    return drawn


def load_result(path: Path, command: str, *needed: str) -> dict[str, Any]:
    """Returns the result that ``command`` wrote to ``path``; raises unless it has the ``needed`` keys."""
    from adaponder.files import read_json

    try:
        result = read_json(path, InputError)
    except InputError as error:
        raise InputError(f"{path} is not a result of adaponder {command} ({error})") from None
    if result.get("command") != command or any(key not in result for key in needed):
        raise InputError(f"{path} is not a result of adaponder {command}, with {' and '.join(needed)}")
    return result
