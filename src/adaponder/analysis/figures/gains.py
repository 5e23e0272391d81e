"""The loss gained by each iteration at full depth, for tokens grouped by the depth that the policy gave them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adaponder.analysis.figures.plate import Plate, listed, needs_iterations, not_of_noise, whiskers
from adaponder.analysis.style import LINES, MARKERS, PAGE, PALETTE, Theme, depth_colours, new_figure
from adaponder.analysis.tables import Means, means
from adaponder.analysis.trace import Trace

_NAMES = ("all tokens", "tokens that read on", "tokens that had halted")


class Measured(NamedTuple):
    """``losses[group, iteration]``: mean NLL at full depth of each depth's tokens; the last group is all tokens.

    ``gains``: for all tokens, for those that the policy left active in that iteration and for those it had halted, an
    entry per iteration from the second on.
    """

    losses: np.ndarray
    tokens: np.ndarray
    gains: tuple[Means, Means, Means]
    halts: bool


def measure(trace: Trace) -> Measured:
    deepest, label = trace.about.deepest, trace["depth"].astype(np.int64) - 1
    losses = trace.by_iteration("full_nll")
    tokens = np.bincount(label, minlength=deepest)
    with np.errstate(invalid="ignore"):
        by_depth = np.stack([np.bincount(label, weights=one, minlength=deepest) / tokens for one in losses.T], axis=1)
    rows: list[tuple[Means, ...]] = []
    for i in range(1, deepest):
        gain = losses[:, i - 1] - losses[:, i]
        split = means(trace, gain, (label < i).astype(np.int64), 2)
        rows.append((means(trace, gain, np.zeros_like(label), 1), split.pick([0]), split.pick([1])))
    everyone, read, halted = (
        Means(*map(np.concatenate, zip(*(row[group] for row in rows), strict=True))) for group in range(3)
    )
    averages = np.vstack([by_depth, losses.mean(axis=0)])
    return Measured(averages, tokens, (everyone, read, halted), trace.about.halts)


def draw(measured: Measured, theme: Theme) -> Figure:
    figure = new_figure(width=PAGE, height=2.8)
    left, right = figure.subplots(1, 2)
    _draw_curves(left, measured, theme)
    _draw_gains(right, measured, theme)
    for axes in (left, right):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, columnspacing=1.2)
    return figure


def _draw_curves(axes: Axes, measured: Measured, theme: Theme) -> None:
    deepest = measured.losses.shape[1]
    iterations, change = np.arange(1, deepest + 1), measured.losses - measured.losses[:, :1]
    axes.axhline(0.0, color=theme.ink, linewidth=0.8)
    axes.plot(iterations, change[-1], color=theme.ink, linewidth=2.2, label=_NAMES[0])
    for depth in iterations[measured.tokens > 0] if measured.halts else []:
        axes.plot(
            iterations,
            change[depth - 1],
            color=theme.muted,
            linestyle=LINES[depth % len(LINES)],
            marker=MARKERS[(depth - 1) % len(MARKERS)],
            markersize=6,
            markerfacecolor=depth_colours(deepest)[depth - 1],
            markeredgecolor=theme.ink,
            label=f"depth {depth} ({measured.tokens[depth - 1]:,})",
        )
    not_of_noise(axes)
    axes.set_xticks(iterations)
    axes.set_xlabel("iterations of every token")
    axes.set_ylabel("change of NLL since\nthe first iteration (nats)")


def _draw_gains(axes: Axes, measured: Measured, theme: Theme) -> None:
    deepest, iterations = measured.losses.shape[1], np.arange(2, measured.losses.shape[1] + 1)
    looks: tuple[dict[str, Any], ...] = (
        {"color": theme.muted},
        {"color": PALETTE[0]},
        {"color": theme.paper, "hatch": "////"},
    )
    # Where no token halts, or all do at once, one of the groups is empty.
    shown = [index for index in range(3 if measured.halts else 1) if measured.gains[index].tokens.any()]
    wide = 0.8 / len(shown)
    for place, index in enumerate(shown):
        some = measured.gains[index].tokens > 0
        gains = measured.gains[index].pick(some)
        x = iterations[some] + wide * (place - (len(shown) - 1) / 2)
        axes.bar(x, gains.mean, wide, label=_NAMES[index], **looks[index])
        whiskers(axes, x, gains.mean, gains.bars, theme)
    axes.axhline(0.0, color=theme.ink, linewidth=0.8)
    not_of_noise(axes)
    axes.set_xticks(iterations)
    axes.set_xlim(1.4, deepest + 0.6)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("iteration")
    axes.set_ylabel("NLL gained by it (nats)")


def caption(measured: Measured) -> str:
    everyone, read, halted = measured.gains
    said = listed([f"{gain:+.4f} (iteration {i})" for i, gain in enumerate(everyone.mean, 2)])
    first, last = measured.losses[-1, 0], measured.losses[-1, -1]
    whole = f"When every token is read to the end, the loss goes from {first:.4f} to {last:.4f} nats: gains of {said}."
    compared = np.nonzero((halted.tokens > 0) & (read.tokens > 0))[0]
    if not measured.halts or not len(compared):
        return whole
    less, more = halted.high < read.low, halted.low > read.high
    unknown = np.isnan(halted.low) | np.isnan(read.low)
    kinds = (
        ("there are too few documents to tell tokens that had halted from those that read on", unknown),
        ("tokens that had halted would gain less than those that read on", less),
        ("tokens that had halted would gain more than those that read on", more),
        ("tokens that had halted and those that read on are not told apart", ~(less | more | unknown)),
    )
    words = []
    for kind, chosen in kinds:
        which = [str(i + 2) for i in compared if chosen[i]]
        words += [f"at iteration{'s' if len(which) > 1 else ''} {listed(which)} {kind}"] if which else []
    said = "; ".join(words)
    return f"{whole} {said[0].upper()}{said[1:]}."


def table(measured: Measured) -> pd.DataFrame:
    frames = []
    for name, gains in zip(_NAMES, measured.gains, strict=True):
        frame = gains.frame("NLL gained")
        frame.insert(0, "gained by", name)
        frame.insert(1, "iteration", range(2, len(frame) + 2))
        frames.append(frame)
    return pd.concat(frames if measured.halts else frames[:1], ignore_index=True)


PLATE = Plate(
    name="gains",
    title="What each iteration is worth",
    alt="Left: how the mean loss changes with each iteration when every token is read to the end, a line for the "
    "tokens of each depth. Right: bars of the loss gained by each iteration.",
    missing=needs_iterations,
    measure=measure,
    draw=draw,
    caption=caption,
    table=table,
    of_losses=True,
)
