"""adaponder analyze: writes a trace with a line per token of a text, and draws figures, tables and report from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaponder.analysis.figures import choose, tokens
from adaponder.analysis.figures.words import on_one_line
from adaponder.analysis.report import Report, facts, write_report
from adaponder.analysis.trace import NAME, Trace, kind_of, make_trace, planned_scorings, read_trace, write_trace
from adaponder.commands.options import AnalyzeOptions
from adaponder.commands.subject import Subject, open_subject
from adaponder.data.manifest import MANIFEST
from adaponder.errors import InputError
from adaponder.evaluation.scoring import ScoringOptions, fingerprint
from adaponder.evaluation.text import Text
from adaponder.journal import FOLDER, Journal, on_interrupt, resuming
from adaponder.terminal import console, counting, legend, line, table, write_json

# Options that decide what a trace holds; refused where a finished trace is named.
_TRACING = ("data", "window", "stride", "max_tokens", "policy", "tau", "profile", "max_iterations", "tokenizer")


def run(options: AnalyzeOptions) -> Report:
    """Traces a checkpoint on ``options.data`` and writes the report.

    Where ``options.checkpoint`` is a trace, or a folder with one and ``options.data`` is ``None``, only the report is
    written again. If tracing is interrupted, finished portions stay in ``options.out``, and the same call goes on from
    there.
    """
    trace_path, journal = _trace_of(options.checkpoint, options.data), None
    if trace_path is not None:
        if named := [name for name in _TRACING if getattr(options, name) is not None]:
            raise InputError(
                f"--{named[0].replace('_', '-')}: {trace_path} is a trace, made already; "
                "leave it out, or name a checkpoint"
            )
        trace, out = read_trace(trace_path), options.out or trace_path.parent
    else:
        data, out = options.data, options.out
        if data is None or out is None:
            raise InputError(f"{'--data' if data is None else '--out'} is needed to trace a checkpoint")
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: a file is in the way")
        subject = open_subject(options)
        how = subject.scoring(options, seed=options.seed)
        # Raises for a figure of --only that cannot be drawn, before any text is read.
        choose(kind_of(subject.model, how), options.only)
        text = subject.text(data, options)
        windows = subject.windows(options)
        whence = f"{data} ({options.split})" if (Path(data) / MANIFEST).is_file() else data
        named = {"checkpoint": options.checkpoint, "data": whence}
        journal = Journal(
            out / FOLDER, _settings(subject, text, how) | named | {"batch": options.batch_size, "windows": str(windows)}
        )
        total = text.predictions * len(planned_scorings(subject.model, how))
        with resuming(journal, "portion"), counting(f"tracing {options.checkpoint}", total) as advance:
            trace = make_trace(
                subject.model,
                text,
                windows,
                **named,
                how=how,
                batch_size=options.batch_size,
                journal=journal,
                advance=advance,
            )
        out.mkdir(parents=True, exist_ok=True)
        write_trace(trace, out / NAME)
    again = f"the trace is whole; adaponder analyze {out} draws its report"
    with on_interrupt(again), counting("drawing", len(choose(trace.about, options.only)[0])) as advance:
        report = write_report(trace, out, only=options.only, advance=advance)
    if journal is not None:
        journal.remove()
    show(trace, report)
    write_json(options.json, report.as_dict(trace))
    return report


def _settings(subject: Subject, text: Text, how: ScoringOptions) -> dict[str, Any]:
    """Settings, beside checkpoint and data, that must be equal for portions to belong to the same trace."""
    return {
        "weights and text": fingerprint(subject.model, text),
        "policy": "the method's own" if how.policy is None else str(getattr(how.policy, "spelling", how.policy)),
        "max iterations": how.max_iterations,
        "seed": how.seed,
        "dtype": str(subject.model.dtype),
        "device": subject.model.device.type,
    }


def _trace_of(name: str, data: str | None) -> Path | None:
    """The file of a finished trace: ``name`` itself, or in the folder ``name`` without ``data``; else ``None``."""
    path = Path(name)
    if path.suffix == ".parquet":
        if not path.is_file():
            raise InputError(f"{name}: no such trace")
        return path
    return path / NAME if data is None and (path / NAME).is_file() else None


def show(trace: Trace, report: Report) -> None:
    """Prints facts, captions and excerpts of the report, which figures were left out and why, and where it is."""
    deepest = trace.about.deepest
    console.print(table("What was traced", ("", ""), list(facts(trace, report.numbers).items())))
    for figure in report.drawn:
        console.print(f"\n{figure.plate.title}", style="bold")
        console.print(on_one_line(figure.caption))
    for name, reason in report.left_out.items():
        console.print(line("\n", (name, "bold"), f" is left out: {reason}"))
    extremes = {"Hardest": tokens.hardest(trace, 3), "Easiest": tokens.easiest(trace, 3)} if report.excerpts else {}
    for heading, chosen in extremes.items():
        console.print(line("\n", (f"{heading} tokens", "bold"), "  "), legend(deepest))
        for excerpt in chosen:
            console.print(f"\n{excerpt.remark}")
            console.print(tokens.as_text(excerpt, deepest))
    console.print(line("\n→ ", (report.path, "bold")), soft_wrap=True)
