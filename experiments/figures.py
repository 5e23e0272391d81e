"""Draws the figures of the results page from the records."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from adaponder.analysis.style import LINES, MARKERS, PAGE, PALETTE, Theme, depth_colours, house, new_figure, series
from experiments.demand import figure_points as demand_points
from experiments.evidence import Evidence
from experiments.tables import learning_rates

# The metadata of a PNG that holds the fingerprint of its points.
_POINTS = "Description"
# Characters of a line of the legend: three columns must fit on the page.
_WIDEST = 40
# The run whose traces and policies are drawn.
_ANALYSED = "ada"
_WAYS = {"nll": "as it came out", "nll_at_depth_1": "every token at depth 1", "nll_at_full_depth": "at full depth"}


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


# --- learning rates -------------------------------------------------------------------------------------------------


def rate_points(evidence: Evidence) -> tuple[list[Curve]]:
    """Returns the loss of seed 0 by learning rate, one curve per setting."""
    curves = [
        Curve(title, {rate: {0: points[0].loss} for rate, points in sorted(tried.items()) if 0 in points})
        for title, tried in learning_rates(evidence).items()
    ]
    return ([curve for curve in curves if curve.points],)


def draw_rates(curves: Sequence[Curve]) -> Figure:
    """Draws loss against learning rate, one line per setting, its best rate ringed; the lower part on the right.

    Settings whose names begin alike (up to the first comma) share a colour, and have markers and lines of their own.
    """
    with house() as theme:
        figure = new_figure(width=PAGE, height=3.6)
        panels = figure.subplots(1, 2)
        names = [curve.name.partition(",")[0] for curve in curves]
        families, colours = list(dict.fromkeys(names)), [theme.ink, *PALETTE]
        rates = sorted({x for curve in curves for x in curve.points})
        for axes in panels:
            for index, curve in enumerate(curves):
                look: dict[str, Any] = {"color": colours[families.index(names[index]) % len(colours)]}
                before = names[:index].count(names[index])
                look |= {"marker": MARKERS[index % len(MARKERS)], "linestyle": LINES[before % len(LINES)]}
                xs, ys = curve.means()
                axes.plot(xs, ys, **look, label=curve.name)
                best = min(range(len(ys)), key=ys.__getitem__)
                if len(xs) > 1:
                    axes.plot(xs[best], ys[best], "o", markersize=9, fillstyle="none", color=look["color"])
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(rates))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axes.set_xlabel("learning rate")
        lowest = min(min(curve.means()[1]) for curve in curves)
        panels[1].set_ylim(lowest - 0.004, lowest + 0.056)
        panels[1].set_title("the lower part", loc="left", color=theme.muted)
        panels[0].set_ylabel("validation loss (nats)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


# --- the frontier ---------------------------------------------------------------------------------------------------


def frontier_points(evidence: Evidence) -> tuple[list[Group], list[Group], list[Group]]:
    """Returns the models of the curve, those held against it, and each checkpoint turned by the dial."""
    claims = evidence.claims
    plain = evidence.values(claims["curve"][0])

    def groups(names: Sequence[str]) -> list[Group]:
        return [Group(evidence.title(name), spots) for name in names if (spots := spots_of(name))]

    def spots_of(name: str) -> list[Spot]:
        points = sorted(evidence.points(name).items())
        return [Spot(seed, p.depth, p.cost.ratio, p.loss - plain[seed]) for seed, p in points if seed in plain]

    dials = [
        Group(evidence.title(name), [Spot(seed, depth, ratio, loss - plain[seed]) for depth, ratio, loss in turned])
        for name in claims["dials"]
        for seed, turned in evidence.dialled(name).items()
        if seed in plain
    ]
    return groups(claims["curve"]), groups(claims["frontier"]), dials


def draw_frontier(curve: Sequence[Group], others: Sequence[Group], dials: Sequence[Group]) -> Figure:
    """Draws the loss minus the plain model's of the same seed against mean iterations and against FLOPs.

    Separately trained depths are joined by a line of their means; ``others`` are points, one per seed. ``dials`` are
    checkpoints turned to the same depths, one group per seed: a dotted line of their means with the colour and marker
    of the points of the same name, which may leave the figure at the top: what is trained decides its range.
    """
    with house() as theme:
        figure = new_figure(width=PAGE, height=3.4 + 0.08 * len(others))
        panels = figure.subplots(1, 2, sharey=True)
        labels = ("mean iterations per token", "FLOPs per token, x the plain model")
        for axes, field, label in zip(panels, ("depth", "ratio"), labels, strict=True):
            _draw_curve(axes, curve, field, theme)
            for index, group in enumerate(others):
                xs, ys = [getattr(spot, field) for spot in group.spots], [spot.gain for spot in group.spots]
                look = _look(index) | {"markeredgecolor": theme.ink, "markeredgewidth": 0.4}
                axes.plot(xs, ys, **look, label=group.name, zorder=4)
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
        spots = [(getattr(spot, field), spot.gain) for spot in group.spots]
        axes.scatter(*zip(*spots, strict=True), s=14, color=theme.muted, alpha=0.7, linewidths=0, zorder=2)
        means.append((sum(x for x, _ in spots) / len(spots), sum(y for _, y in spots) / len(spots)))
    look: dict[str, Any] = {"color": theme.ink, "marker": "o", "markersize": 4, "linewidth": 1.0, "zorder": 3}
    axes.plot(*zip(*means, strict=True), **look, label="separately trained (grey: seeds)")
    top = axes.secondary_xaxis("top")
    top.set_xticks([x for x, _ in means], [group.name.rpartition(", ")[2] for group in groups], fontsize=7)
    top.tick_params(length=2)
    top.spines["top"].set_visible(False)


def _draw_dials(axes: Axes, dials: Sequence[Group], field: str, names: Sequence[str]) -> None:
    for name in dict.fromkeys(group.name for group in dials):
        seeds = [sorted(group.spots, key=lambda spot: spot.depth) for group in dials if group.name == name]
        steps = list(zip(*seeds, strict=False))
        means = [[sum(getattr(spot, of) for spot in step) / len(step) for step in steps] for of in (field, "gain")]
        look = _look(names.index(name)) | {"linestyle": ":", "linewidth": 1.1, "markersize": 2.5}
        axes.plot(*means, **look, zorder=2)


def _look(index: int) -> dict[str, Any]:
    """Returns the colour and marker of a model; the pair is unique."""
    marker = MARKERS[(index + 1) % len(MARKERS)]
    return {"marker": marker, "color": PALETTE[index % len(PALETTE)], "linestyle": "none"}


# --- halting steps, policies, puzzles -------------------------------------------------------------------------------


def step_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the loss by halting step, one curve per way of measuring, and the share of the tokens by step."""
    by_seed = evidence.measured(_ANALYSED, "steps")
    if not by_seed:
        return ()
    count = len(next(iter(by_seed.values()))["tokens"])
    curves = []
    for way, name in _WAYS.items():
        at = {
            i + 1: {s: result[way][i] for s, result in by_seed.items() if result[way][i] is not None}
            for i in range(count)
        }
        curves.append(Curve(name, {step: values for step, values in at.items() if values}))
    total = sum(sum(result["tokens"]) for result in by_seed.values())
    return curves, {i + 1: sum(result["tokens"][i] for result in by_seed.values()) / total for i in range(count)}


def draw_steps(curves: Sequence[Curve], shares: Mapping[int, float]) -> Figure:
    """Draws the mean loss by halting step, one point per seed, with the ``shares`` of tokens by step below."""
    with house() as theme:
        figure = new_figure(width=PAGE, height=3.0)
        axes = figure.subplots()
        for index, curve in enumerate(curves):
            look: dict[str, Any] = dict(series(index))
            axes.plot(*curve.means(), **look, label=curve.name)
            spots = [(x, y) for x, values in curve.points.items() for y in values.values()]
            axes.scatter(*zip(*spots, strict=True), s=9, color=look["color"], alpha=0.5, linewidths=0)
        names = [f"{step}\n{100 * share:.1f} %" for step, share in sorted(shares.items())]
        axes.set_xticks(sorted(shares), names)
        axes.set_xlim(min(shares) - 0.3, max(shares) + 0.3)
        axes.set_xlabel("halted at step, and share of the tokens", color=theme.ink)
        axes.set_ylabel("mean loss (nats)")
        axes.legend(loc="best")
    return figure


def policy_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns each policy's loss minus the learned gate's by seed, without oracles."""
    gaps: dict[str, dict[int, float]] = {}
    for seed, result in evidence.measured(_ANALYSED, "policies").items():
        learned = result["compared"]["learned gate"]["loss"]
        for name, policy in result["compared"].items():
            if None not in (policy["loss"], learned) and name != "learned gate" and "oracle" not in name:
                gaps.setdefault(name, {})[seed] = policy["loss"] - learned
    return (gaps,) if gaps else ()


def draw_policies(gaps: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draws each policy's loss minus the learned gate's at equal depth: one point per seed, a bar at the mean."""
    with house() as theme:
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


def draw_demand(
    needs: Sequence[int],
    fixed: Mapping[int, Sequence[float]],
    name: str,
    accuracy: Sequence[float],
    by_depth: Sequence[Sequence[int]],
) -> Figure:
    """Draws right answers by need, for each ``fixed`` K and the model ``name``, and that model's depths by need.

    ``by_depth`` counts questions: a row per need, a column per depth.
    """
    with house() as theme:
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


# --- all figures ----------------------------------------------------------------------------------------------------


class Drawing(NamedTuple):
    """A figure: the function from the records to its points (empty without any), and the one that draws these."""

    points: Callable[[Evidence], tuple[Any, ...]]
    draw: Callable[..., Figure]


FIGURES = {
    "loss-by-learning-rate": Drawing(rate_points, draw_rates),
    "loss-against-iterations": Drawing(frontier_points, draw_frontier),
    "loss-by-halting-step": Drawing(step_points, draw_steps),
    "policies-at-equal-depth": Drawing(policy_points, draw_policies),
    "depth-on-demand": Drawing(demand_points, draw_demand),
}


def all_points(evidence: Evidence) -> dict[str, tuple[Any, ...]]:
    """Returns the points of each figure by name; figures without measurements are left out."""
    points = {name: drawing.points(evidence) for name, drawing in FIGURES.items()}
    return {name: values for name, values in points.items() if values}


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
