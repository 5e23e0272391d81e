"""Draws figures of losses: by depth, by iteration, and the loss that halted tokens could still have gained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from adaponder.analysis.figures.plate import (
    DEPTH,
    HATCH,
    Plate,
    depth_axis,
    draw_bars,
    draw_zero,
    iteration_axis,
    listed,
    percent,
)
from adaponder.analysis.style import LINES, MARKERS, PAGE, PALETTE, Theme, density_map, depth_colours, new_figure
from adaponder.analysis.tables import Means, means
from adaponder.analysis.trace import Trace

BINS = 40
_CHECK_MARK = "the paper's check mark (\N{CHECK MARK}), where loss falls to a middle depth and is highest at the last"
_GROUPS = ("all tokens", "tokens still active", "tokens that had halted")
# Maximum number of iterations whose token counts fit below the axis.
_MOST_COUNTS = 5


class LossByDepth(Plate):
    """Shows mean loss, number of tokens and distribution of losses by depth; the paper's curve looks like a check mark.

    ``groups`` has one entry per depth. ``density[:, depth - 1]`` is the histogram of the losses at a depth, as share of
    that depth's tokens per nat.
    """

    name = "halting"
    title = "Loss by halting iteration"
    alt = (
        "Points: mean loss of the tokens of each depth, with 95% intervals where there are enough documents. "
        "Bars: how many tokens have that depth. Map: how losses spread at each depth."
    )

    def __init__(self, trace: Trace):
        trace = trace.scored
        nll, label = trace["nll"], trace["depth"].astype(np.int64) - 1
        self.loss, self.deepest = trace.loss, trace.about.deepest
        self.depths = np.arange(1, self.deepest + 1)
        self.groups = means(trace, nll, label, self.deepest)
        # The highest one percent of losses would compress the rest.
        self.clip = max(float(np.quantile(nll, 0.99)), 1e-6)
        self.beyond = float((nll > self.clip).mean())
        edges = np.linspace(0.0, self.clip, BINS + 1)
        losses = [nll[label == index] for index in range(self.deepest)]
        histograms = np.stack([np.histogram(values, edges)[0] for values in losses], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            self.density = histograms / self.groups.tokens / edges[1]
        self.medians = np.array([np.median(values) if len(values) else np.nan for values in losses])

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=3.5)
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 2), width_ratios=(1, 1.15))
        top, below, right = (figure.add_subplot(cell) for cell in (grid[0, 0], grid[1, 0], grid[:, 1]))
        self._draw_means(top, theme)
        bars = below.bar(self.depths, 100 * self.groups.share, width=0.7, color=depth_colours(self.deepest))
        below.bar_label(bars, [f"{tokens:,}" for tokens in self.groups.tokens], fontsize=7, padding=1)
        below.set(ylim=(0, 125 * self.groups.share.max()), ylabel="tokens (%)", xlabel=DEPTH)
        image = right.imshow(
            self.density,
            origin="lower",
            aspect="auto",
            extent=(0.5, self.deepest + 0.5, 0.0, self.clip),
            cmap=density_map(theme),
            vmin=0.0,
            interpolation="nearest",
        )
        self._mark_density(right, theme)
        for axes in (top, below, right):
            depth_axis(axes, self.deepest)
        top.tick_params(labelbottom=False)
        right.set(xlim=(0.5, self.deepest + 0.5), ylim=(0.0, self.clip), xlabel=DEPTH, ylabel="NLL (nats)")
        figure.colorbar(image, ax=right, label="share of that depth's tokens per nat", pad=0.02)
        return figure

    def _draw_means(self, axes: Axes, theme: Theme) -> None:
        groups = self.groups
        axes.axhline(self.loss, color=theme.muted, linestyle=":", linewidth=1.0)
        # A depth without tokens has a mean of NaN, where the line breaks: between its neighbours nothing was measured.
        axes.errorbar(self.depths, groups.mean, yerr=groups.bars, color=theme.ink, linewidth=1.0, zorder=2)
        colours = depth_colours(self.deepest)
        axes.scatter(self.depths, groups.mean, c=colours, edgecolors=theme.ink, s=36, zorder=3)
        low, high = groups.range
        pad = 0.25 * max(high - low, 0.2 * abs(self.loss), 0.1)
        axes.set(ylim=(max(0.0, low - pad), high + pad), ylabel="mean NLL (nats)")
        axes.set_title(f"dotted: all tokens, {self.loss:.3f}", color=theme.muted)

    def _mark_density(self, axes: Axes, theme: Theme) -> None:
        for edge in self.depths[:-1] + 0.5:
            axes.axvline(edge, color=theme.paper, linewidth=2.0)
        # White on black is visible on every shade.
        for colour, width in (("black", 3.6), ("white", 1.8)):
            axes.plot(self.depths, self.medians, "_", color=colour, markeredgewidth=width, markersize=13 + width)
        axes.plot(self.depths, self.groups.mean, "o", color="white", markeredgecolor="black")
        for depth in self.depths[self.groups.tokens == 0]:
            axes.text(depth, self.clip / 2, "no tokens", ha="center", va="center", rotation=90, color=theme.muted)
        axes.grid(visible=False)
        axes.set_title("circle: mean; bar: median", color=theme.muted)

    def caption(self) -> str:
        groups, present = self.groups, np.flatnonzero(self.groups.tokens)
        tail = f" The {percent(self.beyond)} of losses above {self.clip:.1f} nats are outside the map."
        if len(present) == 1:
            return f"Every token has depth {present[0] + 1}, with a mean NLL of {self.loss:.3f} nats.{tail}"
        by_depth = listed([f"{groups.mean[i]:.3f} at depth {i + 1} ({percent(groups.share[i])})" for i in present])
        return f"Mean NLL is {by_depth}; over all tokens it is {self.loss:.3f} nats. {_shape(groups)}{tail}"

    def table(self) -> pd.DataFrame:
        frame = self.groups.frame("mean NLL", depth=self.depths)
        return frame.assign(**{"median NLL": self.medians, "share x mean": self.groups.share * self.groups.mean})


def _shape(groups: Means) -> str:
    """Describes the curve of mean losses in words, and says whether its shape may be chance."""
    present = np.flatnonzero(groups.tokens)
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


class GainByIteration(Plate):
    """Shows how much each iteration lowers the loss at full depth, for tokens grouped by their depth under the policy.

    Attributes:
        losses: ``[group, iteration]``, mean NLL at full depth: one group per depth, then a group of all tokens.
        gains: fall of the mean NLL in iterations 1 … K-1, for all tokens, active tokens and halted tokens.
    """

    name = "gains"
    title = "What each iteration is worth"
    alt = (
        "Left: how the mean loss changes with each iteration when every token has full depth, a line for the "
        "tokens of each depth. Right: bars of the loss gained by each iteration."
    )
    needs = ("iterations",)

    def __init__(self, trace: Trace):
        trace = trace.scored
        self.deepest, self.halts = trace.about.deepest, trace.about.halts
        label, losses = trace["depth"].astype(np.int64) - 1, trace.by_iteration("full_nll")
        self.tokens = np.bincount(label, minlength=self.deepest)
        with np.errstate(invalid="ignore"):
            by_depth = [np.bincount(label, weights=nll, minlength=self.deepest) / self.tokens for nll in losses.T]
        self.losses = np.vstack([np.stack(by_depth, axis=1), losses.mean(axis=0)])
        by_iteration = []
        for i in range(1, self.deepest):
            gain = losses[:, i - 1] - losses[:, i]
            split = means(trace, gain, (label < i).astype(np.int64), 2)
            by_iteration.append((means(trace, gain, np.zeros_like(label), 1), split.pick([0]), split.pick([1])))
        groups = zip(*by_iteration, strict=True)
        self.gains = [Means(*map(np.concatenate, zip(*group, strict=True))) for group in groups]

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=2.8)
        left, right = figure.subplots(1, 2)
        self._draw_curves(left, theme)
        self._draw_gains(right, theme)
        for axes in (left, right):
            draw_zero(axes, theme)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, columnspacing=1.2)
        return figure

    def _draw_curves(self, axes: Axes, theme: Theme) -> None:
        iterations, change = np.arange(1, self.deepest + 1), self.losses - self.losses[:, :1]
        axes.plot(iterations, change[-1], color=theme.ink, linewidth=2.2, label=_GROUPS[0])
        for depth in iterations[self.tokens > 0] if self.halts else []:
            axes.plot(
                iterations,
                change[depth - 1],
                color=theme.muted,
                linestyle=LINES[depth % len(LINES)],
                marker=MARKERS[(depth - 1) % len(MARKERS)],
                markersize=6,
                markerfacecolor=depth_colours(self.deepest)[depth - 1],
                markeredgecolor=theme.ink,
                label=f"depth {depth} ({self.tokens[depth - 1]:,})",
            )
        ylabel = "change of NLL since\nthe first iteration (nats)"
        axes.set(xticks=iterations, xlabel="iterations of every token", ylabel=ylabel)

    def _draw_gains(self, axes: Axes, theme: Theme) -> None:
        iterations = np.arange(2, self.deepest + 1)
        looks = ({"color": theme.muted}, {"color": PALETTE[0]}, {"color": theme.paper, "hatch": HATCH})
        # Where no token halts, or all do at once, one of the groups is empty.
        shown = [index for index in range(3 if self.halts else 1) if self.gains[index].tokens.any()]
        width = 0.8 / len(shown)
        for bar, index in enumerate(shown):
            present = self.gains[index].tokens > 0
            gains = self.gains[index].pick(present)
            x = iterations[present] + width * (bar - (len(shown) - 1) / 2)
            draw_bars(axes, x, gains.mean, gains.bars, theme, width=width, label=_GROUPS[index], **looks[index])
        iteration_axis(axes, iterations)
        axes.set(xlabel="iteration", ylabel="NLL gained by it (nats)")

    def caption(self) -> str:
        overall, active, halted = self.gains
        by_iteration = listed([f"{gain:+.4f} (iteration {i})" for i, gain in enumerate(overall.mean, 2)])
        ends = f"{self.losses[-1, 0]:.4f} to {self.losses[-1, -1]:.4f} nats"
        caption = f"At full depth of every token the loss goes from {ends}: gains of {by_iteration}."
        compared = (halted.tokens > 0) & (active.tokens > 0)
        less, more = halted.high < active.low, halted.low > active.high
        unknown = np.isnan(halted.low) | np.isnan(active.low)
        verdicts = {
            "there are too few documents to tell halted tokens from active ones": unknown,
            "halted tokens would gain less than active ones": less,
            "halted tokens would gain more than active ones": more,
            "halted and active tokens do not differ significantly": ~(less | more | unknown),
        }
        for verdict, holds in verdicts.items():
            if which := [str(i + 2) for i in np.flatnonzero(compared & holds)]:
                caption += f" At iteration{'s' if len(which) > 1 else ''} {listed(which)} {verdict}."
        return caption

    def table(self) -> pd.DataFrame:
        frames = [
            gains.frame("NLL gained", **{"gained by": name, "iteration": range(2, self.deepest + 1)})
            for name, gains in zip(_GROUPS, self.gains, strict=True)
        ]
        return pd.concat(frames if self.halts else frames[:1], ignore_index=True)


class ForgoneGain(Plate):
    """Shows how much lower the loss of halted tokens would be had they continued, compared with random tokens.

    The gain of a token from depth d is its loss after d iterations minus its loss after K iterations, in a forward in
    which no token halts.

    Attributes:
        groups: for each depth d below K, the mean gain from d of the tokens that halted at d.
        random: for each d, the mean gain from d of all tokens. The mean over a random sample as large as the group at d
            is within ``band`` of it with probability 95 %.
        halted: mean over the text of each token's gain from its own depth.
        chance: mean and 95 % interval, (mean, low, high), of ``halted`` if depths are permuted within each document.
    """

    name = "forgone"
    title = "What halting gave up"
    alt = (
        "Bars, for each iteration after which tokens halted: the loss they would have gained at full depth, "
        "beside that of random tokens. Right: the sum over the whole text."
    )
    needs = ("halting", "iterations")

    def __init__(self, trace: Trace):
        trace = trace.scored
        self.deepest, depth = trace.about.deepest, trace["depth"].astype(np.int64)
        losses = trace.by_iteration("full_nll")
        gains = losses - losses[:, -1:]
        given_up = np.take_along_axis(gains, depth[:, None] - 1, axis=1)[:, 0]
        self.groups = means(trace, given_up, depth - 1, self.deepest).pick(slice(self.deepest - 1))
        self.random, self.halted = gains.mean(axis=0)[:-1], float(given_up.mean())
        # Variance of a mean of values drawn without replacement.
        finite_population = (len(trace) - self.groups.tokens) / max(1, len(trace) - 1)
        self.band = 1.96 * gains.std(axis=0)[:-1] * np.sqrt(finite_population / np.maximum(self.groups.tokens, 1))
        self.chance = _permuted(gains, depth, trace["document"].astype(np.int64), seed=trace.about.seed)

    def draw(self, theme: Theme) -> Figure:
        figure = new_figure(width=PAGE, height=2.6)
        left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
        self._draw_groups(left, theme)
        middle, low, high = self.chance
        right.bar(0, self.halted, width=0.6, color=PALETTE[0])
        ends = np.maximum([[middle - low], [high - middle]], 0.0)
        draw_bars(right, [1], [middle], ends, theme, width=0.6, color=theme.paper, hatch=HATCH)
        iteration_axis(right, [0, 1], [f"these\ndepths\n{self.halted:+.4f}", f"permuted at\nrandom\n{middle:+.4f}"])
        right.margins(y=0.15)
        right.set_ylabel("given up per token of\nthe text (nats)")
        for axes in (left, right):
            draw_zero(axes, theme)
        return figure

    def _draw_groups(self, axes: Axes, theme: Theme) -> None:
        present, deepest = np.flatnonzero(self.groups.tokens), self.deepest
        groups = self.groups.pick(present)
        colours = [depth_colours(deepest)[index] for index in present]
        draw_bars(axes, present + 0.8, groups.mean, groups.bars, theme, width=0.38, color=colours)
        hatched: dict[str, Any] = {"width": 0.38, "color": theme.paper, "hatch": HATCH}
        draw_bars(axes, present + 1.2, self.random[present], self.band[present], theme, **hatched)
        counts = [f"\n({tokens:,} tokens)" if deepest <= _MOST_COUNTS else "" for tokens in self.groups.tokens]
        iteration_axis(axes, range(1, deepest), [f"{depth}{count}" for depth, count in enumerate(counts, 1)])
        axes.margins(y=0.12)
        axes.set(xlabel="iteration after which tokens halted", ylabel=f"NLL gained by\ndepth {deepest} (nats)")
        handles = [
            Patch(facecolor=theme.muted, label="tokens that halted there"),
            Patch(facecolor=theme.paper, hatch=HATCH, label="as many random tokens (95% of draws)"),
        ]
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2)

    def caption(self) -> str:
        groups, (middle, least, most) = self.groups, self.chance
        if not groups.tokens.any():
            return f"No token halted before iteration {self.deepest}: nothing was given up."
        ends = zip(groups.low, groups.high, strict=True)
        intervals = ["" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]" for low, high in ends]
        gains = [
            f"{groups.mean[i]:+.4f} nats{intervals[i]} if halted after iteration {i + 1} "
            f"(random tokens {self.random[i]:+.4f})"
            for i in np.flatnonzero(groups.tokens)
        ]
        if least <= self.halted <= most:
            verdict = "the choice of halted tokens does not differ significantly from chance"
        elif self.halted > most:
            verdict = "the tokens that halt are those with more to gain: worse than chance"
        else:
            verdict = "the tokens that halt are those with less to gain: better than chance"
        return (
            f"At depth {self.deepest}, halted tokens would have gained {'; '.join(gains)}. "
            f"Over the whole text halting gives up {self.halted:+.4f} nats per token; the same depths permuted within "
            f"each document give up {middle:+.4f} [{least:+.4f}, {most:+.4f}]: {verdict}."
        )

    def table(self) -> pd.DataFrame:
        frame = self.groups.frame("gain by continuing", **{"halted after": range(1, self.deepest)})
        return frame.assign(**{"gain of random tokens": self.random, "95% of draws within": self.band})


def _permuted(gains: np.ndarray, depth: np.ndarray, document: np.ndarray, *, seed: int) -> tuple[float, float, float]:
    """Returns mean and 95 % interval, (mean, low, high), of the forgone gain per token if depths are permuted.

    Depths are permuted within each document.

    Permuting across documents would favour a policy that only halts less in hard documents.
    """
    generator, rows = np.random.default_rng(seed), np.arange(len(depth))
    order = np.argsort(document, kind="stable")
    gains, depth, document = gains[order], depth[order], document[order]
    permutations = int(np.clip(2e7 / len(depth), 100, 1000))
    given_up = []
    for _ in range(permutations):
        shuffled = np.lexsort((generator.random(len(depth)), document))
        given_up.append(float(gains[rows, depth[shuffled] - 1].mean()))
    low, high = np.quantile(given_up, [0.025, 0.975])
    # The mean over all permutations is known exactly: each document's shares of depths times its mean gains.
    starts = np.nonzero(np.diff(document, prepend=document[0] - 1))[0]
    counts = np.stack([np.add.reduceat(depth == d, starts) for d in range(1, gains.shape[1] + 1)], axis=1)
    sizes = counts.sum(axis=1, keepdims=True)
    return float((counts * np.add.reduceat(gains, starts) / sizes).sum() / len(depth)), float(low), float(high)
