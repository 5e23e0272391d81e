"""Draws the figure of a sweep from its records: loss against each setting and against requested and realised depth.

``sensitivity(json.loads(Path("sweep.json").read_text())["runs"])`` draws a sweep's figure again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from adaponder.analysis.style import PAGE, Theme, at_least, depth_limits, house, new_figure, series
from adaponder.errors import InputError

_MEANINGS = {
    "train.ponder_weight": "λ, weight of the ponder loss",
    "train.k_max": "k, share of gates pushed closed",
    "model.iterations": "K, most iterations per token",
    "model.tau": "τ, a token halts below",
}
_RING: dict[str, Any] = {"marker": "o", "markersize": 9.0, "markeredgewidth": 0.8, "fillstyle": "none", "linestyle": ""}


class Spread(NamedTuple):
    """Mean and standard deviation (``None`` for a single seed) over the seeds of one setting."""

    mean: float
    deviation: float | None
    count: int

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}}" + (f" ± {self.deviation:{spec}}" if self.deviation is not None else "")


@dataclass(frozen=True)
class Point:
    """One setting of a sweep, averaged over its seeds; results are ``None`` if no seed has finished.

    Attributes:
        fields: value of every varied recipe field, by the field's name.
        runs: number of planned runs; ``loss.count`` of them have finished.
        requested: mean depth that the recipe aims at.
        halted: for each depth 1 … K-1, the share of validation tokens with at most this depth.
    """

    fields: Mapping[str, Any]
    runs: int
    embedding_scale: float | None
    requested: float | None
    loss: Spread | None
    depth: Spread | None
    halted: Sequence[float] | None
    tokens_per_second: float | None


def points(records: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Returns one point per setting of the sweep, in planned order, with means over its seeds."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(repr(sorted(record["fields"].items())), []).append(record)
    return [_point(group) for group in groups.values()]


def _point(group: Sequence[Mapping[str, Any]]) -> Point:
    done = [record for record in group if record["status"] == "finished"]
    halted = [record["validation_halted"] for record in done]
    speeds = [record["tokens_per_second"] for record in done if record["tokens_per_second"] is not None]

    def known(key: str) -> Any:
        """Returns the field ``key``, which is the same in all runs of the setting; ``None`` if no run has it."""
        return next((record[key] for record in [*done, *group] if record.get(key) is not None), None)

    def spread(key: str) -> Spread | None:
        values = [record[key] for record in done]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Spread(statistics.fmean(values), deviation, len(values)) if values else None

    return Point(
        fields=dict(group[0]["fields"]),
        runs=len(group),
        embedding_scale=known("embedding_scale"),
        requested=known("requested_depth"),
        loss=spread("validation_loss"),
        depth=spread("validation_depth"),
        halted=[statistics.fmean(shares) for shares in zip(*halted, strict=True)] if done else None,
        tokens_per_second=statistics.fmean(speeds) if speeds else None,
    )


def symbol(field: str) -> str:
    """Returns the paper's symbol for a recipe field, or the field's name if it has none."""
    return _MEANINGS.get(field, field.rpartition(".")[2].replace("_", " ")).partition(",")[0]


def text_of(value: Any) -> str:
    """Formats a value as on the command line."""
    if isinstance(value, list):
        return ", ".join(map(text_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


class Line(NamedTuple):
    """Points that differ only in the recipe field ``axis``, ordered by this field if it is numeric."""

    axis: str
    label: str
    points: Sequence[Point]


def lines_of(settings: Sequence[Point]) -> list[Line]:
    """Returns the lines to draw.

    If the settings are a full grid, lines run along the numeric field with the most values, one line for each setting
    of the other fields; without a numeric field, every point is a line. If fields were varied one at a time, there is
    one line for each field.
    """
    values = {field: _distinct([point.fields[field] for point in settings]) for field in settings[0].fields}
    if len(settings) < math.prod(map(len, values.values())):
        return [max(_along(field, settings), key=lambda line: len(line.points)) for field in values]
    if numeric := [field for field in values if all(map(_is_number, values[field]))]:
        return _along(max(numeric, key=lambda field: len(values[field])), settings)
    return [Line(next(iter(values), ""), _setting(point.fields), [point]) for point in settings]


def _along(axis: str, settings: Sequence[Point]) -> list[Line]:
    """Groups points into lines along field ``axis``, one for each combination of the other fields' values."""
    if all(_is_number(point.fields[axis]) for point in settings):
        settings = sorted(settings, key=lambda point: point.fields[axis])
    groups: dict[str, list[Point]] = {}
    for point in settings:
        others = _setting({field: value for field, value in point.fields.items() if field != axis})
        groups.setdefault(others, []).append(point)
    return [Line(axis, label, group) for label, group in groups.items()]


def _setting(fields: Mapping[str, Any]) -> str:
    return ",  ".join(f"{symbol(field)} = {text_of(value)}" for field, value in fields.items())


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Returns each value once, in order; values may be lists, which a set cannot hold."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def sensitivity(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws the paper's sensitivity figure: validation loss against each setting, requested and realised depth.

    Points are means over seeds, bars are one standard deviation. Runs that failed or have not ended are only counted,
    in a remark. Raises if no run has finished.
    """
    settings = points(records)
    done = [point for point in settings if point.loss]
    if not done:
        raise InputError("no run of this sweep has finished: there is nothing to draw yet")
    lines = lines_of(settings)
    knobs = _distinct([line.axis for line in lines if line.axis])
    depths = ["requested", "realised"] if any(point.requested is not None for point in settings) else ["realised"]
    # The mosaic is six cells wide: one row for one knob; else knobs, at most three a row, above the depths.
    groups = [[*knobs, *depths]] if len(knobs) <= 1 else [*(knobs[i : i + 3] for i in range(0, len(knobs), 3)), depths]
    rows = [[name for name in group for _ in range(6 // len(group))] for group in groups]
    # Where axes were varied one at a time, the unchanged recipe is the point that all lines share.
    varied = len({line.axis for line in lines}) > 1
    base = next((point for point in lines[0].points if varied and all(point in line.points for line in lines)), None)
    with house() as theme:
        figure = new_figure(width=PAGE, height=2.1 * len(rows) + 0.5)
        panels = figure.subplot_mosaic(rows, sharey=True)
        for letter, (name, panel) in zip("abcdefghijklmnopqrstuvwxyz", panels.items(), strict=False):
            for index, line in enumerate(lines):
                if name in depths or name == line.axis:
                    _draw(panel, name, line, series(index, len(lines)), theme)
            panel.set_title(f"({letter})")
            if name in [row[0] for row in rows]:
                panel.set_ylabel("validation loss\n(nats per token)")
            else:
                panel.tick_params(left=False, labelleft=False)
        for knob in knobs:
            _scale(panels[knob], knob, [point.fields[knob] for line in lines for point in line.points])
        # Shares halted are known after each iteration but the last.
        deepest = max(len(point.halted) + 1 for point in done if point.halted is not None)
        low, high = zip(*(panels[name].get_xlim() for name in depths), strict=True)
        limits = depth_limits(*at_least(0.2, min(low), max(high)), deepest, margin=0.0)
        for name in depths:
            if base is not None and base.loss is not None and (depth := _depth(base, name)) is not None:
                panels[name].plot(depth, base.loss.mean, color=theme.ink, **_RING, clip_on=False)
            panels[name].set(xlim=limits, xlabel=f"mean iterations, {name}")
            panels[name].xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        first = panels[rows[0][0]]
        first.set_ylim(at_least(0.002, *first.get_ylim()))
        if len(lines) > 1:
            labels = [f"{symbol(line.axis)} varied,  {line.label}" if varied else line.label for line in lines]
            looks = [series(index, len(lines)) for index in range(len(lines))]
            handles = [Line2D([], [], markeredgewidth=0.0, **look) for look in looks]
            if base is not None:
                handles.append(Line2D([], [], color=theme.ink, **_RING))
                labels.append("the recipe itself")
            figure.legend(handles, labels, loc="outside upper center", ncols=min(len(handles), 4), handlelength=3.5)
        counts = [point.loss.count for point in done if point.loss]
        seeds, missing = max(counts), len(records) - sum(counts)
        remarks = [f"bars: one standard deviation over {seeds} seeds"] if seeds > 1 else []
        if missing:
            remarks.append(f"{missing} of {len(records)} runs failed or have not ended: not drawn")
        if remarks:
            figure.supxlabel("; ".join(remarks), fontsize=6.5, color=theme.muted)
    return figure


def _draw(panel: Axes, name: str, line: Line, look: dict[str, Any], theme: Theme) -> None:
    """Draws a line in panel ``name``; x is the line's recipe field, or the ``requested`` or ``realised`` depth."""
    numeric = all(_is_number(point.fields.get(line.axis)) for point in line.points)
    if name == line.axis:
        values = [point.fields[name] if numeric else text_of(point.fields[name]) for point in line.points]
    else:
        values = [_depth(point, name) for point in line.points]
    measured = [
        (x, p.loss, p.depth) for x, p in zip(values, line.points, strict=True) if p.loss and p.depth and x is not None
    ]
    several = any(loss.count > 1 for _, loss, _ in measured)
    # No line through settings that have no order, or that request the same depth.
    if not numeric or (name != line.axis and len(set(values)) < len(values)):
        look = look | {"linestyle": "none"}
    panel.errorbar(
        [x for x, *_ in measured],
        [loss.mean for _, loss, _ in measured],
        yerr=[loss.deviation or 0.0 for _, loss, _ in measured] if several else None,
        xerr=[depth.deviation or 0.0 for *_, depth in measured] if several and name == "realised" else None,
        elinewidth=0.7,
        # An edge in the colour of the paper keeps markers apart where they overlap.
        markeredgecolor=theme.paper,
        markeredgewidth=0.5,
        clip_on=False,
        **look,
    )


def _depth(point: Point, name: str) -> float | None:
    return point.requested if name == "requested" else point.depth and point.depth.mean


def _scale(panel: Axes, knob: str, values: Sequence[Any]) -> None:
    """Sets scale, ticks and label of the x axis of field ``knob`` with these values."""
    if not all(map(_is_number, values)):
        panel.set_xlim(-0.5, len(_distinct(values)) - 0.5)
    elif min(values) > 0 and max(values) / min(values) >= 50:
        panel.set_xscale("log")
    else:
        integer = all(isinstance(value, int) for value in values)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=integer))
    panel.set_xlabel(_MEANINGS.get(knob, symbol(knob)))
