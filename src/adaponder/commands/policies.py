"""adaponder policies: every policy tuned to the same mean depth on one half of a text, and measured on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Group

from adaponder.commands import shared
from adaponder.commands.shared import arg, opt
from adaponder.errors import InputError
from adaponder.terminal import console, counted, line, progress_bars, table, write_json

if TYPE_CHECKING:
    from adaponder.evaluation.lab.halves import Half, Halves
    from adaponder.evaluation.lab.lab import Measurement

HEAD = ("policy", "causal", "tuned", "depth there", "depth held out", "loss", "to learned gate", "95 %", "MFLOP/token")
TUNED, MEASURED = (0, 1, 2, 3, 4), (0, 5, 6, 7, 8)
RESULT = "policies.json"


class Bars(NamedTuple):
    """Two progress bars, for the rows of the table and for the tokens of the scoring that is under way.

    Attributes:
        show: ``show(title, tokens)`` starts the second bar anew and returns what advances it by some tokens.
        expect: sets the number of rows.
        done: counts one more row as finished.
    """

    show: Callable[[str, int], Callable[[int], None]]
    expect: Callable[[int], None]
    done: Callable[[], None]


def policies(
    checkpoint: Annotated[str, arg("A checkpoint; or a policies.json, to draw its figures again.", "CKPT")],
    *,
    data: Annotated[str | None, opt("As for eval.", "TEXT")] = None,
    budgets: Annotated[str | None, opt("Mean depths to compare at; default: the gate's own.", "1.5,2.5")] = None,
    rates: Annotated[str | None, opt("Rates of the geometric schedules; default 0.9,0.5.", "0.9,0.5")] = None,
    out: Annotated[Path | None, opt("Tables and figures go here.", "DIR", check=shared.output_folder)] = None,
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
    """The policy lab: which rule should decide depth? Each is tuned to the same depth on one half of a text.

    It is measured on the other half. If the command is interrupted, finished measurements stay in --out, and the same
    command goes on from there.

    [dim]adaponder policies runs/demo --data data/stdlib-train-bpe-2048 --budgets 2,3 --out lab/[/]
    """
    depths = shared.decimals("--budgets", budgets, least=1)
    given_rates = shared.decimals("--rates", rates, most=1)
    if checkpoint.endswith(".json"):
        shared.refuse(checkpoint, data=data, budgets=budgets, rates=rates, max_tokens=max_tokens)
        return redraw(Path(checkpoint), out=out or Path(checkpoint).parent)
    if data is None:
        raise InputError("--data is needed: the text on which to compare policies")
    if out is not None and out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file, not a folder")
    from adaponder.evaluation.lab.halves import halve
    from adaponder.evaluation.lab.lab import RATES, Lab, check_budget, require_halting
    from adaponder.evaluation.scoring import fingerprint
    from adaponder.journal import FOLDER, Journal, resuming

    subject = shared.open_subject(checkpoint, tokenizer=tokenizer, dtype=dtype, device=device)
    require_halting(subject.model)
    schedule_rates = given_rates or RATES
    for budget in depths:
        check_budget(budget, subject.model.config.iterations, "--budgets")
    text = subject.text(data, split=split, max_tokens=max_tokens)
    windows = subject.windows(window, stride, across_documents)
    halves = halve(text, windows)
    origin = about(subject, halves, data=data, split=split, windows=str(windows), seed=seed)
    journal = None
    if out is not None:
        settings = {"budgets": list(depths) or None, "rates": list(schedule_rates), "batch size": batch_size}
        journal = Journal(out / FOLDER, origin | settings | {"weights and text": fingerprint(subject.model, text)})
    with resuming(journal, "row"), watching() as bars:
        lab = Lab(subject.model, halves, batch_size=batch_size, seed=seed, show=bars.show)
        own_depth = lab.own_depth()
        measured_at = lab.budgets(depths, own_depth)
        bars.expect(1 + len(measured_at) * len(lab.dials(schedule_rates)))
        rows = [lab.trained(own_depth)]
        bars.done()
        for row in lab.compare(measured_at, rates=schedule_rates, journal=journal):
            rows.append(row)
            bars.done()
    result = origin | {
        "command": "policies",
        "own_depth": own_depth,
        "budgets": list(measured_at),
        "rows": [row.as_dict() for row in rows],
    }
    console.print(described(result))
    for budget in measured_at:
        console.print(budget_table(rows, budget))
    console.print(f"\n{FOOTNOTES}", style="dim")
    write_json(json, result)
    if out is not None and journal is not None:
        save(result, out)
        journal.remove()
    return result


def about(subject: shared.Subject, halves: Halves, *, data: str, split: str, windows: str, seed: int) -> dict[str, Any]:
    """What was measured and how, for the result: checkpoint, text, halves, windows, precision, device and seed."""
    model = subject.model
    return {
        "checkpoint": subject.name,
        "method": model.config.method,
        "iterations": model.config.iterations,
        "data": data,
        "split": split,
        "windows": windows,
        "halves": halves.how,
        "intervals": described_intervals(halves),
        "tuning": _counts(halves.tuning),
        "held_out": _counts(halves.held_out),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "seed": seed,
    }


def _counts(half: Half) -> dict[str, int]:
    return {"tokens": half.tokens, "learned": half.learned, "documents": half.documents}


def described_intervals(halves: Halves) -> str:
    """How the confidence intervals are made, or why there are none."""
    from adaponder.evaluation.summary import FEW

    count = len(halves.held_out.own_text.starts)
    if count < FEW:
        return f"left out, {counted(count, halves.drawn.removesuffix('s'))} being too few to draw again"
    return f"95 %, {halves.drawn} drawn again"


def described(result: dict[str, Any]) -> str:
    """The sentence above the tables: text, halves, windows and intervals."""
    tuning, held_out = (_tokens(result[half]) for half in ("tuning", "held_out"))
    how = f"{result['halves']}; {result['windows']}; intervals {result['intervals']}"
    return f"{result['data']}: tuned on {tuning}, measured on {held_out}; {how}"


def _tokens(counts: dict[str, int]) -> str:
    tokens, learned = counts["tokens"], counts["learned"]
    return counted(tokens, "token") + ("" if learned == tokens else f" ({learned:,} learned)")


FOOTNOTES = (
    "to learned gate: loss minus the learned gate's at the same budget, paired; * told apart from it. Held-out depths "
    "differ a little: look at both.\n"
    "ranked: the lowest gates of each window are pruned, as in section 5.2 of the paper. Not causal: looks at later "
    "tokens (the oracle at the target itself), cannot generate.\n"
    "KL, hidden-state change and similarity compare two iterations: every token is read at least twice.\n"
    "MFLOP/token counts the logits that entropy, KL and the top-two gap compute only to decide."
)


def budget_table(rows: Sequence[Measurement], budget: float) -> Any:
    """Two tables of one budget, the policy as trained first: how each policy was tuned, and what was measured."""
    shown = [cells(row) for row in rows if row.budget in (None, budget)]
    parts = []
    # Two tables: one of nine columns would break words in a terminal of 80.
    for title, columns in ((f"\nMean depth {budget:.3f}, tuned", TUNED), ("\nMeasured on the other half", MEASURED)):
        head = [HEAD[column] for column in columns]
        parts.append(table(title, head, [[line[column] for column in columns] for line in shown]))
    return Group(*parts)


def cells(row: Measurement) -> tuple[str, ...]:
    """One line of the table, as text: a cell for each column of :data:`HEAD`."""
    flag = "yes" if row.causal else "NO"
    if row.depth is None or row.loss is None or row.mflops is None:
        return (row.policy, flag, f"cannot: {row.missed}", "–", "–", "–", "–", "", "–")
    gap, spread = "", ""
    if row.difference is not None:
        gap = f"{row.difference.mean:+.4f}" + ("*" if row.difference.told_apart else " ")
        spread = "" if row.difference.interval is None else str(row.difference.interval)
    missed = "" if row.missed is None else f" missed: {row.missed}"
    there = "" if row.tuning_depth is None else f"{row.tuning_depth:.3f}"
    return (
        row.policy,
        flag,
        row.setting + missed,
        there,
        f"{row.depth:.3f}",
        f"{row.loss:.4f}",
        gap,
        spread,
        f"{row.mflops:,.2f}",
    )


def save(result: dict[str, Any], out: Path) -> None:
    """Writes the result as JSON, CSV and Parquet, and its figures, into ``out``."""
    from adaponder.analysis.policies_figure import flat
    from adaponder.journal import on_interrupt

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RESULT, result)
    frame = flat(result["rows"])
    frame.to_csv(out / "policies.csv", index=False)
    frame.to_parquet(out / "policies.parquet", index=False)
    with on_interrupt(f"the result is whole; adaponder policies {out / RESULT} draws its figures"):
        draw(result, out)


def draw(result: dict[str, Any], out: Path) -> list[Path]:
    """Draws every figure of a result into ``out`` and returns the files."""
    from adaponder.analysis import policies_figure as figures
    from adaponder.analysis.style import save as save_figure

    drawn = [*save_figure(figures.loss_against_compute(result["rows"]), out / "loss-against-compute")]
    for budget in result["budgets"]:
        suffix = "" if len(result["budgets"]) == 1 else f"-{budget:g}"
        drawn += save_figure(figures.differences(result["rows"], budget), out / f"policies{suffix}")
        drawn += save_figure(figures.keep_probability(result["rows"], budget), out / f"keep-probability{suffix}")
    console.print(line(f"\n{len(drawn) // 2} figures, each as PNG and SVG, are in ", (out, "bold")))
    return drawn


def redraw(path: Path, *, out: Path) -> list[Path]:
    """Draws the figures again, from the ``policies.json`` at ``path`` alone, and returns the files."""
    result = load_result(path, "policies", "rows", "budgets")
    out.mkdir(parents=True, exist_ok=True)
    return draw(result, out)


def load_result(path: Path, command: str, *needed: str) -> dict[str, Any]:
    """The result that ``command`` wrote to ``path``; raises if the file is none, or lacks a ``needed`` key."""
    from adaponder.files import read_json

    try:
        result = read_json(path, InputError)
    except InputError as error:
        raise InputError(f"{path}: not a result of this command ({error})") from None
    if result.get("command") != command or any(key not in result for key in needed):
        raise InputError(f"{path}: not a result of this command; it must hold {' and '.join(needed)} of {command}")
    return result


@contextmanager
def watching() -> Iterator[Bars]:
    """Shows the progress bars as long as the block runs."""
    with progress_bars() as progress:
        whole = progress.add_task("rows", total=None)
        part = progress.add_task("", total=None)

        def show(what: str, total: int) -> Callable[[int], None]:
            progress.reset(part, total=total, description=what)
            return lambda some: progress.advance(part, some)

        yield Bars(show, lambda rows: progress.update(whole, total=rows), lambda: progress.advance(whole, 1))
