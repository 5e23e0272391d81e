"""Histograms of the gates' values, in log-odds: so that values near 0, where tokens halt, and near 1 are told apart."""

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
# Closer to 1 than this float32 has no more values.
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
    """``deciding`` and ``later``, ``[gate, bin]``: shares of all tokens, active at that gate or halted before it."""

    edges: np.ndarray
    deciding: np.ndarray
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
    # The axis spans all gates and thresholds.
    ends = [odds.min(), odds.max(), *(_clipped_log_odds(line) for line in lines if line is not None)]
    edges = np.linspace(min(ends) - 0.4, max(ends) + 0.4, BINS + 1)
    deciding, later = (
        np.stack([np.histogram(odds[chosen[:, i], i], edges)[0] for i in range(count)]) / len(trace)
        for chosen in (active, ~active)
    )
    # A token of depth i + 1 was halted by gate i, if there was something left to decide.
    decides = np.arange(count) < trace.about.deepest - 1
    closed = ((depth == np.arange(count) + 1) & decides).mean(axis=0)
    quantiles = np.quantile(gates, [0.05, 0.5, 0.95], axis=0).T
    return Measured(edges, deciding, later, quantiles, closed, lines, facts_of(trace.about).gate_meaning)


def log_odds(gates: np.ndarray) -> np.ndarray:
    """``log10(s / (1 - s))``; infinite at 0 and 1."""
    with np.errstate(divide="ignore"):
        return np.log10(gates) - np.log10(1.0 - gates)


def _lines(trace: Trace, count: int) -> tuple[float | None, ...]:
    """The threshold of each gate; ``None`` where the policy has none."""
    if trace.about.tau is not None and facts_of(trace.about).gates_decide:
        return (*trace.about.tau, *[None] * count)[:count]
    if trace.about.policy.startswith("router"):
        return (0.5,) * count
    return (None,) * count


def draw(measured: Measured, theme: Theme) -> Figure:
    count = len(measured.deciding)
    columns = min(count, 4)
    rows = -(-count // columns)
    figure = new_figure(width=PAGE, height=0.5 + 1.9 * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for i, axes in enumerate(panels[:count]):
        deciding, whole = 100 * measured.deciding[i], 100 * (measured.deciding[i] + measured.later[i])
        axes.stairs(deciding, measured.edges, fill=True, color=PALETTE[0], label="still active: it decides")
        axes.stairs(
            whole,
            measured.edges,
            baseline=deciding,
            fill=True,
            facecolor=theme.paper,
            edgecolor=theme.ink,
            hatch="//////",
            linewidth=0.5,
            label="halted before: it changes nothing",
        )
        line = measured.lines[i]
        if line is not None:
            axes.axvline(_clipped_log_odds(line), color=_LINE, linestyle="--", label="threshold")
        axes.set_xticks(*_ticks(measured.edges[0], measured.edges[-1], apart=0.2 if columns < 4 else 0.25))
        axes.set_xlim(measured.edges[0], measured.edges[-1])
        axes.set_title(f"gate {i + 1}: halts {percent(float(measured.closed[i]))}", loc="left")
        axes.set_xlabel(measured.meaning)
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("tokens (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _clipped_log_odds(threshold: float) -> float:
    """Log-odds of a threshold, within the ends of the axis."""
    return float(np.clip(log_odds(np.array(threshold)), -_END, _END))


def _ticks(low: float, high: float, *, apart: float) -> tuple[list[float], list[str]]:
    """(log-odds, labels) of round probabilities on this axis, at least this share of it ``apart``."""
    chosen: dict[float, str] = {}
    for value, name in sorted(_TICKS.items(), key=lambda tick: abs(tick[0] - 0.5)):
        odds = _clipped_log_odds(value)
        if low <= odds <= high and all(abs(odds - other) >= apart * (high - low) for other in chosen):
            chosen[odds] = name
    return list(chosen), list(chosen.values())


def caption(measured: Measured) -> str:
    said = listed(
        [
            f"gate {i + 1} halts {percent(float(share))} (median {measured.quantiles[i, 1]:.2g})"
            for i, share in enumerate(measured.closed)
        ]
    )
    return f"Of all tokens, {said}."


def table(measured: Measured) -> pd.DataFrame:
    frame = pd.DataFrame(measured.quantiles, columns=pd.Index(["5%", "median", "95%"]))
    frame.insert(0, "gate", range(1, len(frame) + 1))
    frame["threshold"] = [np.nan if line is None else line for line in measured.lines]
    frame["asked"] = measured.deciding.sum(axis=1)
    frame["halts"] = measured.closed
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
