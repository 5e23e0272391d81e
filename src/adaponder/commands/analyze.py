"""adaponder analyze: every token of a text written down, and from that alone the figures, the tables and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaponder.analysis.figures import choose, excerpts
from adaponder.analysis.figures.words import on_one_line
from adaponder.analysis.report import Report, facts, write_report
from adaponder.analysis.trace import NAME, Trace, kind_of, make_trace, planned_scorings, read_trace, write_trace
from adaponder.commands.keeping import keeping, saying_if_interrupted
from adaponder.commands.options import AnalyzeOptions
from adaponder.commands.subject import Subject, open_subject
from adaponder.data.manifest import MANIFEST
from adaponder.errors import InputError
from adaponder.evaluation.kept import FOLDER, Kept, fingerprint
from adaponder.evaluation.scoring import ScoringOptions
from adaponder.evaluation.text import Text
from adaponder.terminal import console, counting, legend, line, table, write_json

# What decides a trace, and means nothing where it is made already.
_TRACING = ("data", "window", "stride", "max_tokens", "policy", "tau", "profile", "max_iterations", "tokenizer")


def run(options: AnalyzeOptions) -> Report:
    """Traces a checkpoint on ``data`` and reports; a trace, or a folder with one and no ``data``, is reported again.

    Interrupted, it keeps what it has read in ``out``, and the same call goes on from there.
    """
    found, kept = _trace_of(options.checkpoint, options.data), None
    if found is not None:
        if named := [name for name in _TRACING if getattr(options, name) is not None]:
            raise InputError(
                f"--{named[0].replace('_', '-')}: {found} is a trace, made already; leave it out, or name a checkpoint"
            )
        trace, out = read_trace(found), options.out or found.parent
    else:
        data, out = options.data, options.out
        if data is None or out is None:
            raise InputError(f"{'--data' if data is None else '--out'} is needed to trace a checkpoint")
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: a file is in the way")
        subject = open_subject(options)
        how = subject.scoring(options, seed=options.seed)
        # What was asked for by name and cannot be drawn is said before anything is read.
        choose(kind_of(subject.model, how), options.only)
        text = subject.text(data, options)
        windows = subject.windows(options)
        whence = f"{data} ({options.split})" if (Path(data) / MANIFEST).is_file() else data
        named = {"checkpoint": options.checkpoint, "data": whence}
        kept = Kept(
            out / FOLDER, _settings(subject, text, how) | named | {"batch": options.batch_size, "windows": str(windows)}
        )
        total = text.predictions * len(planned_scorings(subject.model, how))
        with keeping(kept, "portion"), counting(f"tracing {options.checkpoint}", total) as advance:
            trace = make_trace(
                subject.model,
                text,
                windows,
                **named,
                how=how,
                batch_size=options.batch_size,
                kept=kept,
                advance=advance,
            )
        out.mkdir(parents=True, exist_ok=True)
        write_trace(trace, out / NAME)
    again = f"the trace is whole; adaponder analyze {out} draws its report"
    with saying_if_interrupted(again), counting("drawing", len(choose(trace.about, options.only)[0])) as advance:
        report = write_report(trace, out, only=options.only, advance=advance)
    if kept is not None:
        kept.remove()
    show(trace, report)
    write_json(options.json, report.as_dict(trace))
    return report


def _settings(subject: Subject, text: Text, how: ScoringOptions) -> dict[str, Any]:
    """What portions of a trace must have in common, beside where they are from."""
    return {
        "weights and text": fingerprint(subject.model, text),
        "policy": "the method's own" if how.policy is None else str(getattr(how.policy, "fingerprint", how.policy)),
        "max iterations": how.max_iterations,
        "seed": how.seed,
        "dtype": str(subject.model.dtype),
        "device": subject.model.device.type,
    }


def _trace_of(name: str, data: str | None) -> Path | None:
    """The trace meant by a Parquet file, or by a folder that holds one and is not to be read again; else ``None``."""
    path = Path(name)
    if path.suffix == ".parquet":
        if not path.is_file():
            raise InputError(f"{name}: no such trace")
        return path
    return path / NAME if data is None and (path / NAME).is_file() else None


def show(trace: Trace, report: Report) -> None:
    deepest = trace.about.deepest
    console.print(table("What was read", ("", ""), list(facts(trace, report.numbers).items())))
    for one in report.drawn:
        console.print(f"\n{one.plate.title}", style="bold")
        console.print(on_one_line(one.caption))
    for name, reason in report.left_out.items():
        console.print(line("\n", (name, "bold"), f" is left out: {reason}"))
    extremes = {"Hardest": excerpts.hardest(trace, 3), "Easiest": excerpts.easiest(trace, 3)} if report.excerpts else {}
    for heading, found in extremes.items():
        console.print(line("\n", (f"{heading} tokens", "bold"), "  "), legend(deepest))
        for one in found:
            console.print(f"\n{one.remark}")
            console.print(excerpts.as_text(one, deepest))
    console.print(line("\n→ ", (report.path, "bold")), soft_wrap=True)
