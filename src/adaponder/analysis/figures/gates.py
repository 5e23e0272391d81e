"""What each gate said of each token, on a scale that shows both ends: near 0, where tokens halt, and near 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from adaponder.analysis.figures.plate import Plate, facts_of, listed, needs_gates, percent
from adaponder.analysis.style import PAGE, PALETTE, Theme, new_figure
from adaponder.analysis.trace import Trace

BINS = 40
# Vermilion stands out from the blue bars and from paper, dark or white.
_LINE = "#D55E00"
# Float32 tells nothing apart closer to 1 than this.
_END = 7.0
_TICKS = {
    **{10.0**-power: f"10⁻{'⁰¹²³⁴⁵⁶'[power]}" for power in (6, 5, 4, 3)},
    0.01: "0.01",
    0.1: "0.1",
    0.5: "½",
    0.9: "0.9",
    0.99: "0.99",
    **{1 - 10.0**-power: f"1−10⁻{'⁰¹²³⁴⁵⁶'[power]}" for power in (3, 4, 5, 6)},
}


class Measured(NamedTuple):
    """``asked`` and ``later``, ``[gate, bin]``: shares of all tokens, still active at that gate or halted before."""

    edges: np.ndarray
    asked: np.ndarray
    later: np.ndarray
    quantiles: np.ndarray
    closed: np.ndarray
    lines: tuple[float | None, ...]
    meaning: str


def measure(trace: Trace) -> Measured:
    gates, depth = trace.by_iteration("gate"), trace["depth"][:, None]
    count = gates.shape[1]
    active = depth > np.arange(count)
    odds, lines = np.clip(log_odds(gates), -_END, _END), _lines(trace, count)
    # From end to end of what was said, thresholds included.
    ends = [odds.min(), odds.max(), *(_place(line) for line in lines if line is not None)]
    edges = np.linspace(min(ends) - 0.4, max(ends) + 0.4, BINS + 1)
    asked, later = (
        np.stack([np.histogram(odds[chosen[:, i], i], edges)[0] for i in range(count)]) / len(trace)
        for chosen in (active, ~active)
    )
    # A token of depth i + 1 was halted by gate i, if there was something left to decide.
    decides = np.arange(count) < trace.about.deepest - 1
    closed = ((depth == np.arange(count) + 1) & decides).mean(axis=0)
    quantiles = np.quantile(gates, [0.05, 0.5, 0.95], axis=0).T
    return Measured(edges, asked, later, quantiles, closed, lines, facts_of(trace.about).gate_meaning)


def log_odds(gates: np.ndarray) -> np.ndarray:
    """``log10(s / (1 - s))``; infinite at 0 and 1."""
    with np.errstate(divide="ignore"):
        return np.log10(gates) - np.log10(1.0 - gates)


def _lines(trace: Trace, count: int) -> tuple[float | None, ...]:
    """The threshold of each gate, where one decides."""
    if trace.about.tau is not None and facts_of(trace.about).gates_decide:
        return (*trace.about.tau, *[None] * count)[:count]
    if trace.about.policy.startswith("RouterThreshold"):
        return (0.5,) * count
    return (None,) * count


def draw(found: Measured, theme: Theme) -> Figure:
    count = len(found.asked)
    columns = min(count, 4)
    rows = -(-count // columns)
    figure = new_figure(width=PAGE, height=0.5 + 1.9 * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for i, axes in enumerate(panels[:count]):
        asked, whole = 100 * found.asked[i], 100 * (found.asked[i] + found.later[i])
        axes.stairs(asked, found.edges, fill=True, color=PALETTE[0], label="still active: it decides")
        axes.stairs(
            whole,
            found.edges,
            baseline=asked,
            fill=True,
            facecolor=theme.paper,
            edgecolor=theme.ink,
            hatch="//////",
            linewidth=0.5,
            label="halted before: it changes nothing",
        )
        line = found.lines[i]
        if line is not None:
            axes.axvline(_place(line), color=_LINE, linestyle="--", label="threshold")
        axes.set_xticks(*_ticks(found.edges[0], found.edges[-1]))
        axes.set_xlim(found.edges[0], found.edges[-1])
        axes.set_title(f"gate {i + 1}: halts {percent(float(found.closed[i]))}", loc="left")
        axes.set_xlabel(found.meaning)
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("tokens (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _place(threshold: float) -> float:
    return float(np.clip(log_odds(np.array(threshold)), -_END, _END))


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Round probabilities between these log-odds, far enough apart to be read."""
    chosen: dict[float, str] = {}
    for value, name in sorted(_TICKS.items(), key=lambda tick: abs(tick[0] - 0.5)):
        place = _place(value)
        apart = all(abs(place - other) >= (high - low) / 5 for other in chosen)
        if low <= place <= high and apart:
            chosen[place] = name
    return list(chosen), list(chosen.values())


def caption(found: Measured) -> str:
    said = listed(
        [
            f"gate {i + 1} halts {percent(float(share))} (median {found.quantiles[i, 1]:.2g})"
            for i, share in enumerate(found.closed)
        ]
    )
    return f"Of all tokens, {said}."


def table(found: Measured) -> pd.DataFrame:
    frame = pd.DataFrame(found.quantiles, columns=pd.Index(["5%", "median", "95%"]))
    frame.insert(0, "gate", range(1, len(frame) + 1))
    frame["threshold"] = [np.nan if line is None else line for line in found.lines]
    frame["asked"] = found.asked.sum(axis=1)
    frame["halts"] = found.closed
    return frame


PLATE = Plate(
    name="gates",
    title="What the gates said",
    alt="Histograms of each gate's value over all tokens on a log-odds axis, tokens that had halted before hatched, "
    "thresholds dashed.",
    missing=needs_gates,
    measure=measure,
    draw=draw,
    caption=caption,
    table=table,
)
