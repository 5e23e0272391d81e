"""Who gives out depth best, and what a budget costs: functions of a result's rows, and of nothing else.

Rows are those of ``policies.json`` or ``frontier.json``, so that every figure can be drawn again without a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adaponder.analysis.style import COLUMN, PAGE, Theme, depth_colours, house, new_figure, series

Row = Mapping[str, Any]
_SPREADS = ("depth_interval", "loss_interval")
ORACLE = "oracle by NLL"
_AHEAD = "hollow: looks ahead, cannot generate"


def flat(rows: Sequence[Row]) -> pd.DataFrame:
    """One line per row, one plain value per cell: intervals and lists get a column for each of their numbers."""
    return pd.DataFrame([_flat(row) for row in rows])


def _flat(row: Row) -> dict[str, Any]:
    found = {key: value for key, value in row.items() if key not in (*_SPREADS, "difference", "active")}
    for name in _SPREADS:
        low, high = row[name] or (None, None)
        kind = name.removesuffix("_interval")
        found |= {f"{kind}_low": low, f"{kind}_high": high}
    gap = row["difference"] or {"mean": None, "interval": None}
    low, high = gap["interval"] or (None, None)
    found |= {"difference": gap["mean"], "difference_low": low, "difference_high": high}
    return found | {f"active_{i}": share for i, share in enumerate(row["active"], 1)}


def loss_against_compute(rows: Sequence[Row], *, dark: bool = False) -> Figure:
    """Held-out loss of each policy over the budgets, against mean iterations and against true FLOPs.

    The oracle, far below everybody, is told in words: it would flatten the differences among the others.
    """
    with house(dark=dark) as theme:
        tuned = [row for row in rows if row["budget"] is not None and row["loss"] is not None]
        kinds = list(dict.fromkeys(_kind(row["policy"]) for row in tuned if row["policy"] != ORACLE))
        figure = new_figure(width=PAGE, height=4.1)
        axes = figure.subplots(1, 2, sharey=True)
        for axis, field, label in zip(
            axes, ("depth", "mflops"), ("mean iterations per token", "MFLOP per token"), strict=True
        ):
            for name in dict.fromkeys(row["policy"] for row in tuned if row["policy"] != ORACLE):
                points = sorted((row for row in tuned if row["policy"] == name), key=lambda row: row[field])
                _curve(axis, points, field, kinds.index(_kind(name)), theme)
            for row in rows:
                if row["budget"] is None:
                    ink = {"color": theme.ink, "marker": "*", "markersize": 8.0, "linestyle": "none", "zorder": 5}
                    axis.plot([row[field]], [row["loss"]], **ink, label=row["policy"])
            axis.set_xlabel(label)
        axes[0].set_ylabel("loss on held-out text (nats per token)")
        if oracle := [row for row in tuned if row["policy"] == ORACLE]:
            best = "   ".join(f"{row['loss']:.3f} at {row['depth']:.2f}" for row in oracle)
            axes[0].set_title(f"below: {ORACLE}, {best}", loc="left", fontsize=7.0, color=theme.muted)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, title=_AHEAD, title_fontsize=7.0)
    return figure


def _kind(policy: str) -> str:
    """The rule, whichever way its shares are kept: both ways have one colour and marker."""
    return policy.removesuffix(", ranked").removesuffix(", thresholds")


def _curve(axis: Axes, rows: Sequence[Row], field: str, index: int, theme: Theme) -> None:
    style: dict[str, Any] = dict(series(index)) | {"linestyle": ("-", "--", "-.")[index % 3]}
    if not rows[0]["causal"]:
        style |= {"markerfacecolor": theme.paper, "linestyle": ":"}
    # The learned gate, first in every table, is drawn over the others.
    style |= {"linewidth": 2.0, "zorder": 4} if index == 0 else {}
    axis.plot([row[field] for row in rows], [row["loss"] for row in rows], **style, label=rows[0]["policy"])


def differences(rows: Sequence[Row], budget: float, *, dark: bool = False) -> Figure:
    """Each policy's loss minus the learned gate's at one budget, with the interval of the paired difference.

    What lies far outside the others (the oracle does) is an arrow at the edge; every number stands beside its line.
    """
    with house(dark=dark) as theme:
        here = [row for row in rows if row["budget"] == budget]
        shown = [row for row in here if row["difference"] is not None]
        shown += [row for row in here if row["loss"] is None]
        figure = new_figure(width=PAGE, height=0.9 + 0.19 * len(shown))
        axis = figure.subplots()
        low, high = _limits([row for row in shown if row["policy"] != ORACLE])
        axis.set_xlim(low, high)
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.axvline(0.0, color=theme.ink, linewidth=0.8)
        for place, row in enumerate(shown):
            note = f"cannot: {row['missed']}" if row["loss"] is None else _numbers(row)
            axis.annotate(
                note, (1.01, place), xycoords=("axes fraction", "data"), fontsize=6.5, va="center", color=theme.muted
            )
            if row["loss"] is not None:
                _mark(axis, row, place, low, high, theme)
        axis.set_yticks(range(len(shown)), [row["policy"] for row in shown])
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("loss minus the learned gate's (nats per token; line: 95 % of the paired difference)")
        axis.set_title(f"Mean depth {budget:.2f}, held-out text; {_AHEAD}", loc="left")
    return figure


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    gaps = [row["difference"] for row in rows if row["difference"] is not None]
    ends = [0.0, *(end for gap in gaps for end in (gap["interval"] or [gap["mean"]]))]
    margin = 0.06 * (max(ends) - min(ends)) or 1e-3
    return min(ends) - margin, max(ends) + margin


def _numbers(row: Row) -> str:
    off = "" if row["missed"] is None else " off the budget"
    return f"{row['difference']['mean']:+.4f}  depth {row['depth']:.2f}{off}"


def _mark(axis: Axes, row: Row, place: int, low: float, high: float, theme: Theme) -> None:
    gap = row["difference"]
    colour = series(0 if row["causal"] else 3)["color"]
    face = colour if row["causal"] else theme.paper
    inside = min(max(gap["mean"], low), high)
    marker = "o" if inside == gap["mean"] else "<" if inside == low else ">"
    if gap["interval"] is not None and marker == "o":
        axis.plot(gap["interval"], [place, place], color=colour, linewidth=1.2, linestyle="-", marker="none")
    axis.plot([inside], [place], marker=marker, color=colour, markerfacecolor=face, clip_on=False, linestyle="none")


def keep_probability(rows: Sequence[Row], budget: float, *, dark: bool = False) -> Figure:
    """Share of tokens that each policy reads at iteration 1 … K, one small panel each."""
    with house(dark=dark):
        shown = [row for row in rows if row["budget"] == budget and row["active"]]
        columns = min(5, len(shown))
        lines = math.ceil(len(shown) / columns)
        figure = new_figure(width=PAGE, height=0.5 + 1.15 * lines)
        grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        panels = grid.ravel()
        for axis, row in zip(panels, shown, strict=False):
            active = row["active"]
            iterations = range(1, len(active) + 1)
            drawn = axis.bar(iterations, active, color=depth_colours(len(active)), width=0.75)
            axis.bar_label(drawn, [f"{share:.2f}".removeprefix("0") for share in active], fontsize=5.5, padding=1)
            # A long name takes two lines rather than its neighbour's place.
            name = row["policy"].replace(", ", ",\n", 1)
            axis.set_title(name if row["causal"] else f"{name} †", fontsize=7.0)
            axis.set_ylim(0.0, 1.18)
            axis.set_xticks(list(iterations))
            axis.set_yticks([0.0, 0.5, 1.0])
            axis.grid(axis="x", visible=False)
        for axis in panels[len(shown) :]:
            axis.set_visible(False)
        figure.supxlabel("iteration    († looks ahead, cannot generate)", fontsize=8.0)
        figure.supylabel(f"share of tokens read, mean depth {budget:.2f}", fontsize=8.0)
    return figure


def frontier(rows: Sequence[Row], *, dark: bool = False) -> Figure:
    """Held-out loss against mean iterations: budgets met by thresholds, beside every token read equally often."""
    with house(dark=dark) as theme:
        figure = new_figure(width=COLUMN * 1.5, height=3.0)
        axis = figure.subplots()
        met = sorted((row for row in rows if row["budget"] is not None), key=lambda row: row["depth"])
        fixed = sorted((row for row in rows if row["budget"] is None), key=lambda row: row["depth"])
        for index, (points, label) in enumerate([(met, "learned gate, calibrated"), (fixed, "equally often")]):
            axis.plot(*_line(points), **series(index), label=label)
        chosen = [row for row in met if row["policy"] == "a tau per iteration"]
        ring: dict[str, Any] = {"marker": "o", "markersize": 8.0, "markerfacecolor": "none", "linestyle": "none"}
        if chosen:
            axis.plot(*_line(chosen), **ring, color=theme.muted, label="with a tau per iteration")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("mean iterations per token, held-out text")
        axis.set_ylabel("loss (nats per token)")
        axis.legend()
    return figure


def _line(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["depth"] for row in rows], [row["loss"] for row in rows]
