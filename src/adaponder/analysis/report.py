"""Writes the report of a trace: figures, tables and one self-contained HTML page. It needs no model."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.style import Style

from adaponder.analysis.figures import EXCERPTS, NAMES, PLATES, choose, tokens
from adaponder.analysis.figures.plate import Plate, percent
from adaponder.analysis.figures.words import for_html, on_one_line
from adaponder.analysis.style import house, save
from adaponder.analysis.tables import FEW, Numbers, numbers
from adaponder.analysis.trace import Trace
from adaponder.files import replace_file
from adaponder.terminal import counted, depth_style

REPORT = "report.html"
FIGURES, TABLES = "figures", "tables"
_SIDEWAYS = '<p class="sideways muted">The figures are wider than this screen: move them sideways.</p>'


@dataclass(frozen=True)
class Report:
    """Holds what was written, and why other figures were not; ``excerpts``: whether tokens are shown in context."""

    numbers: Numbers
    drawn: list[Plate]
    left_out: dict[str, str]
    excerpts: bool
    path: Path

    def as_dict(self, trace: Trace) -> dict[str, Any]:
        return {
            "about": asdict(trace.about),
            "numbers": self.numbers._asdict(),
            "captions": {plate.name: plate.caption() for plate in self.drawn},
            "tables": {plate.name: _records(plate.table()) for plate in self.drawn},
            "left_out": self.left_out,
            "report": str(self.path),
        }


def write_report(
    trace: Trace, out: Path, *, only: Sequence[str] = (), advance: Callable[[int], None] = lambda plates: None
) -> Report:
    """Writes every figure that this trace allows (or ``only`` some) into ``out``, with their tables and the page.

    Figures of an earlier report that this one does not have are removed.
    """
    plates, left_out = choose(trace.about, only)
    for folder in (FIGURES, TABLES):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for name in set(NAMES) - {plate.name for plate in plates}:
        for stale in (f"{FIGURES}/{name}.png", f"{FIGURES}/{name}.svg", f"{TABLES}/{name}.csv"):
            (out / stale).unlink(missing_ok=True)
    report = Report(numbers(trace), [], left_out, not only or EXCERPTS in only, out / REPORT)
    sections = []
    for plate_class in plates:
        plate = plate_class(trace)
        sections.append((plate.name, plate.title, _figure(plate, out)))
        report.drawn.append(plate)
        advance(1)
    replace_file(report.path, _html(trace, report, sections).encode())
    return report


def _figure(plate: Plate, out: Path) -> str:
    """Writes the files of a figure and returns its HTML, with a light and a dark picture, caption and numbers."""
    with house() as theme:
        _, light = save(plate.draw(theme), out / FIGURES / plate.name)
    with house(dark=True) as theme:
        dark = io.BytesIO()
        plate.draw(theme).savefig(dark, format="svg", metadata={"Date": None, "Creator": None})
    table = plate.table()
    table.to_csv(out / TABLES / f"{plate.name}.csv", index=False)
    alt, label = escape(f"{plate.title}. {plate.alt}"), escape(f"Figure: {plate.title}")
    pictures = "".join(
        f'<img class="{kind}" alt="{alt}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
        for kind, svg in (("on-light", light.read_bytes()), ("on-dark", dark.getvalue()))
    )
    return (
        f'<figure><div class="scroll" tabindex="0" role="region" aria-label="{label}">{pictures}</div>\n'
        f"<figcaption>{for_html(plate.caption())}</figcaption></figure>\n"
        f"<details><summary>Numbers of this figure</summary>{_table(table)}</details>\n"
    )


def facts(trace: Trace, overall: Numbers) -> dict[str, str]:
    """Returns the table at the top of the report and in the terminal: values by name."""
    about = trace.about
    interval = "" if overall.interval is None else f", 95% {overall.interval.low:.4f} to {overall.interval.high:.4f}"
    documents = counted(overall.documents, "document")
    learned = "" if overall.scored == overall.tokens else f", {overall.scored:,} of them learned and scored"
    rows = {
        "checkpoint": about.checkpoint,
        "method": f"{about.method}, K = {about.iterations}"
        + (f", at most {about.deepest} iterations" if about.deepest < about.iterations else ""),
        "policy": about.policy if about.halts else "none: the method never halts",
        "data": about.data,
        "text": f"{overall.tokens:,} predictions of {documents}{learned}, {about.windows}",
        "loss": f"{overall.loss:.4f} nats per token{interval}",
        "perplexity": f"{overall.perplexity:,.3f}",
    }
    if overall.bits_per_byte is not None:
        rows["bits per byte"] = f"{overall.bits_per_byte:.4f}"
    return rows | {
        "mean depth": f"{overall.iterations:.3f} iterations of {about.deepest}",
        "tokens halted early": percent(overall.halted) if about.halts else "none",
        "gates closed": "no gates" if overall.gates_closed is None else percent(overall.gates_closed),
        "FLOPs": f"{overall.flops / 1e6:,.2f} million per token, {overall.flops_ratio:.2f} x vanilla",
        "K/V": f"{overall.kv_bytes / 1024:,.1f} KiB per token",
        "computed": f"{about.dtype} on {about.device}, seed {about.seed}",
        "versions": ", ".join(f"{name} {number}" for name, number in about.versions.items()),
    }


def _html(trace: Trace, report: Report, sections: list[tuple[str, str, str]]) -> str:
    """Returns the page; ``sections`` are names, headings and HTML of the figures."""
    title, overall = f"Token trace of {trace.about.checkpoint}", report.numbers
    if report.excerpts:
        sections = [*sections, (EXCERPTS, "Hardest and easiest tokens in context", _excerpts(trace))]
    if report.left_out:
        titles = {plate.name: plate.title for plate in PLATES}
        rows = "".join(
            f"<li><b>{name}</b> ({escape(titles[name])}): {for_html(reason)}.</li>"
            for name, reason in report.left_out.items()
        )
        sections = [*sections, ("left-out", "Figures left out", f"<ul>{rows}</ul>")]
    contents = "".join(f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, heading, _ in sections)
    parts = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(heading)}</h2>\n{content}'
        "</section>"
        for name, heading, content in sections
    )
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{for_html(value)}</td></tr>'
        for name, value in facts(trace, overall).items()
    )
    unit = "token" if overall.scored == overall.tokens else "learned token, figures of losses are of these alone"
    intervals = f"95% intervals resample documents (means of fewer than {FEW} documents have none)"
    if overall.documents < FEW:
        intervals = f"there are no intervals: {counted(overall.documents, 'document')} are too few to resample"
    body = f"""<header><h1>{for_html(title)}</h1><button id="theme" type="button" hidden>Dark page</button></header>
<p class="muted">Everything below is computed from <code>trace.parquet</code>, one row per prediction; the captions
state what this data shows. Losses are in nats per {unit}; {intervals}.</p>
{_four(trace, overall)}
<div class="scroll" tabindex="0" role="region" aria-label="What was traced"><table class="facts"><tbody>
{rows}
</tbody></table></div>
<nav aria-label="Contents"><h2>Contents</h2><ol>{contents}</ol></nav>
<main>
{_SIDEWAYS if report.drawn else ""}
{parts}
</main>"""
    return _document(title, body, deepest=trace.about.deepest)


def _four(trace: Trace, overall: Numbers) -> str:
    """Returns the HTML of the four halting numbers, each with what it counts."""
    about = trace.about
    cells = [
        ("tokens halted early", percent(overall.halted), f"of tokens halt before iteration {about.deepest}"),
        (
            "gates closed",
            "none" if overall.gates_closed is None else percent(overall.gates_closed),
            "of (token, gate) pairs at which the token is halted",
        ),
        ("mean iterations", f"{overall.iterations:.3f}", f"iterations per token, of {about.deepest}: the paper's x"),
        ("FLOPs", f"{overall.flops_ratio:.2f} x", "the plain backbone's, head and gates counted"),
    ]
    inner = "".join(f"<div><dt>{name}</dt><dd>{value}<small>{what}</small></dd></div>" for name, value, what in cells)
    return f'<dl class="four">{inner}</dl>'


def _excerpts(trace: Trace) -> str:
    depths = "".join(f'<span class="d{depth}">{depth}</span>' for depth in range(1, trace.about.deepest + 1))
    groups = (
        ("Hardest: highest loss after one iteration", tokens.extremes(trace, hardest=True)),
        ("Easiest: lowest loss after one iteration", tokens.extremes(trace, hardest=False)),
        ("A passage where depths differ", [tokens.passage(trace)]),
    )
    parts = [
        "<p>The background of a word shows its depth; pointing at it gives the loss of what it predicts. "
        "A word is predicted by the one before it.</p>",
        f'<p class="legend">depth {depths}; <span class="target">the token in question</span></p>',
    ]
    for heading, excerpts in groups:
        shown = "\n".join(f'<div class="excerpt">{tokens.as_html(excerpt)}</div>' for excerpt in excerpts)
        parts.append(f"<h3>{heading}</h3>\n{shown}")
    return "\n".join(parts)


def _table(frame: pd.DataFrame) -> str:
    head = "".join(f'<th scope="col">{escape(str(name))}</th>' for name in frame.columns)
    rows = "".join(
        "<tr>" + "".join(_cell(str(name), value) for name, value in zip(frame.columns, row, strict=True)) + "</tr>"
        for row in frame.itertuples(index=False)
    )
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Numbers">{body}</div>'


def _cell(column: str, value: Any) -> str:
    if isinstance(value, str):
        return f'<td class="word">{for_html(value)}</td>'
    if isinstance(value, (int, np.integer)):
        return f"<td>{value:,}</td>"
    if not math.isfinite(value):
        return "<td>–</td>"
    return f"<td>{percent(value) if column in ('share', 'active', 'halts') else f'{value:.4g}'}</td>"


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns the rows of the table as JSON values; NaN becomes null."""
    rows = frame.to_dict("records")
    return [{str(key): _plain(value) for key, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _document(title: str, body: str, *, deepest: int) -> str:
    """Returns the whole document; ``title`` is text and is escaped, ``body`` is HTML."""
    files = resources.files("adaponder.analysis") / "page"
    style, script = (files.joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    depths = "\n".join(_depth_rule(depth, deepest) for depth in range(1, deepest + 1))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{escape(on_one_line(title))}</title>
<style>{style}{depths}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


def _depth_rule(depth: int, deepest: int) -> str:
    """Returns the style rule of a depth, in the terminal's colours."""
    style = Style.parse(depth_style(depth, deepest))
    assert style.color is not None  # depth 1 and more have both
    assert style.bgcolor is not None
    ink = "#000" if style.color.name == "black" else "#fff"
    return f".d{depth} {{ background: {style.bgcolor.get_truecolor().hex}; color: {ink}; }}"
