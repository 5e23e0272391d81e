"""Figures of how tokens halt: loss by depth, tokens active in each iteration, values of the gates."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from adaponder.analysis.figures.plate import (
    DEPTH,
    Plate,
    depth_axis,
    facts_of,
    iteration_axis,
    listed,
    needs_halting,
    percent,
)
from adaponder.analysis.style import PAGE, PALETTE, Theme, density_map, depth_colours, new_figure
from adaponder.analysis.tables import Means, adds_up, means, numbers
from adaponder.analysis.trace import Kind, Trace

BINS = 40
_CHECK_MARK = "the paper's check mark (\N{CHECK MARK}), where loss falls to a middle depth and is highest at the last"
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


class LossByDepth(Plate):
    """Shows mean loss, number of tokens and distribution of losses by depth; the paper reports a check mark.

    ``groups`` has an entry per depth; ``density[bin, depth]``, per nat, integrates to at most 1 at each depth.
    """

    name = "halting"
    title = "Loss by halting iteration"
    alt = (
        "Points: mean loss of the tokens of each depth, with 95% intervals where there are documents enough. "
        "Bars: how many tokens have that depth. Map: how losses spread at each depth."
    )

    def __init__(self, trace: Trace):
        trace = trace.scored
        nll, label = trace["nll"], trace["depth"].astype(np.int64) - 1
        self.loss, self.depths = trace.loss, np.arange(1, trace.about.deepest + 1)
        self.groups = means(trace, nll, label, len(self.depths))
        adds_up(self.groups.share, self.groups.mean, self.loss)
        # The highest one percent of losses would compress the rest.
        self.clip = max(float(np.quantile(nll, 0.99)), 1e-6)
        self.beyond = float((nll > self.clip).mean())
        edges = np.linspace(0.0, self.clip, BINS + 1)
        losses = [nll[label == index] for index in range(len(self.depths))]
        histograms = np.stack([np.histogram(values, edges)[0] for values in losses], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            self.density = histograms / self.groups.tokens / edges[1]
        self.medians = np.array([np.median(values) if len(values) else np.nan for values in losses])

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=3.5)
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 2), width_ratios=(1, 1.15))
        top, below, right = (figure.add_subplot(cell) for cell in (grid[0, 0], grid[1, 0], grid[:, 1]))
        self._draw_means(top, theme)
        groups, deepest = self.groups, len(self.depths)
        bars = below.bar(self.depths, 100 * groups.share, width=0.7, color=depth_colours(deepest))
        below.bar_label(bars, [f"{tokens:,}" for tokens in groups.tokens], fontsize=7, padding=1)
        below.set(ylim=(0, 125 * groups.share.max()), ylabel="tokens (%)", xlabel=DEPTH)
        depth_axis(below, deepest)
        image = self._draw_density(right, theme)
        figure.colorbar(image, ax=right, label="share of that depth's tokens per nat", pad=0.02)
        return figure

    def _draw_means(self, axes: Axes, theme: Theme) -> None:
        groups, depths = self.groups, self.depths
        axes.axhline(self.loss, color=theme.muted, linestyle=":", linewidth=1.0)
        # A depth without tokens has a mean of NaN, where the line breaks: between its neighbours nothing was measured.
        axes.errorbar(depths, groups.mean, yerr=groups.bars, color=theme.ink, linewidth=1.0, zorder=2)
        axes.scatter(depths, groups.mean, c=depth_colours(len(depths)), edgecolors=theme.ink, s=36, zorder=3)
        low, high = groups.range
        pad = 0.25 * max(high - low, 0.2 * abs(self.loss), 0.1)
        axes.set(ylim=(max(0.0, low - pad), high + pad), ylabel="mean NLL (nats)")
        axes.set_title(f"dotted: all tokens, {self.loss:.3f}", color=theme.muted)
        depth_axis(axes, len(depths))
        axes.tick_params(labelbottom=False)

    def _draw_density(self, axes: Axes, theme: Theme) -> AxesImage:
        deepest, depths = len(self.depths), self.depths
        image = axes.imshow(
            self.density,
            origin="lower",
            aspect="auto",
            extent=(0.5, deepest + 0.5, 0.0, self.clip),
            cmap=density_map(theme),
            vmin=0.0,
            interpolation="nearest",
        )
        for edge in depths[:-1] + 0.5:
            axes.axvline(edge, color=theme.paper, linewidth=2.0)
        # White on black is visible on every shade.
        for colour, width in (("black", 3.6), ("white", 1.8)):
            axes.plot(depths, self.medians, "_", color=colour, markeredgewidth=width, markersize=13 + width)
        axes.plot(depths, self.groups.mean, "o", color="white", markeredgecolor="black")
        for depth in depths[self.groups.tokens == 0]:
            axes.text(depth, self.clip / 2, "no tokens", ha="center", va="center", rotation=90, color=theme.muted)
        depth_axis(axes, deepest)
        axes.set(xlim=(0.5, deepest + 0.5), ylim=(0.0, self.clip), xlabel=DEPTH, ylabel="NLL (nats)")
        axes.grid(visible=False)
        axes.set_title("circle: mean; bar: median", color=theme.muted)
        return image

    def caption(self) -> str:
        groups = self.groups
        present = np.nonzero(groups.tokens)[0]
        tail = f" The {percent(self.beyond)} of losses above {self.clip:.1f} nats are outside the map."
        if len(present) == 1:
            return (
                f"Every token has depth {present[0] + 1}, with a mean NLL of {groups.mean[present[0]]:.3f} nats: "
                f"there is no second group to compare with.{tail}"
            )
        by_depth = listed([f"{groups.mean[i]:.3f} at depth {i + 1} ({percent(groups.share[i])})" for i in present])
        whole = f"shares times means add up to {self.loss:.3f} nats"
        return f"Mean NLL is {by_depth}; {whole}. {_shape(groups)}{tail}"

    def table(self) -> pd.DataFrame:
        frame = self.groups.frame("mean NLL", depth=self.depths)
        frame["median NLL"] = self.medians
        frame["share x mean"] = self.groups.share * self.groups.mean
        return frame


def _shape(groups: Means) -> str:
    """Describes the curve of mean losses in words, and whether it may be chance."""
    present = np.nonzero(groups.tokens)[0]
    mean = groups.mean[present]
    first, last, lowest, highest = present[0], present[-1], present[np.argmin(mean)], present[np.argmax(mean)]
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
    reason = "there are too few documents for intervals" if np.isnan(groups.low[present]).any() else "intervals overlap"
    return f"{words}; it may be chance, {reason}."


class ActiveTokens(Plate):
    """Shows the share of tokens active in each iteration; the shares add up to the mean depth."""

    name = "active"
    title = "Tokens active in each iteration"
    alt = "Bars: the share of tokens that are active in each iteration."
    missing = staticmethod(needs_halting)

    def __init__(self, trace: Trace):
        deepest = trace.about.deepest
        self.iterations = np.arange(1, deepest + 1)
        self.tokens = np.bincount(trace["depth"], minlength=deepest + 1)[1:][::-1].cumsum()[::-1]
        self.shares = self.tokens / len(trace)
        self.numbers = numbers(trace)
        # A token of depth D is active in iterations 1 … D.
        adds_up(np.full(deepest, 1.0 / deepest), deepest * self.shares, self.numbers.iterations)

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=2.2)
        axes = figure.subplots()
        # One colour: the depth ramp is for depths of tokens, and these are iterations.
        bars = axes.bar(self.iterations, 100 * self.shares, width=0.7, color=PALETTE[0])
        axes.bar_label(bars, [percent(share) for share in self.shares], padding=2)
        iteration_axis(axes, self.iterations)
        axes.set(ylim=(0, 118), yticks=range(0, 101, 25), xlabel="iteration", ylabel="active tokens (%)")
        axes.set_title(f"mean {self.numbers.iterations:.3f} of {len(self.shares)} iterations", loc="right")
        return figure

    def caption(self) -> str:
        shares = listed([percent(share) for share in self.shares])
        overall = self.numbers
        which = "iteration 1" if len(self.shares) == 1 else f"iterations 1 to {len(self.shares)}"
        closed = "" if overall.gates_closed is None else f", {percent(overall.gates_closed)} of gates are closed"
        return (
            f"In {which} {shares} of the tokens are active, which adds up to {overall.iterations:.3f} "
            f"iterations per token; {percent(overall.halted)} of tokens halt early{closed}, and the text costs "
            f"{overall.flops_ratio:.2f} times the FLOPs of the plain backbone."
        )

    def table(self) -> pd.DataFrame:
        return pd.DataFrame({"iteration": self.iterations, "active tokens": self.tokens, "share": self.shares})


class GateValues(Plate):
    """Shows histograms of the gates' values in log-odds, which separate values near 0, where tokens halt, and near 1.

    Attributes:
        deciding, later: ``[gate, bin]``, shares of all tokens: active at that gate, and halted before it.
        closed: share of all tokens that each gate halted.
        lines: threshold of each gate; ``None`` where the policy has none.
    """

    name = "gates"
    title = "Values of the gates"
    alt = (
        "Histograms of each gate's value over all tokens on a log-odds axis, tokens that had halted before hatched, "
        "thresholds dashed."
    )

    @staticmethod
    def missing(kind: Kind) -> str | None:
        if kind.gates:
            return None
        return "with one iteration no gate is evaluated" if kind.halts else f"{kind.method} has no gates"

    def __init__(self, trace: Trace):
        gates, depth = trace.by_iteration("gate"), trace["depth"][:, None]
        count = gates.shape[1]
        active = depth > np.arange(count)
        self.lines, self.meaning = _lines(trace, count), facts_of(trace.about).gate_meaning
        odds = log_odds(gates)
        # The axis spans all gates and thresholds.
        ends = [odds.min(), odds.max(), *(log_odds(line) for line in self.lines if line is not None)]
        self.edges = np.linspace(min(ends) - 0.4, max(ends) + 0.4, BINS + 1)
        self.deciding, self.later = (
            np.stack([np.histogram(odds[mask[:, i], i], self.edges)[0] for i in range(count)]) / len(trace)
            for mask in (active, ~active)
        )
        # A token of depth i + 1 was halted by gate i, if there was something left to decide.
        decides = np.arange(count) < trace.about.deepest - 1
        self.closed = ((depth == np.arange(count) + 1) & decides).mean(axis=0)
        self.quantiles = np.quantile(gates, [0.05, 0.5, 0.95], axis=0).T

    def draw(self, theme: Theme) -> Figure:
        count = len(self.deciding)
        columns = min(count, 4)
        rows = -(-count // columns)
        figure = new_figure(width=PAGE, height=0.5 + 1.9 * rows)
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
        for i, axes in enumerate(panels[:count]):
            deciding, whole = 100 * self.deciding[i], 100 * (self.deciding[i] + self.later[i])
            axes.stairs(deciding, self.edges, fill=True, color=PALETTE[0], label="active tokens")
            axes.stairs(
                whole,
                self.edges,
                baseline=deciding,
                fill=True,
                facecolor=theme.paper,
                edgecolor=theme.ink,
                hatch="//////",
                linewidth=0.5,
                label="tokens halted before (no effect)",
            )
            line = self.lines[i]
            if line is not None:
                axes.axvline(log_odds(line), color=_LINE, linestyle="--", label="threshold")
            axes.set_xticks(*_ticks(self.edges[0], self.edges[-1], apart=0.2 if columns < 4 else 0.25))
            title = f"gate {i + 1}: halts {percent(self.closed[i])}"
            axes.set(xlim=(self.edges[0], self.edges[-1]), title=title, xlabel=self.meaning)
        for axes in panels[count:]:
            axes.set_visible(False)
        for axes in panels[::columns]:
            axes.set_ylabel("tokens (%)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        return figure

    def caption(self) -> str:
        gates = enumerate(zip(self.closed, self.quantiles[:, 1], strict=True), 1)
        by_gate = [f"gate {i} halts {percent(share)} (median {median:.2g})" for i, (share, median) in gates]
        return f"Of all tokens, {listed(by_gate)}."

    def table(self) -> pd.DataFrame:
        frame = pd.DataFrame(self.quantiles, columns=pd.Index(["5%", "median", "95%"]))
        frame.insert(0, "gate", range(1, len(frame) + 1))
        frame["threshold"] = [np.nan if line is None else line for line in self.lines]
        frame["active"] = self.deciding.sum(axis=1)
        frame["halts"] = self.closed
        return frame


def log_odds(gates: np.ndarray | float) -> np.ndarray:
    """Equals ``log10(s / (1 - s))``, clipped to the ends of the axis."""
    gates = np.asarray(gates)
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(gates) - np.log10(1.0 - gates), -_END, _END)


def _lines(trace: Trace, count: int) -> tuple[float | None, ...]:
    """Returns the threshold of each gate; ``None`` where the policy has none."""
    if trace.about.tau is not None and facts_of(trace.about).gates_decide:
        return (*trace.about.tau, *[None] * count)[:count]
    return (0.5 if trace.about.policy.startswith("router") else None,) * count


def _ticks(low: float, high: float, *, apart: float) -> tuple[list[float], list[str]]:
    """Returns log-odds and labels of round probabilities on this axis, at least this share of it ``apart``."""
    ticks: dict[float, str] = {}
    for value, name in sorted(_TICKS.items(), key=lambda tick: abs(tick[0] - 0.5)):
        odds = float(log_odds(value))
        if low <= odds <= high and all(abs(odds - other) >= apart * (high - low) for other in ticks):
            ticks[odds] = name
    return list(ticks), list(ticks.values())
