"""Writes the report of a trace: figures, tables and one self-contained HTML page. It needs no model."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_hex

from adaponder.analysis.figures import EXCERPTS, NAMES, choose, tokens
from adaponder.analysis.figures.plate import Plate, percent
from adaponder.analysis.figures.words import for_html
from adaponder.analysis.style import depth_colours, house, save
from adaponder.analysis.tables import FEW, Numbers, numbers
from adaponder.analysis.trace import Trace
from adaponder.files import replace_file
from adaponder.terminal import counted, depth_style

REPORT = "report.html"
FIGURES, TABLES = "figures", "tables"


class Report(NamedTuple):
    """The figures drawn, the reasons for figures left out, and whether ``excerpts`` (tokens in context) are shown."""

    numbers: Numbers
    drawn: list[Plate]
    left_out: dict[str, str]
    excerpts: bool
    path: Path

    def as_dict(self, trace: Trace) -> dict[str, Any]:
        tables = {plate.name: plate.table().astype(object) for plate in self.drawn}
        return {
            "about": asdict(trace.about),
            "numbers": self.numbers._asdict(),
            "captions": {plate.name: plate.caption() for plate in self.drawn},
            "tables": {name: table.where(table.notna(), None).to_dict("records") for name, table in tables.items()},
            "left_out": self.left_out,
            "report": str(self.path),
        }


def write_report(
    trace: Trace, out: Path, *, only: Sequence[str] = (), advance: Callable[[int], None] = lambda plates: None
) -> Report:
    """Writes every figure that this trace allows (or those named in ``only``) into ``out``, with tables and the page.

    Figures of an earlier report that are not in this one are removed.
    """
    plates, left_out = choose(trace.about, only)
    (out / TABLES).mkdir(parents=True, exist_ok=True)
    for name in set(NAMES) - {plate.name for plate in plates}:
        for stale in (f"{FIGURES}/{name}.png", f"{FIGURES}/{name}.svg", f"{TABLES}/{name}.csv"):
            (out / stale).unlink(missing_ok=True)
    report = Report(numbers(trace), [], left_out, not only or EXCERPTS in only, out / REPORT)
    pictures = {}
    for plate_class in plates:
        plate = plate_class(trace)
        pictures[plate.name] = _draw(plate, out / FIGURES / plate.name)
        plate.table().to_csv(out / TABLES / f"{plate.name}.csv", index=False)
        report.drawn.append(plate)
        advance(1)
    replace_file(report.path, _html(trace, report, pictures).encode())
    return report


def _draw(plate: Plate, path: Path) -> dict[str, str]:
    """Writes a figure's files; returns its SVG for a light and for a dark page, in base64."""
    with house() as theme:
        _, light = save(plate.draw(theme), path)
    with house(dark=True) as theme:
        dark = io.BytesIO()
        plate.draw(theme).savefig(dark, format="svg", metadata={"Date": None, "Creator": None})
    pictures = {"on-light": light.read_bytes(), "on-dark": dark.getvalue()}
    return {kind: base64.b64encode(svg).decode() for kind, svg in pictures.items()}


def facts(trace: Trace, overall: Numbers) -> dict[str, str]:
    """Returns the table at the top of the report and in the terminal: values by name."""
    about = trace.about
    interval = "" if overall.interval is None else f", 95% {overall.interval.low:.4f} to {overall.interval.high:.4f}"
    limit = f", at most {about.deepest} iterations" if about.deepest < about.iterations else ""
    learned = "" if overall.scored == overall.tokens else f", {overall.scored:,} of them learned and scored"
    documents = counted(overall.documents, "document")
    bits = {} if overall.bits_per_byte is None else {"bits per byte": f"{overall.bits_per_byte:.4f}"}
    return {
        "checkpoint": about.checkpoint,
        "method": f"{about.method}, K = {about.iterations}{limit}",
        "policy": about.policy if about.halts else "none: the method never halts",
        "data": about.data,
        "text": f"{overall.tokens:,} predictions of {documents}{learned}, {about.windows}",
        "loss": f"{overall.loss:.4f} nats per token{interval}",
        "perplexity": f"{overall.perplexity:,.3f}",
        **bits,
        "mean depth": f"{overall.iterations:.3f} iterations of {about.deepest}",
        "tokens halted early": percent(overall.halted) if about.halts else "none",
        "gates closed": "no gates" if overall.gates_closed is None else percent(overall.gates_closed),
        "FLOPs": f"{overall.flops / 1e6:,.2f} million per token, {overall.flops_ratio:.2f} x vanilla",
        "K/V": f"{overall.kv_bytes / 1024:,.1f} KiB per token",
        "computed": f"{about.dtype} on {about.device}, seed {about.seed}",
        "versions": ", ".join(f"{name} {number}" for name, number in about.versions.items()),
    }


def _html(trace: Trace, report: Report, pictures: dict[str, dict[str, str]]) -> str:
    """Returns the page: ``page/report.html`` filled in, with its style and script."""
    page = resources.files("adaponder.analysis") / "page"
    template, style, script = (page.joinpath(f"report.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    # Every value is escaped unless it is Markup.
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(for_html(str(value))),
    )
    environment.filters |= {"percent": percent, "cell": _cell, "words": lambda excerpt: Markup(tokens.as_html(excerpt))}
    deepest = trace.about.deepest
    inks = ["#000" if depth_style(depth, deepest).startswith("black") else "#fff" for depth in range(1, deepest + 1)]
    excerpts = {
        "Hardest: highest loss after one iteration": tokens.extremes(trace, hardest=True),
        "Easiest: lowest loss after one iteration": tokens.extremes(trace, hardest=False),
        "A passage where depths differ": [tokens.passage(trace)],
    }
    return environment.from_string(template).render(
        about=trace.about,
        numbers=report.numbers,
        facts=facts(trace, report.numbers),
        few=FEW,
        plates=report.drawn,
        pictures=pictures,
        excerpts=excerpts if report.excerpts else {},
        left_out=report.left_out,
        depths=list(zip(map(to_hex, depth_colours(deepest)), inks, strict=True)),
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _cell(value: Any, column: str) -> str:
    """Formats a cell of a figure's table."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    if not math.isfinite(value):
        return "–"
    return percent(value) if column in ("share", "active", "halts") else f"{value:.4g}"
