"""Whether hard tokens get more depth; the difficulty of a token is the loss of its prediction after one iteration.

That loss does not depend on the gates, so a token's depth has no influence on its difficulty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adaponder.analysis.figures.plate import DEPTH, Plate, depth_axis, needs_halting, times
from adaponder.analysis.style import PAGE, PALETTE, Theme, depth_colours, depth_limits, new_figure
from adaponder.analysis.tables import Correlation, Means, means, quantile_bins, rank_correlation
from adaponder.analysis.trace import Trace

DECILES = 10
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Measured(NamedTuple):
    """``deciles``: depth by decile of difficulty; ``spread[depth, quantile]``: difficulty of each depth's tokens."""

    deciles: Means
    difficulty: np.ndarray
    spread: np.ndarray
    tokens: np.ndarray
    rho: Correlation
    with_entropy: Correlation


def measure(trace: Trace) -> Measured:
    hard, depth, deepest = trace["full_nll_1"].astype(np.float64), trace["depth"], trace.about.deepest
    label = quantile_bins(hard, DECILES)
    deciles = means(trace, depth.astype(np.float64), label, int(label.max()) + 1)
    tokens = np.bincount(depth, minlength=deepest + 1)[1:]
    spread = np.full((deepest, len(_QUANTILES)), np.nan)
    for index in np.nonzero(tokens)[0]:
        spread[index] = np.quantile(hard[depth == index + 1], _QUANTILES)
    return Measured(
        deciles=deciles,
        difficulty=np.bincount(label, weights=hard) / np.bincount(label),
        spread=spread,
        tokens=tokens,
        rho=rank_correlation(trace, hard, depth),
        with_entropy=rank_correlation(trace, trace["entropy_1"], depth),
    )


def draw(measured: Measured, theme: Theme) -> Figure:
    figure = new_figure(width=PAGE, height=2.7)
    left, right = figure.subplots(1, 2)
    deciles, deepest = measured.deciles, len(measured.tokens)
    left.errorbar(
        measured.difficulty,
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
    left.set_xlabel("NLL after one iteration (nats), tenths of all tokens")
    left.set_ylabel("mean depth (iterations)")
    left.set_title(f"Spearman's rho {measured.rho}", loc="left")
    _draw_boxes(right, measured, theme)
    return figure


def _draw_boxes(axes: Axes, measured: Measured, theme: Theme) -> None:
    deepest = len(measured.tokens)
    names = ("whislo", "q1", "med", "q3", "whishi")
    places = np.nonzero(measured.tokens)[0] + 1
    boxes: list[dict[str, Any]] = [dict(zip(names, measured.spread[depth - 1], strict=True)) for depth in places]
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


def caption(measured: Measured) -> str:
    if measured.rho.rho is None:
        if (measured.tokens > 0).sum() == 1:
            return f"Every token was read {times(int(np.argmax(measured.tokens)) + 1)}: difficulty decided nothing."
        return "Every token is equally hard after one iteration: no correlation can be computed."
    ends = f"{measured.deciles.mean[0]:.3f} in the easiest part to {measured.deciles.mean[-1]:.3f} in the hardest"
    return (
        f"Spearman's rho of depth with the loss after one iteration is {measured.rho}{_doubt(measured.rho)}; "
        f"mean depth goes from {ends}. With the entropy after one iteration, which a gate can know, rho is "
        f"{measured.with_entropy}."
    )


def _doubt(rho: Correlation) -> str:
    """What the interval says about the correlation, as the end of a sentence."""
    assert rho.rho is not None
    if rho.interval is None:
        return ", of too few documents for an interval"
    if rho.interval.low <= 0.0 <= rho.interval.high:
        return ", not told apart from zero"
    direction = "harder tokens are read more often" if rho.rho > 0 else "harder tokens are read less often"
    strength = "weakly" if abs(rho.rho) < 0.3 else "clearly" if abs(rho.rho) < 0.6 else "strongly"
    return f": {strength}, {direction}"


def table(measured: Measured) -> pd.DataFrame:
    frame = measured.deciles.frame("mean depth")
    frame.insert(0, "NLL after one reading", measured.difficulty)
    return frame


PLATE = Plate(
    name="difficulty",
    title="Difficulty against depth",
    alt="Left: mean depth for tenths of the tokens from easy to hard, with 95% intervals where there are documents "
    "enough. Right: boxes of difficulty for the tokens of each depth.",
    missing=needs_halting,
    measure=measure,
    draw=draw,
    caption=caption,
    table=table,
    of_losses=True,
)
