"""Figures of the policy lab, drawn from the entries of ``policies.json`` or ``frontier.json`` alone.

An entry is :meth:`adaponder.evaluation.lab.lab.Measurement.as_dict`, so figures can be drawn again without a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adaponder.analysis.style import COLUMN, PAGE, PALETTE, Theme, depth_limits, house, new_figure, series

Entry = Mapping[str, Any]
_SPREADS = ("depth_interval", "loss_interval")
ORACLE = "oracle by NLL"
LEARNED = "learned gate"
_AHEAD = ": looks ahead, cannot generate"
_STAR: dict[str, Any] = {"marker": "*", "markersize": 7.0, "linestyle": "none", "zorder": 6, "clip_on": False}


def flat(rows: Sequence[Entry]) -> pd.DataFrame:
    """Returns a table with one row per entry; intervals and lists get a column per number."""
    return pd.DataFrame([_flat(row) for row in rows])


def _flat(row: Entry) -> dict[str, Any]:
    cells = {key: value for key, value in row.items() if key not in (*_SPREADS, "difference", "active")}
    for name in _SPREADS:
        low, high = row[name] or (None, None)
        kind = name.removesuffix("_interval")
        cells |= {f"{kind}_low": low, f"{kind}_high": high}
    gap = row["difference"] or {"mean": None, "interval": None}
    low, high = gap["interval"] or (None, None)
    cells |= {"difference": gap["mean"], "difference_low": low, "difference_high": high}
    return cells | {f"active_{i}": share for i, share in enumerate(row["active"], 1)}


def loss_against_compute(rows: Sequence[Entry], *, dark: bool = False) -> Figure:
    """Draws held-out loss over the budgets, against mean depth and against true FLOPs: a panel for each policy.

    A panel shows its policy and the learned gate, with the others faintly behind. The oracle, far below all of them,
    is given in words: it would flatten the other differences.
    """
    with house(dark=dark) as theme:
        tuned = [row for row in rows if row["budget"] is not None and row["loss"] is not None]
        shown = [row for row in tuned if row["policy"] != ORACLE]
        trained = [row for row in rows if row["budget"] is None]
        kinds = list(dict.fromkeys(_kind(row["policy"]) for row in shown if row["policy"] != LEARNED)) or [LEARNED]
        columns = min(4, len(kinds))
        lines = math.ceil(len(kinds) / columns)
        figure = new_figure(width=PAGE, height=1.1 + 2 * (0.35 + 1.25 * lines))
        drawn: dict[str, Any] = {}
        for part, field in zip(figure.subfigures(2, 1, squeeze=False).ravel(), ("depth", "mflops"), strict=True):
            panels = part.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
            for axis, kind in zip(panels, kinds, strict=False):
                _draw_rule(axis, kind, shown, field, theme)
                for row in trained:
                    axis.plot([row[field]], [row["loss"]], **_STAR, color=theme.ink, label=row["policy"])
                axis.set_title(kind, fontsize=7.0)
                drawn |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
            _only(panels, len(kinds), columns)
            panels[0].set_xlim(_across([*shown, *trained], field))
            panels[0].set_ylim(_margin([row["loss"] for row in (*shown, *trained)], 0.08))
            part.supxlabel("mean iterations per token" if field == "depth" else "MFLOP per token", fontsize=8.0)
            part.supylabel("held-out loss (nats)", fontsize=8.0)
        if oracle := [row for row in tuned if row["policy"] == ORACLE]:
            best = ", ".join(f"{row['loss']:.3f} at depth {row['depth']:.2f}" for row in oracle)
            figure.suptitle(f"{ORACLE}, below these axes: {best}", fontsize=7.0, color=theme.muted)
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3)
    return figure


def _kind(policy: str) -> str:
    """Returns the name without ranked or thresholds; both share a panel."""
    return policy.removesuffix(", ranked").removesuffix(", thresholds")


def _draw_rule(axis: Axes, kind: str, rows: Sequence[Entry], field: str, theme: Theme) -> None:
    """Draws one panel: the rule ``kind``, the learned gate, and the others faintly."""
    faint: dict[str, Any] = {"color": theme.muted, "alpha": 0.3, "linewidth": 0.7, "marker": ".", "markersize": 3.0}
    learned: dict[str, Any] = {"color": theme.ink, "marker": "o", "markersize": 3.5, "linewidth": 1.6, "zorder": 3}
    for name in dict.fromkeys(row["policy"] for row in rows):
        points = sorted((row for row in rows if row["policy"] == name), key=lambda row: row[field])
        own = _kind(name) == kind
        label = LEARNED if name == LEARNED else "the other policies"
        if own and name != LEARNED:
            label = "the policy named above" if points[0]["causal"] else f"the same by rank{_AHEAD}"
        look = learned if name == LEARNED else _look(points[0]["causal"], theme) if own else faint
        axis.plot([row[field] for row in points], [row["loss"] for row in points], **look, label=label, clip_on=False)


def _look(causal: bool, theme: Theme) -> dict[str, Any]:
    """Line style of a policy: one colour for causal ones, another and hollow markers for those that look ahead."""
    if causal:
        return {"color": PALETTE[0], "marker": "s", "linestyle": "-", "zorder": 4}
    return {"color": PALETTE[2], "marker": "D", "markerfacecolor": theme.paper, "linestyle": ":", "zorder": 5}


def _only(panels: Sequence[Axes], count: int, columns: int) -> None:
    """Hides the panels beyond ``count`` and labels the x axis of the lowest visible ones."""
    for index, axis in enumerate(panels):
        axis.set_visible(index < count)
        axis.tick_params(labelbottom=index + columns >= count)


def _across(rows: Sequence[Entry], field: str) -> tuple[float, float]:
    """Returns the limits of an axis of this field."""
    low, high = _margin([row[field] for row in rows], 0.05)
    deepest = max(len(row["active"]) for row in rows)
    return depth_limits(low, high, deepest, margin=0.0) if field == "depth" else (low, high)


def _margin(values: Sequence[float], share: float) -> tuple[float, float]:
    """Returns the range of ``values``, widened by ``share`` of it on both sides."""
    low, high = min(values), max(values)
    more = share * (high - low) or 0.01 * abs(high) or 1e-3
    return low - more, high + more


def differences(rows: Sequence[Entry], budget: float, *, dark: bool = False) -> Figure:
    """Draws each policy's loss minus the learned gate's at one budget, with the interval of the paired difference.

    Values far outside the others (the oracle's) are arrows at the edge; numbers are printed beside the lines.
    """
    with house(dark=dark) as theme:
        here = [row for row in rows if row["budget"] == budget]
        shown = [row for row in here if row["difference"] is not None]
        shown += [row for row in here if row["loss"] is None]
        figure = new_figure(width=PAGE, height=1.05 + 0.19 * len(shown))
        axis = figure.subplots()
        low, high = _limits([row for row in shown if row["policy"] != ORACLE])
        axis.set_xlim(low, high)
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.axvline(0.0, color=theme.ink, linewidth=0.8)
        for height, row in enumerate(shown):
            note = f"cannot: {row['missed']}" if row["loss"] is None else _numbers(row)
            axis.annotate(
                note, (1.01, height), xycoords=("axes fraction", "data"), fontsize=6.5, va="center", color=theme.muted
            )
            if row["loss"] is not None:
                _mark(axis, row, height, low, high, theme)
        axis.set_yticks(range(len(shown)), [row["policy"] for row in shown])
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(f"loss minus the learned gate's (nats per token)\n{_promise(shown, low, high)}")
        ahead = "" if all(row["causal"] for row in shown) else f"; hollow{_AHEAD}"
        axis.set_title(f"Tuned to mean depth {budget:.2f}, held-out text{ahead}", loc="left")
    return figure


def _promise(rows: Sequence[Entry], low: float, high: float) -> str:
    """Describes the lines and arrows that are drawn."""
    gaps = [row["difference"] for row in rows if row["difference"] is not None]
    lines = any(gap["interval"] is not None for gap in gaps)
    words = "line: 95 % of the paired difference" if lines else "too few documents or windows for a 95 % interval"
    return words + ("; arrow: beyond this axis" if any(not low <= gap["mean"] <= high for gap in gaps) else "")


def _limits(rows: Sequence[Entry]) -> tuple[float, float]:
    gaps = [row["difference"] for row in rows if row["difference"] is not None]
    ends = [0.0, *(end for gap in gaps for end in (gap["interval"] or [gap["mean"]]))]
    margin = 0.06 * (max(ends) - min(ends)) or 1e-3
    return min(ends) - margin, max(ends) + margin


def _numbers(row: Entry) -> str:
    off = "" if row["missed"] is None else " off the budget"
    return f"{row['difference']['mean']:+.4f}  depth {row['depth']:.2f}{off}"


def _mark(axis: Axes, row: Entry, height: int, low: float, high: float, theme: Theme) -> None:
    """Draws one difference with its interval, or an arrow where it lies outside the axis."""
    gap = row["difference"]
    look = _look(row["causal"], theme)
    inside = min(max(gap["mean"], low), high)
    if gap["interval"] is not None and inside == gap["mean"]:
        axis.plot(gap["interval"], [height, height], color=look["color"], linewidth=1.2, linestyle="-", marker="none")
    look |= {"linestyle": "none", "clip_on": False, "zorder": 5}
    if inside != gap["mean"]:
        look |= {"marker": "<" if inside == low else ">"}
    axis.plot([inside], [height], **look)


def keep_probability(rows: Sequence[Entry], budget: float, *, dark: bool = False) -> Figure:
    """Draws the share of tokens active at iteration 1 … K, one small panel per policy."""
    with house(dark=dark):
        shown = [row for row in rows if row["budget"] == budget and row["active"]]
        columns = min(5, len(shown))
        lines = math.ceil(len(shown) / columns)
        figure = new_figure(width=PAGE, height=0.5 + 1.15 * lines)
        grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        panels = list(grid.ravel())
        for axis, row in zip(panels, shown, strict=False):
            active = row["active"]
            iterations = range(1, len(active) + 1)
            # One colour: those of the depth ramp are depths of tokens, and here are iterations.
            drawn = axis.bar(iterations, active, color=PALETTE[0], width=0.75)
            axis.bar_label(drawn, [f"{share:.2f}".removeprefix("0") for share in active], fontsize=5.5, padding=1)
            # A long name takes two lines, so that it does not run into its neighbour.
            name = row["policy"].replace(", ", ",\n", 1)
            axis.set_title(name if row["causal"] else f"{name} †", fontsize=7.0)
            axis.set_ylim(0.0, 1.18)
            axis.set_xticks(list(iterations))
            axis.set_yticks([0.0, 0.5, 1.0])
            axis.grid(axis="x", visible=False)
        _only(panels, len(shown), columns)
        ahead = "" if all(row["causal"] for row in shown) else f"    (†{_AHEAD})"
        figure.supxlabel(f"iteration{ahead}", fontsize=8.0)
        figure.supylabel(f"share of active tokens, tuned to mean depth {budget:.2f}", fontsize=8.0)
    return figure


def frontier(rows: Sequence[Entry], *, dark: bool = False) -> Figure:
    """Draws held-out loss against mean depth: budgets met by thresholds, and fixed depths."""
    with house(dark=dark) as theme:
        figure = new_figure(width=COLUMN * 1.5, height=3.0)
        axis = figure.subplots()
        met = sorted((row for row in rows if row["budget"] is not None), key=lambda row: row["depth"])
        fixed = sorted((row for row in rows if row["budget"] is None), key=lambda row: row["depth"])
        for index, (points, label) in enumerate([(met, "learned gate, calibrated"), (fixed, "fixed depth")]):
            axis.plot(*_line(points), **series(index), label=label, clip_on=False)
        chosen = [row for row in met if row["policy"] == "a tau per iteration"]
        ring: dict[str, Any] = {"marker": "o", "markersize": 8.0, "markerfacecolor": "none", "linestyle": "none"}
        if chosen:
            axis.plot(*_line(chosen), **ring, clip_on=False, color=theme.muted, label="with a tau per iteration")
        axis.set_xlim(_across(rows, "depth"))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("mean iterations per token, held-out text")
        axis.set_ylabel("loss (nats per token)")
        axis.legend()
    return figure


def _line(rows: Sequence[Entry]) -> tuple[list[float], list[float]]:
    return [row["depth"] for row in rows], [row["loss"] for row in rows]
