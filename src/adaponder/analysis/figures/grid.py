"""Tokens by iterations, computed or reused: the paper's first figure, drawn from a trace."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from adaponder.analysis.figures.plate import Plate, facts_of, needs_halting, percent
from adaponder.analysis.figures.words import for_figure
from adaponder.analysis.style import PAGE, Theme, depth_colours, new_figure
from adaponder.analysis.trace import Trace

TOKENS = 32
# Entries of the legend side by side, as many as the page is wide, and the height of a line of them.
_ENTRIES, _LINE = 5, 0.2


class Measured(NamedTuple):
    """Consecutive tokens of the text and their depths; ``after`` is the legend of cells of halted tokens."""

    words: list[str]
    depths: np.ndarray
    first: int
    deepest: int
    after: str


def measure(trace: Trace) -> Measured:
    first, length = busiest(trace["depth"], trace["document"], TOKENS)
    part = trace.frame.iloc[first : first + length]
    return Measured(
        words=[str(word) for word in part["token"]],
        depths=part["depth"].to_numpy(np.int64),
        first=first,
        deepest=trace.about.deepest,
        after=facts_of(trace.about).after_halting,
    )


def busiest(depth: np.ndarray, document: np.ndarray, length: int) -> tuple[int, int]:
    """(first, length) of the tokens of one document whose depths have the highest entropy; the first of equals.

    If every document is shorter than ``length``, the beginning of the text.
    """
    length = min(length, len(depth))
    levels = np.arange(1, int(depth.max()) + 1)
    counts = np.cumsum(np.vstack([np.zeros(len(levels)), depth[:, None] == levels]), axis=0)
    shares = (counts[length:] - counts[:-length]) / length
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(shares * np.log(shares), axis=1)
    starts = np.arange(len(entropy))
    inside = document[starts] == document[starts + length - 1]
    if not inside.any():
        return 0, length
    # Rounded, so that equal mixtures of depths compare equal.
    return int(np.argmax(np.where(inside, np.round(entropy, 9), -1.0))), length


def draw(measured: Measured, theme: Theme) -> Figure:
    count, deepest = len(measured.words), measured.deepest
    used = np.unique(measured.depths).tolist()
    more_lines = len(used) // _ENTRIES  # of the legend, which has an entry beside those of the depths
    figure = new_figure(width=PAGE, height=1.35 + 0.24 * deepest + _LINE * more_lines)
    axes = figure.subplots()
    colours = depth_colours(deepest)
    for column, depth in enumerate(measured.depths):
        for row in range(deepest):
            computed = row < depth
            axes.add_patch(
                Rectangle(
                    (column + 0.06, row + 0.06),
                    0.88,
                    0.88,
                    facecolor=colours[depth - 1] if computed else theme.paper,
                    edgecolor=theme.ink if computed else theme.muted,
                    hatch=None if computed else "////",
                    linewidth=0.6,
                )
            )
    axes.set_xlim(0, max(count, 12))
    axes.set_ylim(0, deepest)
    axes.set_yticks(np.arange(deepest) + 0.5, [str(i) for i in range(1, deepest + 1)])
    ticks = axes.set_xticks(
        np.arange(count) + 0.5, [for_figure(word) for word in measured.words], rotation=60, ha="right"
    )
    for tick in ticks:
        tick.label1.set_parse_math(False)
        tick.label1.set_rotation_mode("anchor")
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_ylabel("iteration")
    axes.set_xlabel("token read")
    handles = [Patch(facecolor=colours[depth - 1], label=f"computed, depth {depth}") for depth in used]
    handles.append(Patch(facecolor=theme.paper, edgecolor=theme.muted, hatch="////", label=measured.after))
    columns = min(len(handles), _ENTRIES)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, columnspacing=1.2, handlelength=1.4)
    return figure


def caption(measured: Measured) -> str:
    count, spent = len(measured.depths), int(measured.depths.sum())
    whole = count * measured.deepest
    halted = int((measured.depths < measured.deepest).sum())
    where, chosen = "", ""
    if len(np.unique(measured.depths)) > 1:
        where, chosen = ", where depths differ most", "; being chosen for variety, the stretch is not typical"
    return (
        f"Tokens {measured.first:,} to {measured.first + count - 1:,} of the text{where}: "
        f"{spent} of {whole} rows are computed ({percent(spent / whole)}), {halted} of {count} tokens halt early"
        f"{chosen}."
    )


def table(measured: Measured) -> pd.DataFrame:
    return pd.DataFrame({"token": [for_figure(word) for word in measured.words], "depth": measured.depths})


PLATE = Plate(
    name="grid",
    title="Computed or reused, token by token",
    alt="A grid: tokens of a real stretch of text from left to right, iterations upwards; filled cells were computed, "
    "hatched ones were not.",
    missing=needs_halting,
    measure=measure,
    draw=draw,
    caption=caption,
    table=table,
)
