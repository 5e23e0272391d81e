"""Draws the figures of the results page from points of records alone."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from adaponder.analysis.style import LINES, MARKERS, PAGE, PALETTE, Theme, depth_colours, house, new_figure, series

# Where a PNG says which points it shows.
_POINTS = "Description"
# Characters of a line of the legend: three columns must fit on the page.
_WIDEST = 40


class Curve(NamedTuple):
    """One line of a figure: values by place on the x axis and seed."""

    name: str
    points: Mapping[float, Mapping[int, float]]

    def means(self) -> tuple[list[float], list[float]]:
        xs = sorted(x for x, values in self.points.items() if values)
        return xs, [sum(self.points[x].values()) / len(self.points[x]) for x in xs]


class Spot(NamedTuple):
    """One run: its place on the two x axes, and its loss minus the plain model's of the same seed."""

    seed: int
    depth: float
    ratio: float
    gain: float


class Group(NamedTuple):
    """Runs of one setting, seed by seed."""

    name: str
    spots: Sequence[Spot]


def learning_rates(curves: Sequence[Curve], *, dark: bool = False) -> Figure:
    """Draws loss against learning rate, one line per setting, its best rate ringed; the lower part on the right.

    Settings whose names begin alike (up to the first comma) share a colour, and have markers and lines of their own.
    """
    with house(dark=dark) as theme:
        figure = new_figure(width=PAGE, height=3.6)
        panels = figure.subplots(1, 2)
        families = list(dict.fromkeys(_family(curve) for curve in curves))
        colours = [theme.ink, *PALETTE]
        for axes in panels:
            for index, curve in enumerate(curves):
                look: dict[str, Any] = {"color": colours[families.index(_family(curve)) % len(colours)]}
                before = [_family(other) for other in curves[:index]].count(_family(curve))
                look |= {"marker": MARKERS[index % len(MARKERS)], "linestyle": LINES[before % len(LINES)]}
                xs, ys = curve.means()
                axes.plot(xs, ys, **look, label=curve.name)
                best = min(range(len(ys)), key=ys.__getitem__)
                if len(xs) > 1:
                    axes.plot(xs[best], ys[best], "o", markersize=9, fillstyle="none", color=look["color"])
            _rate_axis(axes, sorted({x for curve in curves for x in curve.points}))
        lowest = sorted(min(curve.means()[1]) for curve in curves)
        panels[1].set_ylim(lowest[0] - 0.004, lowest[0] + 0.056)
        panels[1].set_title("the lower part", loc="left", color=theme.muted)
        panels[0].set_ylabel("validation loss (nats)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _family(curve: Curve) -> str:
    return curve.name.partition(",")[0]


def _rate_axis(axes: Axes, rates: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("learning rate")


def frontier(curve: Sequence[Group], others: Sequence[Group], dials: Sequence[Group], *, dark: bool = False) -> Figure:
    """Draws the loss minus the plain model's of the same seed against mean iterations and against FLOPs.

    Separately trained depths are joined by a line of their means; ``others`` are points, one per seed. ``dials`` are
    checkpoints turned to the same depths, one group per seed: a dotted line of their means with the colour and marker
    of the points of the same name, which may leave the figure at the top: what is trained decides its range.
    """
    with house(dark=dark) as theme:
        figure = new_figure(width=PAGE, height=3.4 + 0.08 * len(others))
        panels = figure.subplots(1, 2, sharey=True)
        labels = ("mean iterations per token", "FLOPs per token, x the plain model")
        for axes, field, label in zip(panels, ("depth", "ratio"), labels, strict=True):
            _draw_curve(axes, curve, field, theme)
            for index, group in enumerate(others):
                _draw_spots(axes, group, field, index, theme)
            _draw_dials(axes, dials, field, [group.name for group in others])
            axes.axhline(0.0, color=theme.muted, linewidth=0.7)
            axes.set_xlabel(label)
            axes.margins(x=0.08)
        gains = [spot.gain for group in (*curve, *others) for spot in group.spots]
        spare = 0.12 * (max(gains) - min(gains)) or 0.01
        panels[0].set_ylim(min(gains) - spare, max(gains) + spare)
        panels[0].set_ylabel("loss minus the plain model's, same seed (nats)")
        handles, names = panels[0].get_legend_handles_labels()
        if dials:
            handles.append(Line2D([], [], color=theme.ink, linestyle=":", linewidth=1.1))
            names.append("one checkpoint turned by the dial")
        figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


def _draw_curve(axes: Axes, groups: Sequence[Group], field: str, theme: Theme) -> None:
    """Draws the line through the seed means, a faint point per seed, and the depths' names at the top."""
    means: list[tuple[float, float]] = []
    for group in groups:
        every = [(getattr(spot, field), spot.gain) for spot in group.spots]
        axes.scatter(*zip(*every, strict=True), s=14, color=theme.muted, alpha=0.7, linewidths=0, zorder=2)
        mean = sum(x for x, _ in every) / len(every), sum(y for _, y in every) / len(every)
        means.append(mean)
    look: dict[str, Any] = {"color": theme.ink, "marker": "o", "markersize": 4, "linewidth": 1.0, "zorder": 3}
    axes.plot(*zip(*means, strict=True), **look, label="separately trained (grey: seeds)")
    top = axes.secondary_xaxis("top")
    top.set_xticks([x for x, _ in means], [group.name.rpartition(", ")[2] for group in groups], fontsize=7)
    top.tick_params(length=2)
    top.spines["top"].set_visible(False)


def _draw_dials(axes: Axes, dials: Sequence[Group], field: str, names: Sequence[str]) -> None:
    for name in dict.fromkeys(group.name for group in dials):
        seeds = [sorted(group.spots, key=lambda spot: spot.depth) for group in dials if group.name == name]
        steps = [each for each in zip(*seeds, strict=False) if each]
        means = [[sum(getattr(spot, of) for spot in step) / len(step) for step in steps] for of in (field, "gain")]
        look = _look(names.index(name)) | {"linestyle": ":", "linewidth": 1.1, "markersize": 2.5}
        axes.plot(*means, **look, zorder=2)


def _draw_spots(axes: Axes, group: Group, field: str, index: int, theme: Theme) -> None:
    xs, ys = [getattr(spot, field) for spot in group.spots], [spot.gain for spot in group.spots]
    look = _look(index) | {"markeredgecolor": theme.ink, "markeredgewidth": 0.4}
    axes.plot(xs, ys, **look, label=group.name, zorder=4)


def _look(index: int) -> dict[str, Any]:
    """Returns the colour and marker of a model; the pair is unique."""
    marker = MARKERS[(index + 1) % len(MARKERS)]
    return {"marker": marker, "color": PALETTE[index % len(PALETTE)], "linestyle": "none"}


def steps(lines: Sequence[Curve], shares: Mapping[int, float], *, dark: bool = False) -> Figure:
    """Draws the mean loss by halting step, one line per way of measuring, one point per seed.

    ``shares`` of tokens by step stand below.
    """
    with house(dark=dark) as theme:
        figure = new_figure(width=PAGE, height=3.0)
        axes = figure.subplots()
        for index, line in enumerate(lines):
            look: dict[str, Any] = dict(series(index))
            xs, ys = line.means()
            axes.plot(xs, ys, **look, label=line.name)
            every = [(x, y) for x, values in line.points.items() for y in values.values()]
            axes.scatter(*zip(*every, strict=True), s=9, color=look["color"], alpha=0.5, linewidths=0)
        names = [f"{step}\n{100 * share:.1f} %" for step, share in sorted(shares.items())]
        axes.set_xticks(sorted(shares), names)
        axes.set_xlim(min(shares) - 0.3, max(shares) + 0.3)
        axes.set_xlabel("halted at step, and share of the tokens", color=theme.ink)
        axes.set_ylabel("mean loss (nats)")
        axes.legend(loc="best")
    return figure


def policies(gaps: Mapping[str, Mapping[int, float]], *, dark: bool = False) -> Figure:
    """Draws each policy's loss minus the learned gate's at equal depth: one point per seed, a bar at the mean."""
    with house(dark=dark) as theme:
        ordered = sorted(gaps, key=lambda name: -sum(gaps[name].values()) / len(gaps[name]))
        figure = new_figure(width=PAGE, height=0.9 + 0.22 * len(ordered))
        axes = figure.subplots()
        for place, name in enumerate(ordered):
            values = list(gaps[name].values())
            axes.plot(values, [place] * len(values), "o", color=PALETTE[0], markersize=3.5)
            axes.plot([sum(values) / len(values)], [place], "|", color=theme.ink, markersize=11, markeredgewidth=1.4)
        axes.axvline(0.0, color=theme.muted, linewidth=0.8)
        axes.set_yticks(range(len(ordered)), ordered)
        axes.set_xlabel("loss minus the learned gate's at equal mean depth (nats)")
    return figure


def demand(
    needs: Sequence[int],
    fixed: Mapping[int, Sequence[float]],
    name: str,
    accuracy: Sequence[float],
    by_depth: Sequence[Sequence[int]],
    *,
    dark: bool = False,
) -> Figure:
    """Draws right answers by need, for each ``fixed`` K and the model ``name``, and that model's depths by need.

    ``by_depth`` counts questions: a row per need, a column per depth.
    """
    with house(dark=dark) as theme:
        figure = new_figure(width=PAGE, height=3.0)
        left, right = figure.subplots(1, 2, width_ratios=[1.25, 1.0])
        for index, (iterations, shares) in enumerate(sorted(fixed.items())):
            look = dict(series(index)) | {"color": depth_colours(max(fixed))[iterations - 1]}
            left.plot(needs, [100 * share for share in shares], **look, label=f"every token read {iterations}x")
        wrapped = textwrap.fill(name, _WIDEST)
        left.plot(needs, [100 * share for share in accuracy], "*", color=theme.ink, markersize=8, label=wrapped)
        left.set_xticks(list(needs))
        left.set_ylim(0, 104)
        left.set_xlabel("hops that a question needs")
        left.set_ylabel("right answers (%)")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        table = [[100 * count / sum(row) for count in row] for row in by_depth]
        right.imshow(table, cmap="Greys", vmin=0, vmax=130, aspect="auto")
        for y, row in enumerate(table):
            for x, share in enumerate(row):
                right.text(x, y, f"{share:.0f}", ha="center", va="center", color="white" if share > 65 else "black")
        right.set_xticks(range(len(table[0])), [f"{depth}x" for depth in range(1, len(table[0]) + 1)])
        right.set_yticks(range(len(needs)), [str(need) for need in needs])
        right.set_xlabel(f"read so often by {name.partition(',')[0]}")
        right.set_ylabel("hops")
        right.grid(visible=False)
    return figure


def fingerprint(points: Any) -> str:
    """Returns a hash of the points that a figure shows."""
    return hashlib.sha256(json.dumps(points, sort_keys=True).encode()).hexdigest()[:16]


def save(figure: Figure, path: Path, points: Any) -> None:
    """Writes a PNG that names the points it shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with house():
        figure.savefig(path, dpi=150, metadata={"Software": None, _POINTS: fingerprint(points)})


def shown_by(path: Path) -> str | None:
    """Reads the fingerprint of the points from a PNG."""
    from PIL import Image

    with Image.open(path) as image:
        return image.info.get(_POINTS)
