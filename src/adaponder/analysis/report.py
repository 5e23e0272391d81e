"""A trace becomes pictures, tables and one page that needs nothing else; drawing again needs no model."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from adaponder.analysis.figures import NAMES, PLATES, choose, excerpts
from adaponder.analysis.figures.plate import Plate, percent
from adaponder.analysis.figures.words import for_html
from adaponder.analysis.page import both, legend, page, theme_button
from adaponder.analysis.style import house, save
from adaponder.analysis.tables import FEW, Numbers, numbers
from adaponder.analysis.trace import Trace
from adaponder.files import replace_file

REPORT = "report.html"
FIGURES, TABLES = "figures", "tables"
_SIDEWAYS = '<p class="sideways muted">The figures are wider than this screen: move them sideways.</p>'


@dataclass(frozen=True)
class Drawn:
    """One plate as it came out; ``light`` and ``dark`` are SVG."""

    plate: Plate
    caption: str
    table: pd.DataFrame
    light: bytes
    dark: bytes


@dataclass(frozen=True)
class Report:
    """What was written, and why the rest was not; ``excerpts``: whether tokens are shown in context."""

    numbers: Numbers
    drawn: list[Drawn]
    left_out: dict[str, str]
    excerpts: bool
    path: Path

    def as_dict(self, trace: Trace) -> dict[str, Any]:
        return {
            "about": asdict(trace.about),
            "numbers": self.numbers.as_dict(),
            "captions": {one.plate.name: one.caption for one in self.drawn},
            "tables": {one.plate.name: _records(one.table) for one in self.drawn},
            "left_out": self.left_out,
            "report": str(self.path),
        }


def write_report(
    trace: Trace, out: Path, *, only: Sequence[str] = (), advance: Callable[[int], None] = lambda plates: None
) -> Report:
    """Draws every plate that this trace allows (or ``only`` some) into ``out``: figures, tables and the page.

    A figure of an earlier report that this one does not have is removed: beside this page it would be a lie.
    """
    plates, left_out = choose(trace.about, only)
    for folder in (FIGURES, TABLES):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for name in set(NAMES) - {plate.name for plate in plates}:
        for stale in (f"{FIGURES}/{name}.png", f"{FIGURES}/{name}.svg", f"{TABLES}/{name}.csv"):
            (out / stale).unlink(missing_ok=True)
    drawn = []
    for plate in plates:
        drawn.append(_draw(plate, trace, out))
        advance(1)
    report = Report(numbers(trace), drawn, left_out, not only or excerpts.NAME in only, out / REPORT)
    replace_file(report.path, _html(trace, report).encode())
    return report


def _draw(plate: Plate, trace: Trace, out: Path) -> Drawn:
    found = plate.measure(trace)
    with house() as theme:
        _, svg = save(plate.draw(found, theme), out / FIGURES / plate.name)
    with house(dark=True) as theme:
        dark = io.BytesIO()
        plate.draw(found, theme).savefig(dark, format="svg", metadata={"Date": None, "Creator": None})
    table = plate.table(found)
    table.to_csv(out / TABLES / f"{plate.name}.csv", index=False)
    return Drawn(plate, plate.caption(found), table, svg.read_bytes(), dark.getvalue())


def facts(trace: Trace, found: Numbers) -> dict[str, str]:
    """What the table at the top says, by name; also the terminal's."""
    about = trace.about
    interval = "" if found.interval is None else f", 95% {found.interval.low:.4f} to {found.interval.high:.4f}"
    rows = {
        "checkpoint": about.checkpoint,
        "method": f"{about.method}, K = {about.iterations}"
        + (f", read at most {about.deepest}x" if about.deepest < about.iterations else ""),
        "who halts": about.policy if about.halts else "nobody",
        "data": about.data,
        "read": f"{found.tokens:,} predictions of {found.documents:,} documents, {about.windows}",
        "loss": f"{found.loss:.4f} nats per token{interval}",
        "perplexity": f"{found.perplexity:,.3f}",
    }
    if found.bits_per_byte is not None:
        rows["bits per byte"] = f"{found.bits_per_byte:.4f}"
    return rows | {
        "mean depth": f"{found.iterations:.3f} iterations of {about.deepest}",
        "tokens halted early": percent(found.halted) if about.halts else "none: the method never halts",
        "gates closed": "no gates" if found.gates_closed is None else percent(found.gates_closed),
        "FLOPs": f"{found.flops / 1e6:,.2f} million per token, {found.flops_ratio:.2f} x vanilla",
        "K/V": f"{found.kv_bytes / 1024:,.1f} KiB per token",
        "computed": f"{about.dtype} on {about.device}, seed {about.seed}",
        "versions": ", ".join(f"{name} {number}" for name, number in about.versions.items()),
    }


def _html(trace: Trace, report: Report) -> str:
    title = f"Token trace of {trace.about.checkpoint}"
    sections = [(one.plate.name, one.plate.title, _figure(one)) for one in report.drawn]
    if report.excerpts:
        sections.append((excerpts.NAME, "Hardest and easiest tokens in context", _excerpts(trace)))
    if report.left_out:
        titles = {plate.name: plate.title for plate in PLATES}
        rows = "".join(
            f"<li><b>{name}</b> ({escape(titles[name])}): {for_html(reason)}.</li>"
            for name, reason in report.left_out.items()
        )
        sections.append(("left-out", "Figures left out", f"<ul>{rows}</ul>"))
    contents = "".join(f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, heading, _ in sections)
    parts = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(heading)}</h2>\n{content}'
        "</section>"
        for name, heading, content in sections
    )
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{for_html(value)}</td></tr>'
        for name, value in facts(trace, report.numbers).items()
    )
    body = f"""<header><h1>{for_html(title)}</h1>{theme_button()}</header>
<p class="muted">Everything below is computed from <code>trace.parquet</code>, one row per prediction; the captions
state what this data shows. Losses are in nats per token; {_intervals(report.numbers)}.</p>
{_four(trace, report.numbers)}
<div class="scroll" tabindex="0" role="region" aria-label="What was traced"><table class="facts"><tbody>
{rows}
</tbody></table></div>
<nav aria-label="Contents"><h2>Contents</h2><ol>{contents}</ol></nav>
<main>
{_SIDEWAYS if report.drawn else ""}
{parts}
</main>"""
    return page(title, body, deepest=trace.about.deepest)


def _intervals(found: Numbers) -> str:
    if found.documents < FEW:
        documents = "1 document" if found.documents == 1 else f"{found.documents} documents"
        return f"intervals are left out, {documents} being too few to draw again"
    return f"intervals are 95% and draw documents again (means of fewer than {FEW} documents have none)"


def _four(trace: Trace, found: Numbers) -> str:
    """The four halting numbers, each with what it counts, so that none is taken for another."""
    about = trace.about
    cells = [
        ("tokens halted early", percent(found.halted), f"of tokens read fewer than {about.deepest} times"),
        (
            "gates closed",
            "none" if found.gates_closed is None else percent(found.gates_closed),
            "of (token, gate) pairs at which a token no longer reads on",
        ),
        ("mean iterations", f"{found.iterations:.3f}", f"readings per token, of {about.deepest}: the paper's x"),
        ("FLOPs", f"{found.flops_ratio:.2f} x", "the plain backbone's, head and gates counted"),
    ]
    inner = "".join(f"<div><dt>{name}</dt><dd>{value}<small>{what}</small></dd></div>" for name, value, what in cells)
    return f'<dl class="four">{inner}</dl>'


def _figure(one: Drawn) -> str:
    pictures = both(one.light, one.dark, f"{one.plate.title}. {one.plate.alt}")
    label = escape(f"Figure: {one.plate.title}")
    return (
        f'<figure><div class="scroll" tabindex="0" role="region" aria-label="{label}">{pictures}</div>\n'
        f"<figcaption>{for_html(one.caption)}</figcaption></figure>\n"
        f"<details><summary>Numbers of this figure</summary>{_table(one.table)}</details>\n"
    )


def _excerpts(trace: Trace) -> str:
    groups = (
        ("Hardest: highest loss after one reading", excerpts.hardest(trace)),
        ("Easiest: lowest loss after one reading", excerpts.easiest(trace)),
        ("A passage where depths differ", [excerpts.passage(trace)]),
    )
    parts = [
        "<p>The background of a word says how often it was read; pointing at it gives the loss of what it predicts. "
        "A word is predicted by the one before it.</p>",
        legend(trace.about.deepest),
    ]
    for heading, found in groups:
        shown = "\n".join(f'<div class="excerpt">{excerpts.as_html(one)}</div>' for one in found)
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
    return f"<td>{percent(value) if column in ('share', 'asked', 'halts') else f'{value:.4g}'}</td>"


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """JSON has no NaN: what is not known is null."""
    rows = frame.to_dict("records")
    return [{str(key): _plain(value) for key, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
