"""Mean depth by frequency of the token, by position in document and window, and by source."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from adaponder.analysis.figures.plate import Plate, needs_halting, times
from adaponder.analysis.figures.words import drawable
from adaponder.analysis.style import PAGE, Theme, depth_limits, new_figure, series
from adaponder.analysis.tables import Correlation, Means, geometric_bins, means, rank_correlation
from adaponder.analysis.trace import Trace

SOURCES = 10
_WINDOW_BINS = 16


class Curve(NamedTuple):
    """Mean depth of tokens in bins; ``where`` is the mean of the binned value, or the name of the source."""

    where: np.ndarray
    depth: Means


class Measured(NamedTuple):
    """Depth by frequency, position, window position and source, and its rank correlation with the first two."""

    frequency: Curve
    position: Curve
    window: Curve
    source: Curve
    with_frequency: Correlation
    with_position: Correlation
    mean: float
    deepest: int
    constant: bool


def measure(trace: Trace) -> Measured:
    depth = trace["depth"].astype(np.float64)
    in_window = trace["window_position"]
    return Measured(
        frequency=_binned(trace, depth, trace["count"], geometric_bins(trace["count"])),
        position=_binned(trace, depth, trace["position"] + 1, geometric_bins(trace["position"] + 1)),
        window=_binned(trace, depth, in_window + 1, in_window // -(-trace.about.window // _WINDOW_BINS)),
        source=_sources(trace, depth),
        with_frequency=rank_correlation(trace, trace["count"], depth),
        with_position=rank_correlation(trace, trace["position"], depth),
        mean=float(depth.mean()),
        deepest=trace.about.deepest,
        constant=bool(depth.min() == depth.max()),
    )


def _binned(trace: Trace, depth: np.ndarray, values: np.ndarray, label: np.ndarray) -> Curve:
    """Mean depth of each bin that has tokens."""
    kept, label = np.unique(label, return_inverse=True)
    where = np.bincount(label, weights=values) / np.bincount(label)
    return Curve(where, means(trace, depth, label, len(kept)))


def _sources(trace: Trace, depth: np.ndarray) -> Curve:
    """Mean depth of the largest sources, and of all others together."""
    column = trace.frame["source"].cat
    label, names = column.codes.to_numpy(), column.categories
    tokens = np.bincount(label, minlength=len(names))
    largest = np.argsort(-tokens, kind="stable")[: min(SOURCES, np.count_nonzero(tokens))]
    group = np.full(len(names), len(largest))
    group[largest] = np.arange(len(largest))
    rest = np.count_nonzero(tokens) - len(largest)
    shown = [str(names[index]) for index in largest] + ([f"{rest:,} others"] if rest else [])
    return Curve(np.array(shown, object), means(trace, depth, group[label], len(shown)))


def draw(measured: Measured, theme: Theme) -> Figure:
    figure = new_figure(width=PAGE, height=3.3 + 0.13 * max(0, len(measured.source.where) - 6))
    panels = figure.subplots(2, 2).flatten()
    curves = (
        (panels[0], measured.frequency, "times the token occurs in this text", True),
        (panels[1], measured.position, "position in the document (tokens)", True),
        (panels[2], measured.window, "position in the window (tokens)", False),
    )
    for index, (axes, curve, label, logarithmic) in enumerate(curves):
        axes.axhline(measured.mean, color=theme.muted, linestyle=":", linewidth=1.0)
        axes.errorbar(curve.where, curve.depth.mean, yerr=curve.depth.bars, **series(index), clip_on=False)
        # Within a decade, a logarithmic axis may have no number at all.
        if logarithmic and curve.where.max() >= 20 * curve.where.min():
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        axes.set_ylabel("mean depth")
        axes.set_ylim(*_limits(measured))
    _draw_sources(panels[3], measured, theme)
    return figure


def _draw_sources(axes: Axes, measured: Measured, theme: Theme) -> None:
    names, depth = measured.source
    height = np.arange(len(names))[::-1]
    axes.axvline(measured.mean, color=theme.muted, linestyle=":", linewidth=1.0)
    axes.errorbar(depth.mean, height, xerr=depth.bars, **{**series(3), "linestyle": "none"}, clip_on=False)
    labels = [f"{_short(name)} ({tokens:,})" for name, tokens in zip(names, depth.tokens, strict=True)]
    for tick in axes.set_yticks(height, labels):
        tick.label1.set_parse_math(False)
    axes.set_ylim(-0.6, len(names) - 0.4)
    low, high = np.nanmin([depth.mean, depth.low]), np.nanmax([depth.mean, depth.high])
    # A minimal width, so that a hundredth of an iteration does not fill the panel.
    pad = max(0.1 * (high - low), 0.02 * measured.deepest)
    axes.set_xlim(depth_limits(low, high, measured.deepest, margin=pad))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("mean depth by source (tokens)")


def _short(name: str) -> str:
    """A label of at most 40 characters; long names keep their end, the telling part of a path."""
    return drawable(name if len(name) <= 22 else "…" + name[-21:], 40)


def _limits(measured: Measured) -> tuple[float, float]:
    """Limits of the depth axis that all curves share; intervals of tiny bins may exceed them."""
    ends = [measured.mean]
    for curve in (measured.frequency, measured.position, measured.window):
        kept = curve.depth.pick(curve.depth.share > 0.005)
        ends += [*curve.depth.mean, *kept.low, *kept.high]
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    pad = max(0.08 * (high - low), 0.02 * measured.deepest)
    return depth_limits(low, high, measured.deepest, margin=pad)


def caption(measured: Measured) -> str:
    if measured.constant:
        return f"Every token was read {times(round(measured.mean))}, whatever its frequency, place or source."
    often = measured.frequency.depth
    names, depth = measured.source
    if len(names) > 1:
        least, most = int(np.argmin(depth.mean)), int(np.argmax(depth.mean))
        where = (
            f"among sources it goes from {depth.mean[least]:.3f} ({names[least]}) "
            f"to {depth.mean[most]:.3f} ({names[most]})"
        )
    else:
        where = f"there is one source ({names[0]})"
    return (
        f"Mean depth is {often.mean[0]:.3f} for the rarest tokens of this text ({often.tokens[0]:,} of them) and "
        f"{often.mean[-1]:.3f} for the most frequent ({often.tokens[-1]:,}); Spearman's rho of depth with frequency is "
        f"{measured.with_frequency}, with position in the document {measured.with_position}; {where}."
    )


def table(measured: Measured) -> pd.DataFrame:
    frames = []
    for name in ("frequency", "position", "window", "source"):
        curve: Curve = getattr(measured, name)
        frame = curve.depth.frame("mean depth")
        frame.insert(0, "by", name)
        frame.insert(1, "where", [str(w) if name == "source" else f"{w:,.1f}" for w in curve.where])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


PLATE = Plate(
    name="depth",
    title="Depth by frequency, position and source",
    alt="Four panels of mean depth, with 95% intervals where there are documents enough: by the token's frequency, by "
    "position in the document, by position in the window, and by source; the mean over all tokens dotted.",
    missing=needs_halting,
    measure=measure,
    draw=draw,
    caption=caption,
    table=table,
)
