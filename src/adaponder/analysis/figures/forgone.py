"""What halted tokens would have gained by going on, against random tokens: a good gate halts where little is to be had.

Gains are of one run in which every token is read to the end: from the loss after the iteration at which a token halted
to the loss after the last. So the tokens around it have read on as well, which is what never halting would mean.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from adaponder.analysis.figures.plate import Plate, needs_halting, spread, times, whiskers
from adaponder.analysis.style import PAGE, PALETTE, Theme, depth_colours, new_figure
from adaponder.analysis.tables import Means, means
from adaponder.analysis.trace import Kind, Trace

_HATCH = "////"


class Measured(NamedTuple):
    """``groups`` and ``random`` have an entry per depth below the last.

    Attributes:
        groups: gains of the tokens that halted there.
        random: mean gain from that depth on over all tokens, so of random ones.
        band: how far from it 95 % of draws of equally many tokens lie.
        halted: the whole bill per token of the text.
        chance: the bill of the same depths dealt at random within each document: its mean, the ends of 95 % of deals.
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
    # The mean of some of the values, drawn without putting back.
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
    """(mean, low, high) of the bill when each document deals its depths out to its own tokens at random.

    Within documents, because they differ: a hard document whose tokens halt less would else look like good judgement.
    """
    generator, rows = np.random.default_rng(seed), np.arange(len(depth))
    order = np.argsort(document, kind="stable")
    gains, depth, document = gains[order], depth[order], document[order]
    deals = int(np.clip(2e7 / len(depth), 100, 1000))
    bills = []
    for _ in range(deals):
        shuffled = np.lexsort((generator.random(len(depth)), document))
        bills.append(float(gains[rows, depth[shuffled] - 1].mean()))
    low, high = np.quantile(bills, [0.025, 0.975])
    # The mean over all deals is known exactly: each document's shares of depths times its mean gains.
    starts = np.nonzero(np.diff(document, prepend=document[0] - 1))[0]
    counts = np.stack([np.add.reduceat(depth == d, starts) for d in range(1, gains.shape[1] + 1)], axis=1)
    sizes = counts.sum(axis=1, keepdims=True)
    return float((counts * np.add.reduceat(gains, starts) / sizes).sum() / len(depth)), float(low), float(high)


def draw(found: Measured, theme: Theme) -> Figure:
    figure = new_figure(width=PAGE, height=2.6)
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    _draw_groups(left, found, theme)
    middle, low, high = found.chance
    right.bar(0, found.halted, width=0.6, color=PALETTE[0])
    ends = np.maximum([[middle - low], [high - middle]], 0.0)
    right.bar(1, middle, width=0.6, color=theme.paper, hatch=_HATCH)
    whiskers(right, [1], [middle], ends, theme)
    right.axhline(0.0, color=theme.ink, linewidth=0.8)
    right.set_xticks([0, 1], [f"these\ndepths\n{found.halted:+.4f}", f"dealt at\nrandom\n{middle:+.4f}"])
    right.set_xlim(-0.6, 1.6)
    right.margins(y=0.15)
    right.grid(visible=False, axis="x")
    right.set_ylabel("forgone per token of\nthe text (nats)")
    return figure


def _draw_groups(axes: Axes, found: Measured, theme: Theme) -> None:
    some, deepest = np.nonzero(found.groups.tokens)[0], found.deepest
    groups, wide = found.groups.pick(some), 0.38
    colours = [depth_colours(deepest)[index] for index in some]
    axes.bar(some + 0.8, groups.mean, wide, color=colours)
    whiskers(axes, some + 0.8, groups.mean, groups.bars, theme)
    axes.bar(some + 1.2, found.random[some], wide, color=theme.paper, hatch=_HATCH)
    whiskers(axes, some + 1.2, found.random[some], found.band[some], theme)
    axes.axhline(0.0, color=theme.ink, linewidth=0.8)
    places = range(1, deepest)
    names = [f"{depth}\n({n:,} tokens)" for depth, n in zip(places, found.groups.tokens, strict=True)]
    axes.set_xticks(places, names)
    axes.set_xlim(0.4, deepest - 0.4)
    axes.margins(y=0.12)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("iteration after which tokens halted")
    axes.set_ylabel(f"NLL gained by\nreading {times(deepest)} (nats)")
    handles = [
        Patch(facecolor=theme.muted, label="tokens that halted there"),
        Patch(facecolor=theme.paper, hatch=_HATCH, label="as many random tokens (95% of draws)"),
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2)


def caption(found: Measured) -> str:
    groups = found.groups
    if not groups.tokens.any():
        return f"No token halted before iteration {found.deepest}: nothing was forgone."
    parts = [
        f"{groups.mean[i]:+.4f} nats{spread(groups.low[i], groups.high[i])} if halted after iteration {i + 1} "
        f"(random tokens {found.random[i]:+.4f})"
        for i in np.nonzero(groups.tokens)[0]
    ]
    return (
        f"By being read {times(found.deepest)}, halted tokens would have gained {'; '.join(parts)}. "
        f"Over the whole text halting forgoes {found.halted:+.4f} nats per token, the same depths dealt at random "
        "within each document "
        f"{found.chance[0]:+.4f} [{found.chance[1]:+.4f}, {found.chance[2]:+.4f}]: {_verdict(found)}."
    )


def _verdict(found: Measured) -> str:
    middle, low, high = found.chance
    cheap = "; stopping cost nothing" if found.halted <= 0 else ""
    if low <= found.halted <= high:
        return f"which tokens halt is not told apart from chance{cheap}"
    if found.halted > high:
        return f"the tokens that halt are those with more to gain: worse than chance{cheap}"
    saved = f", sparing {1 - found.halted / middle:.0%} of what chance would lose" if middle > 0 else ""
    return f"the tokens that halt are those with less to gain: better than chance{saved}{cheap}"


def table(found: Measured) -> pd.DataFrame:
    frame = found.groups.frame("gain by going on")
    frame.insert(0, "halted after", range(1, found.deepest))
    frame["gain of random tokens"] = found.random
    frame["95% of draws within"] = found.band
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
)
