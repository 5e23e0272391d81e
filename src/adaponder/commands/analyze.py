"""adaponder analyze: writes a trace with a row per token of a text, and draws figures, tables and a report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands import shared
from adaponder.commands.shared import arg, opt
from adaponder.errors import InputError
from adaponder.terminal import console, counted, counting, legend, line, table, write_json

if TYPE_CHECKING:
    from adaponder.analysis.report import Report
    from adaponder.analysis.trace import Trace


@shared.command
def analyze(
    checkpoint: Annotated[str, arg("A checkpoint; or a trace.parquet, to draw its figures again.", "CKPT")],
    *,
    data: Annotated[str | None, opt("The text to trace, as for eval.", "TEXT")] = None,
    out: Annotated[Path | None, shared.folder("Where to write trace, figures, tables and report.")] = None,
    only: Annotated[str | None, opt("Draw only these figures: halting, gates, grid, …", "a,b")] = None,
    json: shared.Json = None,
    reading: shared.Reading,
    depth: shared.Depth,
    opening: shared.Opening,
) -> Any:
    """Trace every token of a text, and draw the paper's analysis from the trace: figures, tables, one report.html.

    If tracing is interrupted, finished portions stay in --out, and the same command resumes from them.

    [dim]adaponder analyze runs/demo --data data/stdlib-train-bpe-2048 --out analysis/[/]
    """
    from adaponder.analysis.figures import choose
    from adaponder.analysis.report import write_report
    from adaponder.analysis.trace import NAME, kind_of, make_trace, planned_scorings, read_trace, write_trace
    from adaponder.data.manifest import MANIFEST
    from adaponder.evaluation.scoring import fingerprint
    from adaponder.journal import FOLDER, Journal, on_interrupt, resuming

    figures = shared.listed("--only", only, str)
    trace_path = _trace_of(checkpoint, data)
    journal = None
    if trace_path is not None:
        unused = {"window": reading.window, "stride": reading.stride, "max_tokens": reading.max_tokens}
        unused |= {"data": data, "tokenizer": opening.tokenizer} | vars(depth)
        shared.refuse(f"{trace_path}, a finished trace", **unused)
        trace, out = read_trace(trace_path), out or trace_path.parent
    else:
        if data is None or out is None:
            raise InputError(f"{'--data' if data is None else '--out'} is needed to trace a checkpoint")
        subject = shared.open_subject(checkpoint, opening)
        how = depth.scoring(subject, reading.seed)
        # Raises for a figure of --only that cannot be drawn, before any text is read.
        choose(kind_of(subject.model, how), figures)
        text, windows = reading.text(subject, data), reading.windows(subject)
        source = f"{data} ({reading.split})" if (Path(data) / MANIFEST).is_file() else data
        if count := int(text.unknown.sum()):
            source += f", {counted(count, 'token')} unknown to the tokenizer"
        origin, size = {"checkpoint": checkpoint, "data": source}, reading.batch_size
        # The settings that all portions of a trace must share.
        settings = origin | {
            "weights and text": fingerprint(subject.model, text),
            "policy": "the method's own" if how.policy is None else str(getattr(how.policy, "spelling", how.policy)),
            "max iterations": how.max_iterations,
            "seed": how.seed,
            "dtype": str(subject.model.dtype),
            "device": subject.model.device.type,
            "batch": size,
            "windows": str(windows),
        }
        journal = Journal(out / FOLDER, settings)
        total = text.predictions * len(planned_scorings(subject.model, how))
        with resuming(journal, "portion"), counting(f"tracing {checkpoint}", total) as advance:
            trace = make_trace(
                subject.model, text, windows, **origin, how=how, batch_size=size, journal=journal, advance=advance
            )
        out.mkdir(parents=True, exist_ok=True)
        write_trace(trace, out / NAME)
    next_step = f"the trace is complete; adaponder analyze {shlex.quote(str(out))} draws its report"
    with on_interrupt(next_step), counting("drawing", len(choose(trace.about, figures)[0])) as advance:
        report = write_report(trace, out, only=figures, advance=advance)
    if journal is not None:
        journal.remove()
    show(trace, report)
    write_json(json, report.as_dict(trace))
    return report


def _trace_of(name: str, data: str | None) -> Path | None:
    """Returns the trace to draw: the file ``name`` or, without ``data``, that in the folder ``name``; else ``None``."""
    from adaponder.analysis.trace import NAME

    path = Path(name)
    if path.suffix == ".parquet":
        if not path.is_file():
            raise InputError(f"{name}: no such trace")
        return path
    return path / NAME if data is None and (path / NAME).is_file() else None


def show(trace: Trace, report: Report) -> None:
    """Prints the report: facts, captions, reasons for left-out figures, excerpts, and its path."""
    from adaponder.analysis.figures import tokens
    from adaponder.analysis.figures.words import on_one_line
    from adaponder.analysis.report import facts

    deepest = trace.about.deepest
    console.print(table("What was traced", ("", ""), list(facts(trace, report.numbers).items())))
    for plate in report.drawn:
        console.print(f"\n{plate.title}", style="bold")
        console.print(on_one_line(plate.caption()))
    for name, reason in report.left_out.items():
        console.print(line("\n", (name, "bold"), f" is left out: {reason}"))
    for heading in ("Hardest", "Easiest") if report.excerpts else ():
        console.print(line("\n", (f"{heading} tokens", "bold"), "  "), legend(deepest))
        for excerpt in tokens.extremes(trace, hardest=heading == "Hardest", count=3):
            console.print(f"\n{excerpt.remark}")
            console.print(tokens.as_text(excerpt, deepest))
    console.print(line("\n→ ", (report.path, "bold")), soft_wrap=True)
