"""Figures of which tokens get more depth: by difficulty, and by frequency, position and source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from adaponder.analysis.figures.plate import DEPTH, Plate, depth_axis, needs_halting
from adaponder.analysis.figures.words import drawable
from adaponder.analysis.style import PAGE, PALETTE, Theme, depth_colours, depth_limits, new_figure, series
from adaponder.analysis.tables import Correlation, Means, geometric_bins, means, quantile_bins, rank_correlation
from adaponder.analysis.trace import Trace

DECILES = 10
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SOURCES = 10
_WINDOW_BINS = 16


@dataclass(frozen=True, eq=False)
class DepthByDifficulty(Plate):
    """Shows whether hard tokens get more depth; difficulty is the loss of a token's prediction after one iteration.

    That loss does not depend on the gates, so a token's depth has no influence on its difficulty.

    Attributes:
        deciles: depth by decile of difficulty.
        difficulty: mean difficulty of each decile.
        spread: ``[depth, quantile]``, difficulty of the tokens of each depth.
        rho, with_entropy: rank correlation of depth with difficulty, and with the entropy after one iteration.
    """

    name = "difficulty"
    title = "Difficulty against depth"
    alt = (
        "Left: mean depth for deciles of the tokens from easy to hard, with 95% intervals where there are documents "
        "enough. Right: boxes of difficulty for the tokens of each depth."
    )
    of_losses = True
    missing = staticmethod(needs_halting)

    deciles: Means
    difficulty: np.ndarray
    spread: np.ndarray
    tokens: np.ndarray
    rho: Correlation
    with_entropy: Correlation

    @classmethod
    def measure(cls, trace: Trace) -> Self:
        hard, depth, deepest = trace["full_nll_1"].astype(np.float64), trace["depth"], trace.about.deepest
        label = quantile_bins(hard, DECILES)
        deciles = means(trace, depth.astype(np.float64), label, int(label.max()) + 1)
        tokens = np.bincount(depth, minlength=deepest + 1)[1:]
        spread = np.full((deepest, len(_QUANTILES)), np.nan)
        for index in np.nonzero(tokens)[0]:
            spread[index] = np.quantile(hard[depth == index + 1], _QUANTILES)
        return cls(
            deciles=deciles,
            difficulty=np.bincount(label, weights=hard) / np.bincount(label),
            spread=spread,
            tokens=tokens,
            rho=rank_correlation(trace, hard, depth),
            with_entropy=rank_correlation(trace, trace["entropy_1"], depth),
        )

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=2.7)
        left, right = figure.subplots(1, 2)
        deciles, deepest = self.deciles, len(self.tokens)
        left.errorbar(
            self.difficulty,
            deciles.mean,
            yerr=deciles.bars,
            color=theme.ink,
            marker="o",
            markerfacecolor=PALETTE[0],
            linewidth=1.0,
            clip_on=False,
        )
        low, high = np.nanmin([deciles.mean, deciles.low]), np.nanmax([deciles.mean, deciles.high])
        # A minimal height, so that noise does not fill the panel.
        pad = max(0.1 * (high - low), 0.05 * (deepest - 1), 0.02)
        left.set_ylim(depth_limits(low, high, deepest, margin=pad))
        left.set_xlabel("NLL after one iteration (nats), deciles of all tokens")
        left.set_ylabel("mean depth (iterations)")
        left.set_title(f"Spearman's rho {self.rho}", loc="left")
        self._draw_boxes(right, theme)
        return figure

    def _draw_boxes(self, axes: Axes, theme: Theme) -> None:
        deepest = len(self.tokens)
        names = ("whislo", "q1", "med", "q3", "whishi")
        places = np.nonzero(self.tokens)[0] + 1
        boxes: list[dict[str, Any]] = [dict(zip(names, self.spread[depth - 1], strict=True)) for depth in places]
        drawn = axes.bxp(boxes, positions=places, widths=0.6, showfliers=False, patch_artist=True)
        for box, line, depth in zip(drawn["boxes"], drawn["medians"], places, strict=True):
            box.set(facecolor=depth_colours(deepest)[depth - 1], edgecolor=theme.ink)
            # White on black is visible on every colour of the ramp.
            line.set(color="black", linewidth=3.0)
            axes.plot(line.get_xdata(), line.get_ydata(), color="white", linewidth=1.4, zorder=line.get_zorder() + 1)
        for line in (*drawn["whiskers"], *drawn["caps"]):
            line.set(color=theme.ink, linewidth=0.9)
        depth_axis(axes, deepest)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(DEPTH)
        axes.set_ylabel("NLL after one iteration (nats)")
        axes.set_title("box: quartiles; whiskers: 5% and 95%", loc="left", color=theme.muted)

    def caption(self) -> str:
        if self.rho.rho is None:
            if (self.tokens > 0).sum() == 1:
                return f"Every token has depth {int(np.argmax(self.tokens)) + 1}: difficulty decided nothing."
            return "Every token is equally hard after one iteration: no correlation can be computed."
        ends = f"{self.deciles.mean[0]:.3f} in the easiest decile to {self.deciles.mean[-1]:.3f} in the hardest"
        return (
            f"Spearman's rho of depth with the loss after one iteration is {self.rho}{_significance(self.rho)}; "
            f"mean depth goes from {ends}. With the entropy after one iteration, which a gate can know, rho is "
            f"{self.with_entropy}."
        )

    def table(self) -> pd.DataFrame:
        frame = self.deciles.frame("mean depth")
        frame.insert(0, "NLL after one iteration", self.difficulty)
        return frame


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


class BinnedDepth(NamedTuple):
    """Holds the mean depth of tokens in bins; ``where`` is the mean binned value, or the name of the source."""

    where: np.ndarray
    depth: Means


@dataclass(frozen=True, eq=False)
class DepthByPlace(Plate):
    """Shows mean depth by frequency of the token, by position in document and window, and by source."""

    name = "depth"
    title = "Depth by frequency, position and source"
    alt = (
        "Four panels of mean depth, with 95% intervals where there are documents enough: by the token's frequency, by "
        "position in the document, by position in the window, and by source; the mean over all tokens dotted."
    )
    missing = staticmethod(needs_halting)

    frequency: BinnedDepth
    position: BinnedDepth
    window: BinnedDepth
    source: BinnedDepth
    with_frequency: Correlation
    with_position: Correlation
    mean: float
    deepest: int
    constant: bool

    @classmethod
    def measure(cls, trace: Trace) -> Self:
        depth = trace["depth"].astype(np.float64)
        in_window = trace["window_position"]
        return cls(
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

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=3.3 + 0.13 * max(0, len(self.source.where) - 6))
        panels = figure.subplots(2, 2).flatten()
        curves = (
            (panels[0], self.frequency, "times the token occurs in this text", True),
            (panels[1], self.position, "position in the document (tokens)", True),
            (panels[2], self.window, "position in the window (tokens)", False),
        )
        for index, (axes, curve, label, logarithmic) in enumerate(curves):
            axes.axhline(self.mean, color=theme.muted, linestyle=":", linewidth=1.0)
            axes.errorbar(curve.where, curve.depth.mean, yerr=curve.depth.bars, **series(index), clip_on=False)
            # Within a decade, a logarithmic axis may have no number at all.
            if logarithmic and curve.where.max() >= 20 * curve.where.min():
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel(label)
            axes.set_ylabel("mean depth")
            axes.set_ylim(*self._limits())
        self._draw_sources(panels[3], theme)
        return figure

    def _draw_sources(self, axes: Axes, theme: Theme) -> None:
        names, depth = self.source
        height = np.arange(len(names))[::-1]
        axes.axvline(self.mean, color=theme.muted, linestyle=":", linewidth=1.0)
        axes.errorbar(depth.mean, height, xerr=depth.bars, **{**series(3), "linestyle": "none"}, clip_on=False)
        labels = [f"{_short(name)} ({tokens:,})" for name, tokens in zip(names, depth.tokens, strict=True)]
        for tick in axes.set_yticks(height, labels):
            tick.label1.set_parse_math(False)
        axes.set_ylim(-0.6, len(names) - 0.4)
        low, high = np.nanmin([depth.mean, depth.low]), np.nanmax([depth.mean, depth.high])
        # A minimal width, so that a hundredth of an iteration does not fill the panel.
        pad = max(0.1 * (high - low), 0.02 * self.deepest)
        axes.set_xlim(depth_limits(low, high, self.deepest, margin=pad))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("mean depth by source (tokens)")

    def _limits(self) -> tuple[float, float]:
        """Returns the limits of the depth axis that all curves share; intervals of tiny bins may exceed them."""
        ends = [self.mean]
        for curve in (self.frequency, self.position, self.window):
            large = curve.depth.pick(curve.depth.share > 0.005)
            ends += [*curve.depth.mean, *large.low, *large.high]
        low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
        pad = max(0.08 * (high - low), 0.02 * self.deepest)
        return depth_limits(low, high, self.deepest, margin=pad)

    def caption(self) -> str:
        if self.constant:
            return f"Every token has depth {round(self.mean)}, whatever its frequency, position or source."
        frequency = self.frequency.depth
        names, depth = self.source
        if len(names) > 1:
            least, most = int(np.argmin(depth.mean)), int(np.argmax(depth.mean))
            where = (
                f"among sources it goes from {depth.mean[least]:.3f} ({names[least]}) "
                f"to {depth.mean[most]:.3f} ({names[most]})"
            )
        else:
            where = f"there is one source ({names[0]})"
        return (
            f"Mean depth is {frequency.mean[0]:.3f} for the rarest tokens of this text ({frequency.tokens[0]:,}) and "
            f"{frequency.mean[-1]:.3f} for the most frequent ({frequency.tokens[-1]:,}); Spearman's rho of depth "
            f"with frequency is {self.with_frequency}, with position in the document {self.with_position}; {where}."
        )

    def table(self) -> pd.DataFrame:
        frames = []
        for name in ("frequency", "position", "window", "source"):
            curve: BinnedDepth = getattr(self, name)
            frame = curve.depth.frame("mean depth")
            frame.insert(0, "by", name)
            frame.insert(1, "where", [str(w) if name == "source" else f"{w:,.1f}" for w in curve.where])
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)


def _binned(trace: Trace, depth: np.ndarray, values: np.ndarray, label: np.ndarray) -> BinnedDepth:
    """Returns the mean depth of each bin that has tokens."""
    bins, label = np.unique(label, return_inverse=True)
    where = np.bincount(label, weights=values) / np.bincount(label)
    return BinnedDepth(where, means(trace, depth, label, len(bins)))


def _sources(trace: Trace, depth: np.ndarray) -> BinnedDepth:
    """Returns the mean depth of the largest sources, and of all others together."""
    column = trace.frame["source"].cat
    label, names = column.codes.to_numpy(), column.categories
    tokens = np.bincount(label, minlength=len(names))
    largest = np.argsort(-tokens, kind="stable")[: min(SOURCES, np.count_nonzero(tokens))]
    group = np.full(len(names), len(largest))
    group[largest] = np.arange(len(largest))
    rest = np.count_nonzero(tokens) - len(largest)
    labels = [str(names[index]) for index in largest] + ([f"{rest:,} others"] if rest else [])
    return BinnedDepth(np.array(labels, object), means(trace, depth, group[label], len(labels)))


def _short(name: str) -> str:
    """Returns a label of at most 40 characters; long names keep their end, which tells most in a path."""
    return drawable(name if len(name) <= 22 else "…" + name[-21:], 40)
