"""Draws figures of depth: tokens active in each iteration, values of the gates, and which tokens get more depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogitLocator, NullFormatter, StrMethodFormatter

from adaponder.analysis import tables
from adaponder.analysis.figures.plate import (
    DEPTH,
    Plate,
    depth_axis,
    iteration_axis,
    listed,
    mean_depth_limits,
    percent,
    traced_method,
)
from adaponder.analysis.figures.words import drawable
from adaponder.analysis.style import PAGE, PALETTE, Theme, depth_colours, depth_limits, new_figure, series
from adaponder.analysis.trace import Trace

BINS = 40
DECILES = 10
SOURCES = 10
_WINDOW_BINS = 16
_QUANTILES = {"whislo": 0.05, "q1": 0.25, "med": 0.5, "q3": 0.75, "whishi": 0.95}
# Gates are clipped to this distance from 0 and 1; float32 has hardly any values closer to 1.
_END = 1e-7


class ActiveTokens(Plate):
    """Shows the share of tokens active in each iteration; the shares add up to the mean depth."""

    name = "active"
    title = "Tokens active in each iteration"
    alt = "Bars: the share of tokens that are active in each iteration."
    needs = ("halting",)

    def __init__(self, trace: Trace):
        self.iterations = np.arange(1, trace.about.deepest + 1)
        # A token of depth D is active in iterations 1 … D.
        self.tokens = (trace["depth"][:, None] >= self.iterations).sum(axis=0)
        self.shares = self.tokens / len(trace)
        self.numbers = tables.numbers(trace)

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=2.2)
        axes = figure.subplots()
        # One colour, as the depth colours stand for depths of tokens, and these are iterations.
        bars = axes.bar(self.iterations, 100 * self.shares, width=0.7, color=PALETTE[0])
        axes.bar_label(bars, [percent(share) for share in self.shares], padding=2)
        iteration_axis(axes, self.iterations)
        axes.set(ylim=(0, 118), yticks=range(0, 101, 25), xlabel="iteration", ylabel="active tokens (%)")
        axes.set_title(f"mean {self.numbers.iterations:.3f} of {len(self.shares)} iterations", loc="right")
        return figure

    def caption(self) -> str:
        shares, overall = listed([percent(share) for share in self.shares]), self.numbers
        iterations = "iteration 1" if len(self.shares) == 1 else f"iterations 1 to {len(self.shares)}"
        closed = "" if overall.gates_closed is None else f", {percent(overall.gates_closed)} of gates are closed"
        return (
            f"In {iterations} {shares} of the tokens are active, which adds up to {overall.iterations:.3f} "
            f"iterations per token; {percent(overall.halted)} of tokens halt early{closed}, and the text costs "
            f"{overall.flops_ratio:.2f} times the FLOPs of the plain backbone."
        )

    def table(self) -> pd.DataFrame:
        return pd.DataFrame({"iteration": self.iterations, "active tokens": self.tokens, "share": self.shares})


class GateValues(Plate):
    """Shows histograms of the gates' values on an axis of log-odds, which spreads the values near 0 and near 1.

    Attributes:
        deciding: histogram ``[gate, bin]`` of the tokens active at the gate, as shares of all tokens.
        later: the same for tokens that had halted before the gate.
        closed: share of all tokens that each gate halted.
        lines: threshold of each gate; ``None`` for gates without a threshold.
        quantiles: 5 %, 50 % and 95 % quantile of each gate's values, ``[gate, 3]``.
    """

    name = "gates"
    title = "Values of the gates"
    alt = (
        "Histograms of each gate's value over all tokens on a log-odds axis, tokens that had halted before hatched, "
        "thresholds dashed."
    )
    needs = ("gates",)

    def __init__(self, trace: Trace):
        gates, depth = trace.by_iteration("gate"), trace["depth"][:, None]
        count = gates.shape[1]
        active = depth > np.arange(count)
        method, tau = traced_method(trace.about), trace.about.tau
        self.meaning = method.gate_meaning
        self.lines: tuple[float | None, ...] = (0.5 if trace.about.policy.startswith("router") else None,) * count
        if tau is not None and method.gates_decide:
            self.lines = (*tau, *[None] * count)[:count]
        odds = _log_odds(gates)
        # The axis spans all gates and thresholds.
        ends = [odds.min(), odds.max(), *(_log_odds(line) for line in self.lines if line is not None)]
        edges = np.linspace(min(ends) - 0.4, max(ends) + 0.4, BINS + 1)
        self.edges = 1 / (1 + 10**-edges)
        self.deciding, self.later = (
            np.stack([np.histogram(odds[mask[:, i], i], edges)[0] for i in range(count)]) / len(trace)
            for mask in (active, ~active)
        )
        # A token of depth i + 1 was halted by gate i, if there was something left to decide.
        decides = np.arange(count) < trace.about.deepest - 1
        self.closed = ((depth == np.arange(count) + 1) & decides).mean(axis=0)
        self.quantiles = np.quantile(gates, [0.05, 0.5, 0.95], axis=0).T

    def draw(self, theme: Theme) -> Figure:
        columns = min(len(self.deciding), 4)
        rows = -(-len(self.deciding) // columns)
        figure = new_figure(width=PAGE, height=0.5 + 1.9 * rows)
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
        halted: dict[str, Any] = {"facecolor": theme.paper, "edgecolor": theme.ink, "hatch": "//////", "linewidth": 0.5}
        halted |= {"fill": True, "label": "tokens halted before (no effect)"}
        for i, axes in enumerate(panels[: len(self.deciding)]):
            deciding, both = 100 * self.deciding[i], 100 * (self.deciding[i] + self.later[i])
            axes.stairs(deciding, self.edges, fill=True, color=PALETTE[0], label="active tokens")
            axes.stairs(both, self.edges, baseline=deciding, **halted)
            if (line := self.lines[i]) is not None:
                # Vermilion stands out from the blue bars and from paper, dark or white.
                axes.axvline(line, color=PALETTE[2], linestyle="--", label="threshold")
            axes.set_xscale("logit", one_half="½")
            axes.xaxis.set_major_locator(LogitLocator(nbins=4))
            title = f"gate {i + 1}: halts {percent(self.closed[i])}"
            axes.set(xlim=(self.edges[0], self.edges[-1]), title=title, xlabel=self.meaning)
        for axes in panels[len(self.deciding) :]:
            axes.set_visible(False)
        for axes in panels[::columns]:
            axes.set_ylabel("tokens (%)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return figure

    def caption(self) -> str:
        gates = enumerate(zip(self.closed, self.quantiles[:, 1], strict=True), 1)
        by_gate = [f"gate {i} halts {percent(share)} (median {median:.2g})" for i, (share, median) in gates]
        return f"Of all tokens, {listed(by_gate)}."

    def table(self) -> pd.DataFrame:
        frame = pd.DataFrame({"gate": range(1, len(self.lines) + 1)})
        frame[["5%", "median", "95%"]] = self.quantiles
        active = self.deciding.sum(axis=1)
        return frame.assign(threshold=np.array(self.lines, float), active=active, halts=self.closed)


def _log_odds(gates: np.ndarray | float) -> np.ndarray:
    inside = np.clip(gates, _END, 1 - _END)
    return np.log10(inside) - np.log10(1 - inside)


class DepthByDifficulty(Plate):
    """Shows whether hard tokens get more depth; difficulty is the loss of a token's prediction after one iteration.

    That loss does not depend on the gates, so a token's depth has no influence on its difficulty.

    Attributes:
        deciles: mean depth of each decile of difficulty; ``difficulty`` is the mean difficulty of each decile.
        boxes: by depth, quantiles of the difficulty of the tokens with that depth.
        rho: rank correlation of depth with difficulty.
        with_entropy: rank correlation of depth with the entropy after one iteration.
    """

    name = "difficulty"
    title = "Difficulty against depth"
    alt = (
        "Left: mean depth for deciles of the tokens from easy to hard, with 95% intervals where there are documents "
        "enough. Right: boxes of difficulty for the tokens of each depth."
    )
    needs = ("halting",)

    def __init__(self, trace: Trace):
        trace = trace.scored
        hard, depth = trace["full_nll_1"].astype(np.float64), trace["depth"]
        self.deepest = trace.about.deepest
        decile = tables.quantile_bins(hard, DECILES)
        self.difficulty, self.deciles = _binned(trace, depth.astype(np.float64), hard, decile)
        self.boxes: dict[int, dict[str, Any]] = {
            value: dict(zip(_QUANTILES, np.quantile(hard[depth == value], [*_QUANTILES.values()]), strict=True))
            for value in np.unique(depth).tolist()
        }
        self.rho = tables.rank_correlation(trace, hard, depth)
        self.with_entropy = tables.rank_correlation(trace, trace["entropy_1"], depth)

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=2.7)
        left, right = figure.subplots(1, 2)
        look: dict[str, Any] = {"color": theme.ink, "marker": "o", "markerfacecolor": PALETTE[0], "linewidth": 1.0}
        left.errorbar(self.difficulty, self.deciles.mean, yerr=self.deciles.bars, **look, clip_on=False)
        left.set(
            ylim=mean_depth_limits(self.deciles, self.deepest, least=max(0.05 * (self.deepest - 1), 0.02)),
            xlabel="NLL after one iteration (nats), deciles of all tokens",
            ylabel="mean depth (iterations)",
            title=f"Spearman's rho {self.rho}",
        )
        self._draw_boxes(right, theme)
        return figure

    def _draw_boxes(self, axes: Axes, theme: Theme) -> None:
        boxes: Any = list(self.boxes.values())
        drawn = axes.bxp(boxes, positions=list(self.boxes), widths=0.6, showfliers=False, patch_artist=True)
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
            f"Spearman's rho of depth with the loss after one iteration is {self.rho}: {_significance(self.rho)}; "
            f"mean depth goes from {ends}. With the entropy after one iteration, which a gate can know, rho is "
            f"{self.with_entropy}."
        )

    def table(self) -> pd.DataFrame:
        return self.deciles.frame("mean depth", **{"NLL after one iteration": self.difficulty})


def _significance(rho: tables.Correlation) -> str:
    """Describes whether the correlation differs significantly from zero."""
    if rho.interval is None:
        return "too few documents for an interval"
    if rho.interval.low <= 0.0 <= rho.interval.high:
        return "not significantly different from zero"
    return f"harder tokens get {'more' if rho.interval.low > 0 else 'less'} depth"


class DepthByPlace(Plate):
    """Shows mean depth by frequency of the token, by position in document and window, and by source.

    Each entry of ``curves`` is (mean value of each bin, mean depths of the bins); ``sources`` is (names, mean depths).
    """

    name = "depth"
    title = "Depth by frequency, position and source"
    alt = (
        "Four panels of mean depth, with 95% intervals where there are enough documents: by the token's frequency, by "
        "position in the document, by position in the window, and by source; the mean over all tokens dotted."
    )
    needs = ("halting",)

    def __init__(self, trace: Trace):
        depth = trace["depth"].astype(np.float64)
        count, position, in_window = trace["count"], trace["position"] + 1, trace["window_position"]
        self.curves = {
            "frequency": _binned(trace, depth, count, tables.geometric_bins(count)),
            "position": _binned(trace, depth, position, tables.geometric_bins(position)),
            "window": _binned(trace, depth, in_window + 1, in_window // -(-trace.about.window // _WINDOW_BINS)),
        }
        self.sources = _sources(trace, depth)
        self.with_frequency = tables.rank_correlation(trace, count, depth)
        self.with_position = tables.rank_correlation(trace, trace["position"], depth)
        self.mean, self.deepest = float(depth.mean()), trace.about.deepest
        self.constant = bool(depth.min() == depth.max())

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=3.3 + 0.13 * max(0, len(self.sources[0]) - 6))
        *panels, last = figure.subplots(2, 2).flatten()
        labels = {
            "frequency": "times the token occurs in this text",
            "position": "position in the document (tokens)",
            "window": "position in the window (tokens)",
        }
        for index, (axes, (name, label)) in enumerate(zip(panels, labels.items(), strict=True)):
            x, depth = self.curves[name]
            axes.axhline(self.mean, color=theme.muted, linestyle=":", linewidth=1.0)
            axes.errorbar(x, depth.mean, yerr=depth.bars, **series(index), clip_on=False)
            # Within a decade, a logarithmic axis may have no number at all.
            if name != "window" and x.max() >= 20 * x.min():
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
        # Long names keep their end, which identifies a path best.
        short = [drawable(name if len(name) <= 22 else "…" + name[-21:], 40) for name in names]
        labels = [f"{name} ({tokens:,})" for name, tokens in zip(short, depth.tokens, strict=True)]
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
        frequency, (names, depth) = self.curves["frequency"][1], self.sources
        least, most = int(np.argmin(depth.mean)), int(np.argmax(depth.mean))
        return (
            f"Mean depth is {frequency.mean[0]:.3f} for the rarest tokens of this text ({frequency.tokens[0]:,}) and "
            f"{frequency.mean[-1]:.3f} for the most frequent ({frequency.tokens[-1]:,}); Spearman's rho of depth "
            f"with frequency is {self.with_frequency}, with position in the document {self.with_position}; by source "
            f"it is from {depth.mean[least]:.3f} ({names[least]}) to {depth.mean[most]:.3f} ({names[most]})."
        )

    def table(self) -> pd.DataFrame:
        frames = [
            depth.frame("mean depth", by=name, where=[f"{value:,.1f}" for value in where])
            for name, (where, depth) in self.curves.items()
        ]
        names, depth = self.sources
        return pd.concat([*frames, depth.frame("mean depth", by="source", where=names)], ignore_index=True)


def _binned(trace: Trace, depth: np.ndarray, values: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, tables.Means]:
    """Returns the mean value and the mean depth of each bin that has tokens."""
    bins, label = np.unique(label, return_inverse=True)
    return np.bincount(label, weights=values) / np.bincount(label), tables.means(trace, depth, label, len(bins))


def _sources(trace: Trace, depth: np.ndarray) -> tuple[list[str], tables.Means]:
    """Returns the names and mean depths of the largest sources; the last entry is for all others together, if any."""
    counts = trace.frame["source"].value_counts(sort=False).sort_values(ascending=False, kind="stable")
    names = counts[counts > 0].index.astype(str)
    others = f"{len(names) - SOURCES:,} others"
    label = np.minimum(names.get_indexer(trace["source"].astype(str)), SOURCES)
    labels = [*names[:SOURCES], *([others] if len(names) > SOURCES else [])]
    return labels, tables.means(trace, depth, label, len(labels))
