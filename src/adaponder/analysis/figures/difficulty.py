"""Figures of which tokens get more depth: by difficulty, and by frequency, position and source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from adaponder.analysis.figures.plate import DEPTH, Plate, depth_axis, mean_depth_limits, needs_halting
from adaponder.analysis.figures.words import drawable
from adaponder.analysis.style import PAGE, PALETTE, Theme, depth_colours, depth_limits, new_figure, series
from adaponder.analysis.tables import Correlation, Means, geometric_bins, means, quantile_bins, rank_correlation
from adaponder.analysis.trace import Trace

DECILES = 10
_QUANTILES = {"whislo": 0.05, "q1": 0.25, "med": 0.5, "q3": 0.75, "whishi": 0.95}
SOURCES = 10
_WINDOW_BINS = 16


class DepthByDifficulty(Plate):
    """Shows whether hard tokens get more depth; difficulty is the loss of a token's prediction after one iteration.

    That loss does not depend on the gates, so a token's depth has no influence on its difficulty.

    Attributes:
        deciles: depth by decile of difficulty; ``difficulty`` is the mean of each decile.
        boxes: quantiles of the difficulty of the tokens of each depth that has any.
        rho, with_entropy: rank correlation of depth with difficulty, and with the entropy after one iteration.
    """

    name = "difficulty"
    title = "Difficulty against depth"
    alt = (
        "Left: mean depth for deciles of the tokens from easy to hard, with 95% intervals where there are documents "
        "enough. Right: boxes of difficulty for the tokens of each depth."
    )
    missing = staticmethod(needs_halting)

    def __init__(self, trace: Trace):
        trace = trace.scored
        hard, depth = trace["full_nll_1"].astype(np.float64), trace["depth"]
        self.deepest = trace.about.deepest
        label = quantile_bins(hard, DECILES)
        self.deciles = means(trace, depth.astype(np.float64), label, int(label.max()) + 1)
        self.difficulty = np.bincount(label, weights=hard) / np.bincount(label)
        self.boxes: dict[int, dict[str, Any]] = {
            present: dict(zip(_QUANTILES, np.quantile(hard[depth == present], [*_QUANTILES.values()]), strict=True))
            for present in np.unique(depth).tolist()
        }
        self.rho = rank_correlation(trace, hard, depth)
        self.with_entropy = rank_correlation(trace, trace["entropy_1"], depth)

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=2.7)
        left, right = figure.subplots(1, 2)
        left.errorbar(
            self.difficulty,
            self.deciles.mean,
            yerr=self.deciles.bars,
            color=theme.ink,
            marker="o",
            markerfacecolor=PALETTE[0],
            linewidth=1.0,
            clip_on=False,
        )
        left.set(
            ylim=mean_depth_limits(self.deciles, self.deepest, least=max(0.05 * (self.deepest - 1), 0.02)),
            xlabel="NLL after one iteration (nats), deciles of all tokens",
            ylabel="mean depth (iterations)",
            title=f"Spearman's rho {self.rho}",
        )
        self._draw_boxes(right, theme)
        return figure

    def _draw_boxes(self, axes: Axes, theme: Theme) -> None:
        drawn = axes.bxp(
            list(self.boxes.values()), positions=list(self.boxes), widths=0.6, showfliers=False, patch_artist=True
        )
        for box, line, depth in zip(drawn["boxes"], drawn["medians"], self.boxes, strict=True):
            box.set(facecolor=depth_colours(self.deepest)[depth - 1], edgecolor=theme.ink)
            # White on black is visible on every colour of the ramp.
            line.set(color="black", linewidth=3.0)
            axes.plot(line.get_xdata(), line.get_ydata(), color="white", linewidth=1.4, zorder=line.get_zorder() + 1)
        for line in (*drawn["whiskers"], *drawn["caps"]):
            line.set(color=theme.ink, linewidth=0.9)
        depth_axis(axes, self.deepest)
        axes.set_ylim(bottom=0)
        axes.set(xlabel=DEPTH, ylabel="NLL after one iteration (nats)")
        axes.set_title("box: quartiles; whiskers: 5% and 95%", color=theme.muted)

    def caption(self) -> str:
        if len(self.boxes) == 1:
            return f"Every token has depth {next(iter(self.boxes))}: difficulty decided nothing."
        if self.rho.rho is None:
            return "Every token is equally hard after one iteration: no correlation can be computed."
        ends = f"{self.deciles.mean[0]:.3f} in the easiest decile to {self.deciles.mean[-1]:.3f} in the hardest"
        return (
            f"Spearman's rho of depth with the loss after one iteration is {self.rho}{_significance(self.rho)}; "
            f"mean depth goes from {ends}. With the entropy after one iteration, which a gate can know, rho is "
            f"{self.with_entropy}."
        )

    def table(self) -> pd.DataFrame:
        return self.deciles.frame("mean depth", **{"NLL after one iteration": self.difficulty})


def _significance(rho: Correlation) -> str:
    """Returns what the interval says about the correlation, as the end of a sentence."""
    assert rho.rho is not None
    if rho.interval is None:
        return ", with too few documents for an interval"
    if rho.interval.low <= 0.0 <= rho.interval.high:
        return ", not significantly different from zero"
    direction = "harder tokens get more depth" if rho.rho > 0 else "harder tokens get less depth"
    strength = "weakly" if abs(rho.rho) < 0.3 else "clearly" if abs(rho.rho) < 0.6 else "strongly"
    return f": {strength}, {direction}"


class DepthByPlace(Plate):
    """Shows mean depth by frequency of the token, by position in document and window, and by source.

    ``curves`` and ``sources`` are pairs: the mean binned value (or the names of the sources), and depths.
    """

    name = "depth"
    title = "Depth by frequency, position and source"
    alt = (
        "Four panels of mean depth, with 95% intervals where there are documents enough: by the token's frequency, by "
        "position in the document, by position in the window, and by source; the mean over all tokens dotted."
    )
    missing = staticmethod(needs_halting)

    def __init__(self, trace: Trace):
        depth = trace["depth"].astype(np.float64)
        count, position, in_window = trace["count"], trace["position"] + 1, trace["window_position"]
        self.curves = {
            "frequency": _binned(trace, depth, count, geometric_bins(count)),
            "position": _binned(trace, depth, position, geometric_bins(position)),
            "window": _binned(trace, depth, in_window + 1, in_window // -(-trace.about.window // _WINDOW_BINS)),
        }
        self.sources = _sources(trace, depth)
        self.with_frequency = rank_correlation(trace, count, depth)
        self.with_position = rank_correlation(trace, trace["position"], depth)
        self.mean, self.deepest = float(depth.mean()), trace.about.deepest
        self.constant = bool(depth.min() == depth.max())

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=3.3 + 0.13 * max(0, len(self.sources[0]) - 6))
        *panels, last = figure.subplots(2, 2).flatten()
        labels = (
            "times the token occurs in this text",
            "position in the document (tokens)",
            "position in the window (tokens)",
        )
        for index, (axes, (name, (where, depth)), label) in enumerate(
            zip(panels, self.curves.items(), labels, strict=True)
        ):
            axes.axhline(self.mean, color=theme.muted, linestyle=":", linewidth=1.0)
            axes.errorbar(where, depth.mean, yerr=depth.bars, **series(index), clip_on=False)
            # Within a decade, a logarithmic axis may have no number at all.
            if name != "window" and where.max() >= 20 * where.min():
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set(xlabel=label, ylabel="mean depth", ylim=self._limits())
        self._draw_sources(last, theme)
        return figure

    def _draw_sources(self, axes: Axes, theme: Theme) -> None:
        names, depth = self.sources
        height = np.arange(len(names))[::-1]
        axes.axvline(self.mean, color=theme.muted, linestyle=":", linewidth=1.0)
        axes.errorbar(depth.mean, height, xerr=depth.bars, **{**series(3), "linestyle": "none"}, clip_on=False)
        labels = [f"{_short(name)} ({tokens:,})" for name, tokens in zip(names, depth.tokens, strict=True)]
        for tick in axes.set_yticks(height, labels):
            tick.label1.set_parse_math(False)
        xlim = mean_depth_limits(depth, self.deepest, least=0.02 * self.deepest)
        axes.set(ylim=(-0.6, len(names) - 0.4), xlim=xlim, xlabel="mean depth by source (tokens)")
        axes.grid(visible=False, axis="y")

    def _limits(self) -> tuple[float, float]:
        """Returns the limits of the depth axis that all curves share; intervals of tiny bins may exceed them."""
        ends = [self.mean]
        for _, depth in self.curves.values():
            large = depth.pick(depth.share > 0.005)
            ends += [*depth.mean, *large.low, *large.high]
        low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
        return depth_limits(low, high, self.deepest, margin=max(0.08 * (high - low), 0.02 * self.deepest))

    def caption(self) -> str:
        if self.constant:
            return f"Every token has depth {round(self.mean)}, whatever its frequency, position or source."
        frequency = self.curves["frequency"][1]
        names, depth = self.sources
        where = f"there is one source ({names[0]})"
        if len(names) > 1:
            least, most = int(np.argmin(depth.mean)), int(np.argmax(depth.mean))
            where = (
                f"among sources it goes from {depth.mean[least]:.3f} ({names[least]}) "
                f"to {depth.mean[most]:.3f} ({names[most]})"
            )
        return (
            f"Mean depth is {frequency.mean[0]:.3f} for the rarest tokens of this text ({frequency.tokens[0]:,}) and "
            f"{frequency.mean[-1]:.3f} for the most frequent ({frequency.tokens[-1]:,}); Spearman's rho of depth "
            f"with frequency is {self.with_frequency}, with position in the document {self.with_position}; {where}."
        )

    def table(self) -> pd.DataFrame:
        frames = [
            depth.frame("mean depth", by=name, where=[f"{value:,.1f}" for value in where])
            for name, (where, depth) in self.curves.items()
        ]
        names, depth = self.sources
        return pd.concat([*frames, depth.frame("mean depth", by="source", where=names)], ignore_index=True)


def _binned(trace: Trace, depth: np.ndarray, values: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, Means]:
    """Returns the mean value and the mean depth of each bin that has tokens."""
    bins, label = np.unique(label, return_inverse=True)
    return np.bincount(label, weights=values) / np.bincount(label), means(trace, depth, label, len(bins))


def _sources(trace: Trace, depth: np.ndarray) -> tuple[list[str], Means]:
    """Returns the names and mean depths of the largest sources, and of all others together."""
    column = trace.frame["source"].cat
    label, names = column.codes.to_numpy(), column.categories
    tokens = np.bincount(label, minlength=len(names))
    largest = np.argsort(-tokens, kind="stable")[: min(SOURCES, np.count_nonzero(tokens))]
    group = np.full(len(names), len(largest))
    group[largest] = np.arange(len(largest))
    rest = np.count_nonzero(tokens) - len(largest)
    labels = [str(names[index]) for index in largest] + ([f"{rest:,} others"] if rest else [])
    return labels, means(trace, depth, group[label], len(labels))


def _short(name: str) -> str:
    """Returns a label of at most 40 characters; long names keep their end, which tells most in a path."""
    return drawable(name if len(name) <= 22 else "…" + name[-21:], 40)
