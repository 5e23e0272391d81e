"""The share of tokens active in each iteration; the shares add up to the mean depth."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from adaponder.analysis.figures.plate import Plate, listed, needs_halting, percent
from adaponder.analysis.style import PAGE, PALETTE, Theme, new_figure
from adaponder.analysis.tables import Numbers, adds_up, numbers
from adaponder.analysis.trace import Trace


class Measured(NamedTuple):
    """``shares[i]`` and ``tokens[i]``: share and number of the tokens active in iteration i + 1."""

    shares: np.ndarray
    tokens: np.ndarray
    numbers: Numbers


def measure(trace: Trace) -> Measured:
    deepest = trace.about.deepest
    tokens = np.bincount(trace["depth"], minlength=deepest + 1)[1:][::-1].cumsum()[::-1]
    shares = tokens / len(trace)
    overall = numbers(trace)
    # A token of depth D is active in iterations 1 … D.
    adds_up(np.full(deepest, 1.0 / deepest), deepest * shares, overall.iterations)
    return Measured(shares, tokens, overall)


def draw(measured: Measured, theme: Theme) -> Figure:
    deepest = len(measured.shares)
    figure = new_figure(width=PAGE, height=2.2)
    axes = figure.subplots()
    # One colour: those of the depth ramp are depths of tokens, and here are iterations.
    bars = axes.bar(np.arange(1, deepest + 1), 100 * measured.shares, width=0.7, color=PALETTE[0])
    axes.bar_label(bars, [percent(float(share)) for share in measured.shares], padding=2)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlim(0.4, deepest + 0.6)
    axes.set_ylim(0, 118)
    axes.set_yticks(range(0, 101, 25))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("iteration")
    axes.set_ylabel("tokens read (%)")
    axes.set_title(f"mean {measured.numbers.iterations:.3f} of {deepest} iterations", loc="right")
    return figure


def caption(measured: Measured) -> str:
    said = listed([percent(float(share)) for share in measured.shares])
    one = measured.numbers
    which = "Iteration 1" if len(measured.shares) == 1 else f"Iterations 1 to {len(measured.shares)}"
    closed = "" if one.gates_closed is None else f", {percent(one.gates_closed)} of gates are closed"
    return (
        f"{which} read {said} of the tokens, which adds up to {one.iterations:.3f} "
        f"iterations per token; {percent(one.halted)} of tokens halt early{closed}, and the text costs "
        f"{one.flops_ratio:.2f} times the FLOPs of the plain backbone."
    )


def table(measured: Measured) -> pd.DataFrame:
    return pd.DataFrame(
        {"iteration": np.arange(1, len(measured.shares) + 1), "tokens read": measured.tokens, "share": measured.shares}
    )


PLATE = Plate(
    name="active",
    title="Tokens read by each iteration",
    alt="Bars: the share of tokens that each iteration reads.",
    missing=needs_halting,
    measure=measure,
    draw=draw,
    caption=caption,
    table=table,
)
