"""The loss that halted tokens would have gained by continuing, compared with random tokens.

Gains are measured at full depth of every token: the loss after the iteration at which a token halted minus the loss
after the last. So the tokens around it continue as well, as they would if no token halted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from adaponder.analysis.figures.plate import Plate, needs_halting, not_of_noise, spread, times, whiskers
from adaponder.analysis.style import PAGE, PALETTE, Theme, depth_colours, new_figure
from adaponder.analysis.tables import Means, means
from adaponder.analysis.trace import Kind, Trace

_HATCH = "////"
_ROOM = 5


class Measured(NamedTuple):
    """``groups`` and ``random`` have an entry per depth below the last.

    Attributes:
        groups: gains of the tokens that halted there.
        random: mean gain from that depth on over all tokens, so of random ones.
        band: 95 % of draws of equally many random tokens lie within this distance of ``random``.
        halted: the gain forgone by halting, per token of the text.
        chance: the same for depths permuted at random within each document: mean, and ends of 95 % of permutations.
    """

    groups: Means
    random: np.ndarray
    band: np.ndarray
    deepest: int
    halted: float
    chance: tuple[float, float, float]


def measure(trace: Trace) -> Measured:
    deepest, depth = trace.about.deepest, trace["depth"].astype(np.int64)
    losses = trace.by_iteration("full_nll")
    gains = losses - losses[:, -1:]
    own = np.take_along_axis(gains, depth[:, None] - 1, axis=1)[:, 0]
    groups = means(trace, own, depth - 1, deepest).pick(slice(deepest - 1))
    count = len(trace)
    # Variance of a mean of values drawn without replacement.
    left_over = (count - groups.tokens) / max(1, count - 1)
    band = 1.96 * gains.std(axis=0)[:-1] * np.sqrt(left_over / np.maximum(groups.tokens, 1))
    return Measured(
        groups=groups,
        random=gains.mean(axis=0)[:-1],
        band=band,
        deepest=deepest,
        halted=float(own.mean()),
        chance=_dealt_at_random(gains, depth, trace["document"].astype(np.int64), seed=trace.about.seed),
    )


def _dealt_at_random(
    gains: np.ndarray, depth: np.ndarray, document: np.ndarray, *, seed: int
) -> tuple[float, float, float]:
    """(mean, low, high) of the forgone gain per token when depths are permuted at random within each document.

    Within documents, because documents differ in difficulty: a hard document whose tokens halt less would otherwise
    count in favour of the policy.
    """
    generator, rows = np.random.default_rng(seed), np.arange(len(depth))
    order = np.argsort(document, kind="stable")
    gains, depth, document = gains[order], depth[order], document[order]
    deals = int(np.clip(2e7 / len(depth), 100, 1000))
    forgone = []
    for _ in range(deals):
        shuffled = np.lexsort((generator.random(len(depth)), document))
        forgone.append(float(gains[rows, depth[shuffled] - 1].mean()))
    low, high = np.quantile(forgone, [0.025, 0.975])
    # The mean over all permutations is known exactly: each document's shares of depths times its mean gains.
    starts = np.nonzero(np.diff(document, prepend=document[0] - 1))[0]
    counts = np.stack([np.add.reduceat(depth == d, starts) for d in range(1, gains.shape[1] + 1)], axis=1)
    sizes = counts.sum(axis=1, keepdims=True)
    return float((counts * np.add.reduceat(gains, starts) / sizes).sum() / len(depth)), float(low), float(high)


def draw(measured: Measured, theme: Theme) -> Figure:
    figure = new_figure(width=PAGE, height=2.6)
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    _draw_groups(left, measured, theme)
    middle, low, high = measured.chance
    right.bar(0, measured.halted, width=0.6, color=PALETTE[0])
    ends = np.maximum([[middle - low], [high - middle]], 0.0)
    right.bar(1, middle, width=0.6, color=theme.paper, hatch=_HATCH)
    whiskers(right, [1], [middle], ends, theme)
    right.axhline(0.0, color=theme.ink, linewidth=0.8)
    right.set_xticks([0, 1], [f"these\ndepths\n{measured.halted:+.4f}", f"dealt at\nrandom\n{middle:+.4f}"])
    right.set_xlim(-0.6, 1.6)
    right.margins(y=0.15)
    not_of_noise(right)
    right.grid(visible=False, axis="x")
    right.set_ylabel("forgone per token of\nthe text (nats)")
    return figure


def _draw_groups(axes: Axes, measured: Measured, theme: Theme) -> None:
    some, deepest = np.nonzero(measured.groups.tokens)[0], measured.deepest
    groups, wide = measured.groups.pick(some), 0.38
    colours = [depth_colours(deepest)[index] for index in some]
    axes.bar(some + 0.8, groups.mean, wide, color=colours)
    whiskers(axes, some + 0.8, groups.mean, groups.bars, theme)
    axes.bar(some + 1.2, measured.random[some], wide, color=theme.paper, hatch=_HATCH)
    whiskers(axes, some + 1.2, measured.random[some], measured.band[some], theme)
    axes.axhline(0.0, color=theme.ink, linewidth=0.8)
    places = range(1, deepest)
    names = [f"{depth}\n({n:,} tokens)" for depth, n in zip(places, measured.groups.tokens, strict=True)]
    # Among many iterations there is no room for numbers of tokens.
    axes.set_xticks(places, names if deepest <= _ROOM else [str(depth) for depth in places])
    axes.set_xlim(0.4, deepest - 0.4)
    axes.margins(y=0.12)
    not_of_noise(axes)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("iteration after which tokens halted")
    axes.set_ylabel(f"NLL gained by\nreading {times(deepest)} (nats)")
    handles = [
        Patch(facecolor=theme.muted, label="tokens that halted there"),
        Patch(facecolor=theme.paper, hatch=_HATCH, label="as many random tokens (95% of draws)"),
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2)


def caption(measured: Measured) -> str:
    groups = measured.groups
    if not groups.tokens.any():
        return f"No token halted before iteration {measured.deepest}: nothing was forgone."
    parts = [
        f"{groups.mean[i]:+.4f} nats{spread(groups.low[i], groups.high[i])} if halted after iteration {i + 1} "
        f"(random tokens {measured.random[i]:+.4f})"
        for i in np.nonzero(groups.tokens)[0]
    ]
    return (
        f"By being read {times(measured.deepest)}, halted tokens would have gained {'; '.join(parts)}. "
        f"Over the whole text halting forgoes {measured.halted:+.4f} nats per token, the same depths dealt at random "
        "within each document "
        f"{measured.chance[0]:+.4f} [{measured.chance[1]:+.4f}, {measured.chance[2]:+.4f}]: {_verdict(measured)}."
    )


def _verdict(measured: Measured) -> str:
    """Whether the policy halts better or worse than chance, in words."""
    middle, low, high = measured.chance
    cheap = "; stopping cost nothing" if measured.halted <= 0 else ""
    if low <= measured.halted <= high:
        return f"which tokens halt is not told apart from chance{cheap}"
    if measured.halted > high:
        return f"the tokens that halt are those with more to gain: worse than chance{cheap}"
    saved = f", sparing {1 - measured.halted / middle:.0%} of what chance would lose" if middle > 0 else ""
    return f"the tokens that halt are those with less to gain: better than chance{saved}{cheap}"


def table(measured: Measured) -> pd.DataFrame:
    frame = measured.groups.frame("gain by going on")
    frame.insert(0, "halted after", range(1, measured.deepest))
    frame["gain of random tokens"] = measured.random
    frame["95% of draws within"] = measured.band
    return frame


def missing(kind: Kind) -> str | None:
    if kind.halts and kind.deepest < 2:
        return "at one iteration no token can go on"
    return needs_halting(kind)


PLATE = Plate(
    name="forgone",
    title="What halting gave up",
    alt="Bars, for each iteration after which tokens halted: the loss they would have gained by reading to the end, "
    "beside that of random tokens. Right: the sum over the whole text.",
    missing=missing,
    measure=measure,
    draw=draw,
    caption=caption,
    table=table,
    of_losses=True,
)
