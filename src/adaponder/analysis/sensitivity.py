"""The figure of a sweep: loss against each setting and against requested and realised depth, drawn from its records.

``sensitivity(json.loads(Path("sweep.json").read_text())["runs"])`` draws a sweep's figure again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adaponder.analysis.style import PAGE, Theme, depth_limits, house, new_figure, series
from adaponder.errors import InputError

_SYMBOLS = {"train.ponder_weight": "λ", "train.k_max": "k", "model.iterations": "K", "model.tau": "τ"}
_MEANINGS = {
    "train.ponder_weight": "λ, weight of the ponder loss",
    "train.k_max": "k, share of gates pushed closed",
    "model.iterations": "K, most iterations per token",
    "model.tau": "τ, a token halts below",
}
_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 9.0,
    "markerfacecolor": "none",
    "markeredgewidth": 0.8,
    "linestyle": "none",
}


class Spread(NamedTuple):
    """Mean and standard deviation (``None`` of a single one) over the seeds of one setting."""

    mean: float
    deviation: float | None
    count: int

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}}" + (f" ± {self.deviation:{spec}}" if self.deviation is not None else "")


@dataclass(frozen=True)
class Point:
    """One setting of a sweep, over its seeds; ``None`` where no seed has finished.

    Attributes:
        fields: value of every axis. runs: how many were planned; how many finished is ``loss.count``.
        embedding_scale: of the models trained. requested: the target mean depth.
        loss, depth: on validation text. halted: mean shares after iterations 1 … K-1.
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
        """Returns a value that all runs of the setting share, preferably of a finished run."""
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
    """Returns the paper's letter for a field, or its name."""
    return _SYMBOLS.get(field, field.rpartition(".")[2].replace("_", " "))


def text_of(value: Any) -> str:
    """Formats a value as it would be typed."""
    if isinstance(value, list):
        return ", ".join(map(text_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


class Line(NamedTuple):
    """Points that differ in one axis only, in the order of its values."""

    axis: str
    label: str
    points: Sequence[Point]


def lines_of(settings: Sequence[Point]) -> list[Line]:
    """Returns the lines to draw. For a full grid: along its longest numeric axis, one for each setting of the other
    axes (one per point where no axis is numeric). For settings varied one at a time: one along each axis."""
    fields = list(settings[0].fields)
    values = {field: _distinct([point.fields[field] for point in settings]) for field in fields}
    if len(settings) < math.prod(map(len, values.values())):
        return [max(_along(field, settings), key=lambda line: len(line.points)) for field in fields]
    if numeric := [field for field in fields if all(map(_is_number, values[field]))]:
        return _along(max(numeric, key=lambda field: len(values[field])), settings)
    return [Line(fields[0] if fields else "", _setting(point.fields), [point]) for point in settings]


def _along(axis: str, settings: Sequence[Point]) -> list[Line]:
    """Returns a line for each combination of the other axes' values, sorted by the axis where it has numbers."""
    if all(_is_number(point.fields.get(axis)) for point in settings):
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
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _base(lines: Sequence[Line]) -> Point | None:
    """Returns the unchanged recipe where axes were varied one at a time: the point on every line."""
    if len({line.axis for line in lines}) < 2:
        return None
    return next((point for point in lines[0].points if all(point in line.points for line in lines)), None)


# --- drawing -------------------------------------------------------------------------------------------------------

_DEPTHS: dict[str, Callable[[Point], float | None]] = {
    "requested": lambda point: point.requested,
    "realised": lambda point: None if point.depth is None else point.depth.mean,
}


def sensitivity(records: Sequence[Mapping[str, Any]], *, dark: bool = False) -> Figure:
    """Draws the paper's sensitivity figure: validation loss against each setting, requested and realised depth.

    Means over seeds; bars are one standard deviation. Runs that failed or have not ended are counted below, not drawn.
    """
    settings = points(records)
    if not any(point.loss for point in settings):
        raise InputError("no run of this sweep has finished: there is nothing to draw yet")
    lines = lines_of(settings)
    knobs = _distinct([line.axis for line in lines if line.axis])
    depths = [name for name, depth_of in _DEPTHS.items() if any(depth_of(point) for point in settings)]
    # Six cells wide: one row for one knob; else knobs, at most three a row, above the depths.
    groups = [[*knobs, *depths]] if len(knobs) <= 1 else [*(knobs[i : i + 3] for i in range(0, len(knobs), 3)), depths]
    rows = [[name for name in group for _ in range(6 // len(group))] for group in groups]
    with house(dark=dark) as theme:
        figure = new_figure(width=PAGE, height=2.1 * len(rows) + 0.5)
        panels = figure.subplot_mosaic(rows, sharey=True)
        for knob in knobs:
            _draw_knob(panels[knob], knob, lines, theme)
        for name in depths:
            _draw_depth(panels[name], name, lines, theme)
        for letter, (name, panel) in zip("abcdefghijklmnopqrstuvwxyz", panels.items(), strict=False):
            panel.set_title(f"({letter})")
            if name not in [row[0] for row in rows]:
                panel.tick_params(left=False, labelleft=False)
        for row in rows:
            panels[row[0]].set_ylabel("validation loss\n(nats per token)")
        # Shares halted are known after each iteration but the last.
        deepest = max(len(point.halted) + 1 for point in settings if point.halted is not None)
        low, high = zip(*(panels[name].get_xlim() for name in depths), strict=True)
        for name in depths:
            limits = _at_least(0.2, min(low), max(high))
            panels[name].set_xlim(depth_limits(*limits, deepest, margin=0.0))
        first = panels[rows[0][0]]
        first.set_ylim(_at_least(0.002, *first.get_ylim()))
        _explain(figure, panels[rows[-1][-1]], settings, lines, theme)
    return figure


def _draw_knob(panel: Axes, knob: str, lines: Sequence[Line], theme: Theme) -> None:
    values = [point.fields[knob] for line in lines for point in line.points if line.axis == knob]
    numeric = all(map(_is_number, values))
    names = _distinct(values)
    for index, line in enumerate(lines):
        if line.axis == knob:
            places = [p.fields[knob] if numeric else names.index(p.fields[knob]) for p in line.points]
            _draw(panel, places, line.points, series(index, len(lines)), theme, joined=numeric)
    if not numeric:
        panel.set_xticks(range(len(names)), [text_of(name) for name in names])
        panel.set_xlim(-0.5, len(names) - 0.5)
    elif min(values) > 0 and max(values) / min(values) >= 50:
        panel.set_xscale("log")
    else:
        whole = all(isinstance(value, int) for value in values)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=whole))
    panel.set_xlabel(_MEANINGS.get(knob, symbol(knob)))


def _draw_depth(panel: Axes, name: str, lines: Sequence[Line], theme: Theme) -> None:
    depth_of = _DEPTHS[name]
    for index, line in enumerate(lines):
        placed = [point for point in line.points if depth_of(point) is not None]
        places = [depth_of(point) for point in placed]
        # No line through settings that have no order, or that request the same depth.
        joined = len(set(places)) == len(places) and all(_is_number(point.fields.get(line.axis)) for point in placed)
        look = series(index, len(lines))
        _draw(panel, places, placed, look, theme, joined=joined, realised=name == "realised")
    if (base := _base(lines)) is not None and base.loss is not None and (depth := depth_of(base)) is not None:
        panel.plot(depth, base.loss.mean, color=theme.ink, **_RING, clip_on=False)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    panel.set_xlabel(f"mean iterations, {name}")


def _draw(
    panel: Axes,
    places: Sequence[Any],
    chosen: Sequence[Point],
    look: Mapping[str, Any],
    theme: Theme,
    *,
    joined: bool,
    realised: bool = False,
) -> None:
    """Draws one line of a panel; ``realised`` depths have error bars too."""
    drawn = [(x, p.loss, p.depth) for x, p in zip(places, chosen, strict=True) if p.loss and p.depth]
    several = any(loss.count > 1 for _, loss, _ in drawn)
    look = {**look, **({} if joined else {"linestyle": "none"})}
    panel.errorbar(
        [x for x, *_ in drawn],
        [loss.mean for _, loss, _ in drawn],
        yerr=[loss.deviation or 0.0 for _, loss, _ in drawn] if several else None,
        xerr=[depth.deviation or 0.0 for *_, depth in drawn] if several and realised else None,
        elinewidth=0.7,
        # An edge in the colour of the paper keeps markers apart where they overlap.
        markeredgecolor=theme.paper,
        markeredgewidth=0.5,
        clip_on=False,
        **look,
    )


def _at_least(span: float, low: float, high: float) -> tuple[float, float]:
    """Widens the range about its middle to at least ``span``, so that tiny differences do not fill a panel."""
    more = max(0.0, span - (high - low)) / 2
    return low - more, high + more


def _explain(figure: Figure, panel: Axes, settings: Sequence[Point], lines: Sequence[Line], theme: Theme) -> None:
    """Draws the legend above the panels, and below them what bars mean and how many runs are missing."""
    if len(lines) > 1:
        several = len(_distinct([line.axis for line in lines])) > 1
        labels = [f"{symbol(line.axis)} varied,  {line.label}" if several else line.label for line in lines]
        looks = [series(index, len(lines)) for index in range(len(lines))]
        handles = [panel.plot([], [], markeredgewidth=0.0, **look)[0] for look in looks]
        if _base(lines) is not None:
            handles += panel.plot([], [], color=theme.ink, **_RING)
            labels.append("the recipe itself")
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(handles), 4), handlelength=3.5)
    seeds = max(point.loss.count for point in settings if point.loss)
    planned, done = sum(p.runs for p in settings), sum(p.loss.count for p in settings if p.loss)
    remarks = [f"bars: one standard deviation over {seeds} seeds"] if seeds > 1 else []
    remarks += [f"{planned - done} of {planned} runs failed or have not ended: not drawn"] if done < planned else []
    if remarks:
        figure.supxlabel("; ".join(remarks), fontsize=6.5, color=theme.muted)
