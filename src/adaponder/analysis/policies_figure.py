"""Draws figures that compare policies from the rows of ``policies.json`` or ``frontier.json``, without a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adaponder.analysis.style import PAGE, PALETTE, Theme, depth_limits, house, new_figure, series

Entry = Mapping[str, Any]
ORACLE = "oracle by NLL"
LEARNED = "learned gate"
_AHEAD = ": looks ahead, cannot generate"


def flat(rows: Sequence[Entry]) -> pd.DataFrame:
    """Returns a table with the same rows, in which each number of an interval or list has its own column."""
    table = []
    for row in rows:
        cells = {key: value for key, value in row.items() if not key.endswith("_interval") and key != "active"}
        gap = cells.pop("difference") or {"mean": None, "interval": None}
        cells["depth_low"], cells["depth_high"] = row["depth_interval"] or (None, None)
        cells["loss_low"], cells["loss_high"] = row["loss_interval"] or (None, None)
        cells["difference"] = gap["mean"]
        cells["difference_low"], cells["difference_high"] = gap["interval"] or (None, None)
        table.append(cells | {f"active_{i}": share for i, share in enumerate(row["active"], 1)})
    return pd.DataFrame(table)


def loss_against_compute(rows: Sequence[Entry]) -> Figure:
    """Draws held-out loss against mean depth (upper half) and against FLOPs (lower half), with one panel per policy.

    A panel shows its policy and the learned gate, with the others faintly behind. The oracle's losses, far below all
    others, are written as text: an axis that includes them would flatten the other differences.
    """
    tuned = [row for row in rows if row["budget"] is not None and row["loss"] is not None]
    shown = [row for row in tuned if row["policy"] != ORACLE]
    trained = [row for row in rows if row["budget"] is None]
    kinds = list(dict.fromkeys(_kind(row["policy"]) for row in shown if row["policy"] != LEARNED)) or [LEARNED]
    columns = min(4, len(kinds))
    lines = math.ceil(len(kinds) / columns)
    star: dict[str, Any] = {"marker": "*", "markersize": 7.0, "linestyle": "none", "zorder": 6, "clip_on": False}
    legend: dict[str, Any] = {}
    with house() as theme:
        figure = new_figure(width=PAGE, height=1.1 + 2 * (0.35 + 1.25 * lines))
        halves = figure.subfigures(2, 1, squeeze=False).ravel()
        labels = {"depth": "mean iterations", "mflops": "MFLOP"}
        for half, (field, label) in zip(halves, labels.items(), strict=True):
            panels = half.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
            for axes, kind in zip(panels, kinds, strict=False):
                _draw_rule(axes, kind, shown, field, theme)
                for row in trained:
                    axes.plot([row[field]], [row["loss"]], **star, color=theme.ink, label=row["policy"])
                axes.set_title(kind, fontsize=7.0, loc="center")
                legend |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            _hide_unused(panels, len(kinds), columns)
            ylim = _margin([row["loss"] for row in (*shown, *trained)], 0.08)
            panels[0].set(xlim=_across([*shown, *trained], field), ylim=ylim)
            half.supxlabel(f"{label} per token", fontsize=8.0)
            half.supylabel("held-out loss (nats)", fontsize=8.0)
        if oracle := [row for row in tuned if row["policy"] == ORACLE]:
            best = ", ".join(f"{row['loss']:.3f} at depth {row['depth']:.2f}" for row in oracle)
            figure.suptitle(f"{ORACLE}, below these axes: {best}", fontsize=7.0, color=theme.muted)
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3)
    return figure


def _kind(policy: str) -> str:
    """Returns the policy's name without "ranked" or "thresholds": both variants share a panel."""
    return policy.removesuffix(", ranked").removesuffix(", thresholds")


def _draw_rule(axes: Axes, kind: str, rows: Sequence[Entry], field: str, theme: Theme) -> None:
    """Draws one panel: the policy ``kind``, the learned gate, and all other policies faintly."""
    for name in dict.fromkeys(row["policy"] for row in rows):
        points = sorted((row for row in rows if row["policy"] == name), key=lambda row: row[field])
        causal = points[0]["causal"]
        look: dict[str, Any]
        if name == LEARNED:
            look = {"color": theme.ink, "marker": "o", "markersize": 3.5, "linewidth": 1.6, "zorder": 3}
            label = LEARNED
        elif _kind(name) == kind:
            look = _look(causal, theme)
            label = "the policy named above" if causal else f"the same by rank{_AHEAD}"
        else:
            look = {"color": theme.muted, "alpha": 0.3, "linewidth": 0.7, "marker": ".", "markersize": 3.0}
            label = "the other policies"
        axes.plot(*_columns(points, field), **look, label=label, clip_on=False)


def _look(causal: bool, theme: Theme) -> dict[str, Any]:
    """Returns a policy's line style: policies that are not causal get another colour and hollow markers."""
    if causal:
        return {"color": PALETTE[0], "marker": "s", "linestyle": "-", "zorder": 4}
    return {"color": PALETTE[2], "marker": "D", "markerfacecolor": theme.paper, "linestyle": ":", "zorder": 5}


def _hide_unused(panels: Iterable[Axes], count: int, columns: int) -> None:
    """Hides all panels but the first ``count``, and labels the x axis of the lowest visible panel of each column."""
    for index, axes in enumerate(panels):
        axes.set_visible(index < count)
        axes.tick_params(labelbottom=index + columns >= count)


def _across(rows: Sequence[Entry], field: str) -> tuple[float, float]:
    """Returns the limits of an axis that shows the values of ``field``."""
    limits = _margin([row[field] for row in rows], 0.05)
    return limits if field != "depth" else depth_limits(*limits, max(len(row["active"]) for row in rows), margin=0.0)


def _margin(values: Sequence[float], share: float) -> tuple[float, float]:
    """Returns the range of ``values``, widened by ``share`` of it on both sides."""
    low, high = min(values), max(values)
    more = share * (high - low) or 0.01 * abs(high) or 1e-3
    return low - more, high + more


def _columns(rows: Sequence[Entry], field: str) -> tuple[list[float], list[float]]:
    return [row[field] for row in rows], [row["loss"] for row in rows]


def differences(rows: Sequence[Entry], budget: float) -> Figure:
    """Draws each policy's loss minus the learned gate's at one budget, with the interval of the paired difference.

    Values far outside the others (the oracle's) are arrows at the edge; numbers are printed beside the lines.
    """
    at_budget = [row for row in rows if row["budget"] == budget]
    compared = [row for row in at_budget if row["difference"] is not None]
    shown = compared + [row for row in at_budget if row["loss"] is None]
    gaps = [row["difference"] for row in compared if row["policy"] != ORACLE]
    low, high = _margin([0.0, *(end for gap in gaps for end in (gap["interval"] or [gap["mean"]]))], 0.06)
    lines = any(row["difference"]["interval"] is not None for row in compared)
    legend = "line: 95 % of the paired difference" if lines else "too few documents or windows for a 95 % interval"
    if any(not low <= row["difference"]["mean"] <= high for row in compared):
        legend += "; arrow: beyond this axis"
    ahead = "" if all(row["causal"] for row in shown) else f"; hollow{_AHEAD}"
    with house() as theme:
        figure = new_figure(width=PAGE, height=1.05 + 0.19 * len(shown))
        axes = figure.subplots()
        axes.set(
            xlim=(low, high),
            ylim=(len(shown) - 0.4, -0.6),
            xlabel=f"loss minus the learned gate's (nats per token)\n{legend}",
            title=f"Tuned to mean depth {budget:.2f}, held-out text{ahead}",
        )
        axes.axvline(0.0, color=theme.ink, linewidth=0.8)
        for height, row in enumerate(shown):
            if row["loss"] is None:
                note = f"cannot: {row['missed']}"
            else:
                off = "" if row["missed"] is None else " off the budget"
                note = f"{row['difference']['mean']:+.4f}  depth {row['depth']:.2f}{off}"
                _draw_difference(axes, row, height, theme)
            axes.annotate(
                note, (1.01, height), xycoords=("axes fraction", "data"), fontsize=6.5, va="center", color=theme.muted
            )
        axes.set_yticks(range(len(shown)), [row["policy"] for row in shown])
        axes.grid(axis="y", visible=False)
    return figure


def _draw_difference(axes: Axes, row: Entry, height: int, theme: Theme) -> None:
    """Draws one difference with its interval; an arrow if the difference lies outside the axis."""
    (low, high), gap, look = axes.get_xlim(), row["difference"], _look(row["causal"], theme)
    inside = min(max(gap["mean"], low), high)
    if inside != gap["mean"]:
        look |= {"marker": "<" if inside == low else ">"}
    elif gap["interval"] is not None:
        axes.plot(gap["interval"], [height, height], color=look["color"], linewidth=1.2, linestyle="-", marker="none")
    axes.plot([inside], [height], **look | {"linestyle": "none", "clip_on": False, "zorder": 5})


def keep_probability(rows: Sequence[Entry], budget: float) -> Figure:
    """Draws the share of tokens active in each iteration, one small panel per policy."""
    with house():
        shown = [row for row in rows if row["budget"] == budget and row["active"]]
        columns = min(5, len(shown))
        lines = math.ceil(len(shown) / columns)
        figure = new_figure(width=PAGE, height=0.5 + 1.15 * lines)
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, row in zip(panels, shown, strict=False):
            active = row["active"]
            iterations = range(1, len(active) + 1)
            # One colour, as the depth colours stand for depths of tokens, and these are iterations.
            bars = axes.bar(iterations, active, color=PALETTE[0], width=0.75)
            axes.bar_label(bars, [f"{share:.2f}".removeprefix("0") for share in active], fontsize=5.5, padding=1)
            # A long name takes two lines, so that it does not run into its neighbour.
            name = row["policy"].replace(", ", ",\n", 1)
            axes.set_title(name if row["causal"] else f"{name} †", fontsize=7.0, loc="center")
            axes.set(ylim=(0.0, 1.18), xticks=list(iterations), yticks=[0.0, 0.5, 1.0])
            axes.grid(axis="x", visible=False)
        _hide_unused(panels, len(shown), columns)
        ahead = "" if all(row["causal"] for row in shown) else f"    (†{_AHEAD})"
        figure.supxlabel(f"iteration{ahead}", fontsize=8.0)
        figure.supylabel(f"share of active tokens, tuned to mean depth {budget:.2f}", fontsize=8.0)
    return figure


def frontier(rows: Sequence[Entry]) -> Figure:
    """Draws held-out loss against mean depth, for calibrated thresholds and for fixed depths."""
    ordered = sorted(rows, key=lambda row: row["depth"])
    met = [row for row in ordered if row["budget"] is not None]
    fixed = [row for row in ordered if row["budget"] is None]
    with house() as theme:
        figure = new_figure(width=5.1, height=3.0)
        axes = figure.subplots()
        for index, (points, label) in enumerate([(met, "learned gate, calibrated"), (fixed, "fixed depth")]):
            axes.plot(*_columns(points, "depth"), **series(index), label=label, clip_on=False)
        if per_iteration := [row for row in met if row["policy"] == "a tau per iteration"]:
            ring: dict[str, Any] = {"marker": "o", "markersize": 8.0, "markerfacecolor": "none", "linestyle": "none"}
            label = "with a tau per iteration"
            axes.plot(*_columns(per_iteration, "depth"), **ring, clip_on=False, color=theme.muted, label=label)
        axes.set_xlim(_across(rows, "depth"))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="mean iterations per token, held-out text", ylabel="loss (nats per token)")
        axes.legend()
    return figure
