"""Mean loss, number of tokens and distribution of losses by halting iteration; the paper reports a check mark."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from adaponder.analysis.figures.plate import (
    DEPTH,
    Plate,
    depth_axis,
    listed,
    nats,
    needs_nothing,
    percent,
    times,
)
from adaponder.analysis.style import PAGE, Theme, density_map, depth_colours, new_figure
from adaponder.analysis.tables import Means, adds_up, means
from adaponder.analysis.trace import Trace

BINS = 40
_CHECK_MARK = "the paper's check mark (\N{CHECK MARK}), where loss falls to a middle depth and is highest at the last"


class Measured(NamedTuple):
    """``groups`` has an entry per depth; ``density[bin, depth]``, per nat, integrates to at most 1 at each depth."""

    groups: Means
    density: np.ndarray
    medians: np.ndarray
    clip: float
    beyond: float
    loss: float


def measure(trace: Trace) -> Measured:
    deepest, nll, label = trace.about.deepest, trace["nll"], trace["depth"].astype(np.int64) - 1
    groups = means(trace, nll, label, deepest)
    adds_up(groups.share, groups.mean, trace.loss)
    # The highest one percent of losses would compress the rest.
    clip = max(float(np.quantile(nll, 0.99)), 1e-6)
    edges = np.linspace(0.0, clip, BINS + 1)
    histograms = [np.histogram(nll[label == depth], edges)[0] for depth in range(deepest)]
    with np.errstate(invalid="ignore", divide="ignore"):
        density = np.stack(histograms, axis=1) / groups.tokens / (edges[1] - edges[0])
    medians = [np.median(nll[label == depth]) if groups.tokens[depth] else np.nan for depth in range(deepest)]
    return Measured(groups, density, np.array(medians), clip, float((nll > clip).mean()), trace.loss)


def draw(measured: Measured, theme: Theme) -> Figure:
    figure = new_figure(width=PAGE, height=3.5)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2), width_ratios=(1, 1.15))
    top, below, right = (figure.add_subplot(cell) for cell in (grid[0, 0], grid[1, 0], grid[:, 1]))
    _draw_means(top, measured, theme)
    groups, deepest = measured.groups, len(measured.medians)
    bars = below.bar(range(1, deepest + 1), 100 * groups.share, width=0.7, color=depth_colours(deepest))
    below.bar_label(bars, [f"{tokens:,}" for tokens in groups.tokens], fontsize=7, padding=1)
    below.set_ylim(0, 125 * groups.share.max())
    below.set_ylabel("tokens (%)")
    below.set_xlabel(DEPTH)
    depth_axis(below, deepest)
    image = _draw_density(right, measured, theme)
    figure.colorbar(image, ax=right, label="share of that depth's tokens per nat", pad=0.02)
    return figure


def _draw_means(axes: Axes, measured: Measured, theme: Theme) -> None:
    deepest = len(measured.medians)
    groups, depths = measured.groups, np.arange(1, deepest + 1)
    axes.axhline(measured.loss, color=theme.muted, linestyle=":", linewidth=1.0)
    # A depth without tokens has a mean of NaN, where the line breaks: between its neighbours nothing was measured.
    axes.errorbar(depths, groups.mean, yerr=groups.bars, color=theme.ink, linewidth=1.0, zorder=2)
    axes.scatter(depths, groups.mean, c=depth_colours(deepest), edgecolors=theme.ink, s=36, zorder=3)
    low, high = np.nanmin([groups.mean, groups.low]), np.nanmax([groups.mean, groups.high])
    pad = 0.25 * max(high - low, 0.2 * abs(measured.loss), 0.1)
    axes.set_ylim(max(0.0, low - pad), high + pad)
    axes.set_title(f"dotted: all tokens, {measured.loss:.3f}", loc="left", color=theme.muted)
    axes.set_ylabel("mean NLL (nats)")
    depth_axis(axes, deepest)
    axes.tick_params(labelbottom=False)


def _draw_density(axes: Axes, measured: Measured, theme: Theme) -> AxesImage:
    deepest, depths = len(measured.medians), np.arange(1, len(measured.medians) + 1)
    image = axes.imshow(
        measured.density,
        origin="lower",
        aspect="auto",
        extent=(0.5, deepest + 0.5, 0.0, measured.clip),
        cmap=density_map(theme),
        vmin=0.0,
        interpolation="nearest",
    )
    for edge in depths[:-1] + 0.5:
        axes.axvline(edge, color=theme.paper, linewidth=2.0)
    # White on black is visible on every shade.
    for colour, width in (("black", 3.6), ("white", 1.8)):
        axes.plot(depths, measured.medians, "_", color=colour, markeredgewidth=width, markersize=13 + width)
    axes.plot(depths, measured.groups.mean, "o", color="white", markeredgecolor="black")
    for depth in depths[measured.groups.tokens == 0]:
        axes.text(depth, measured.clip / 2, "no tokens", ha="center", va="center", rotation=90, color=theme.muted)
    depth_axis(axes, deepest)
    axes.set_xlim(0.5, deepest + 0.5)
    axes.set_ylim(0.0, measured.clip)
    axes.grid(visible=False)
    axes.set_title("circle: mean; bar: median", loc="left", color=theme.muted)
    axes.set_xlabel(DEPTH)
    axes.set_ylabel("NLL (nats)")
    return image


def caption(measured: Measured) -> str:
    groups = measured.groups
    mean = {int(index) + 1: float(groups.mean[index]) for index in np.nonzero(groups.tokens)[0]}
    tail = f" The {percent(measured.beyond)} of losses above {measured.clip:.1f} nats are outside the map."
    if len(mean) == 1:
        depth = next(iter(mean))
        return (
            f"Every token was read {times(depth)}, with a mean NLL of {nats(mean[depth])}: "
            f"there is no second group to compare with.{tail}"
        )
    said = listed([f"{value:.3f} at depth {d} ({percent(float(groups.share[d - 1]))})" for d, value in mean.items()])
    return f"Mean NLL is {said}; shares times means add up to {nats(measured.loss)}. {_shape(groups)}{tail}"


def _shape(groups: Means) -> str:
    """The shape of the curve of mean losses in words, and whether it may be chance."""
    some = np.nonzero(groups.tokens)[0]
    mean = groups.mean[some]
    first, last, lowest, highest = some[0], some[-1], some[np.argmin(mean)], some[np.argmax(mean)]
    turns, ends = f"lowest at depth {lowest + 1}, highest at depth {highest + 1}", [(lowest, highest)]
    if first < lowest < last == highest:
        words, ends = f"This is {_CHECK_MARK}: {turns}", [(lowest, first), (lowest, last)]
    elif (np.diff(mean) > 0).all():
        words = f"Loss rises with depth: tokens that halt early are the easier ones, without {_CHECK_MARK}"
    elif (np.diff(mean) < 0).all():
        words = "Loss falls with depth: tokens that halt early are the harder ones, the opposite of the paper's claim"
    else:
        words = f"This is not {_CHECK_MARK}: {turns}"
    if all(groups.high[below] < groups.low[above] for below, above in ends):
        return f"{words}."
    reason = "there are too few documents for intervals" if np.isnan(groups.low[some]).any() else "intervals overlap"
    return f"{words}; it may be chance, {reason}."


def table(measured: Measured) -> pd.DataFrame:
    frame = measured.groups.frame("mean NLL")
    frame.insert(0, "depth", range(1, len(frame) + 1))
    frame["median NLL"] = measured.medians
    frame["share x mean"] = measured.groups.share * measured.groups.mean
    return frame


PLATE = Plate(
    name="halting",
    title="Loss by halting iteration",
    alt="Points: mean loss of the tokens of each depth, with 95% intervals where there are documents enough. "
    "Bars: how many tokens have that depth. Map: how losses spread at each depth.",
    missing=needs_nothing,
    measure=measure,
    draw=draw,
    caption=caption,
    table=table,
    of_losses=True,
)
