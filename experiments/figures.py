"""Draws the figures of the results page from the records."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from adaponder.analysis.style import LINES, MARKERS, PAGE, PALETTE, depth_colours, house, new_figure, series
from experiments.demand import figure_points as demand_points
from experiments.evidence import Evidence
from experiments.tables import learning_rates

# The field of PNG metadata that holds the fingerprint of the drawn points.
POINTS = "Description"
# Characters of a line of the legend: three columns must fit on the page.
_WIDEST = 40
# The alias of the setting whose losses by step and by policy are drawn.
_ANALYSED = "ada"
_WAYS = {"nll": "as it came out", "nll_at_depth_1": "every token at depth 1", "nll_at_full_depth": "at full depth"}
Spot = tuple[float, float, float]


def rate_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the argument of :func:`draw_rates`: ``{title: [(learning rate, loss of seed 0)]}``."""
    tried = {title: sorted(by_rate.items()) for title, by_rate in learning_rates(evidence).items()}
    curves = {title: [(x, float(run.loss)) for x, run in runs if run is not None] for title, runs in tried.items()}
    return ({title: points for title, points in curves.items() if points},)


def draw_rates(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Draws loss against learning rate with a line per setting and a ring at its best rate; high losses are cut off.

    Settings whose names are equal up to the first comma share a colour and differ in markers and line styles.
    """
    with house() as theme:
        figure = new_figure(width=PAGE, height=4.0)
        axes = figure.subplots()
        names = [name.partition(",")[0] for name in curves]
        families, colours = list(dict.fromkeys(names)), [theme.ink, *PALETTE]
        for index, (name, points) in enumerate(curves.items()):
            look: dict[str, Any] = {"color": colours[families.index(names[index]) % len(colours)]}
            before = names[:index].count(names[index])
            look |= {"marker": MARKERS[index % len(MARKERS)], "linestyle": LINES[before % len(LINES)]}
            axes.plot(*zip(*points, strict=True), **look, label=name)
            if len(points) > 1:
                best = min(points, key=lambda point: point[1])
                axes.plot(*best, "o", markersize=9, fillstyle="none", color=look["color"])
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted({rate for points in curves.values() for rate, _ in points})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        lowest = min(loss for points in curves.values() for _, loss in points)
        axes.set(ylim=(lowest - 0.005, lowest + 0.12), xlabel="learning rate", ylabel="validation loss (nats)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _spots(evidence: Evidence, names: Sequence[str], column: str) -> dict[str, Spot]:
    """Returns ``{title: (mean of the column, loss minus vanilla's, half the width of its interval)}``."""
    vanilla, spots = evidence.claims["line"][0], {}
    for name in names:
        if (gap := evidence.minus(name, vanilla)) is not None:
            half = gap.half if gap.freedom and evidence.setting(name) != evidence.setting(vanilla) else 0.0
            spots[evidence.title(name)] = (evidence.mean(name, column), gap.mean, half)
    return spots


def cost_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the arguments of :func:`draw_line`: vanilla models and the methods of Table 1 by inference FLOPs."""
    line, methods = evidence.claims["line"], evidence.claims["tables"]["table 1"]["rows"]
    others = [name for name in methods if name not in line]
    return _spots(evidence, line, "mflops"), _spots(evidence, others, "mflops"), "MFLOP per token at inference"


def frontier_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the arguments of :func:`draw_line`: the curve and the settings compared with it by mean iterations."""
    curve, others = evidence.claims["curve"], evidence.claims["frontier"]
    return _spots(evidence, curve, "depth"), _spots(evidence, others, "depth"), "mean iterations per token"


def draw_line(line: Mapping[str, Spot], others: Mapping[str, Spot], label: str, highest: float = 0.04) -> Figure:
    """Draws losses minus vanilla's: ``line`` as a line, and as separate points the ``others`` below ``highest``."""
    with house() as theme:
        figure = new_figure(width=PAGE, height=3.2 + 0.06 * len(others))
        axes = figure.subplots()
        xs, ys, halves = zip(*line.values(), strict=True)
        look: dict[str, Any] = {"color": theme.ink, "marker": "o", "capsize": 2, "elinewidth": 0.7}
        axes.errorbar(xs, ys, halves, **look, label=textwrap.fill("; ".join(line), _WIDEST))
        for index, (name, (x, y, half)) in enumerate(others.items()):
            if y < highest:
                look |= {"marker": MARKERS[(index + 1) % len(MARKERS)], "color": PALETTE[index % len(PALETTE)]}
                axes.errorbar([x], [y], [half], **look, linestyle="none", label=name)
        axes.set(xlabel=label, ylabel="loss minus vanilla's (nats)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def step_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the arguments of :func:`draw_steps`, with a point per seed and step; empty without measurements."""
    if not (results := list(evidence.measured(_ANALYSED, "steps").values())):
        return ()
    spots = {
        name: [(i, loss) for result in results for i, loss in enumerate(result[way], 1) if loss is not None]
        for way, name in _WAYS.items()
    }
    tokens = [sum(counts) for counts in zip(*(result["tokens"] for result in results), strict=True)]
    return spots, {step: count / sum(tokens) for step, count in enumerate(tokens, 1)}


def draw_steps(spots: Mapping[str, Sequence[tuple[int, float]]], shares: Mapping[int, float]) -> Figure:
    """Draws the mean loss by halting step, a point per seed; tick labels show the ``shares`` of tokens by step."""
    with house():
        figure = new_figure(width=PAGE, height=3.0)
        axes = figure.subplots()
        for index, (name, points) in enumerate(spots.items()):
            look: dict[str, Any] = dict(series(index))
            steps = sorted({step for step, _ in points})
            axes.plot(steps, [fmean(y for x, y in points if x == step) for step in steps], **look, label=name)
            axes.scatter(*zip(*points, strict=True), s=9, color=look["color"], alpha=0.5, linewidths=0)
        names = [f"{step}\n{100 * share:.1f} %" for step, share in sorted(shares.items())]
        axes.set_xticks(sorted(shares), names)
        axes.set_xlim(min(shares) - 0.3, max(shares) + 0.3)
        axes.set(xlabel="halted at step, and share of the tokens", ylabel="mean loss (nats)")
        axes.legend(loc="best")
    return figure


def policy_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the argument of :func:`draw_policies`, ``{policy: [value per seed]}``, without oracle policies."""
    gaps: dict[str, list[float]] = {}
    for result in evidence.measured(_ANALYSED, "policies").values():
        losses = {name: policy["loss"] for name, policy in result["compared"].items() if policy["loss"] is not None}
        for name in (name for name in losses if name != "learned gate" and "oracle" not in name):
            gaps.setdefault(name, []).append(losses[name] - losses["learned gate"])
    return (gaps,) if gaps else ()


def draw_policies(gaps: Mapping[str, Sequence[float]]) -> Figure:
    """Draws the loss of each policy minus the learned gate's at equal depth: a point per seed, a bar at the mean."""
    with house() as theme:
        ordered = sorted(gaps, key=lambda name: -fmean(gaps[name]))
        figure = new_figure(width=PAGE, height=0.9 + 0.22 * len(ordered))
        axes = figure.subplots()
        for place, values in enumerate(gaps[name] for name in ordered):
            axes.plot(values, [place] * len(values), "o", color=PALETTE[0], markersize=3.5)
            axes.plot([fmean(values)], [place], "|", color=theme.ink, markersize=11, markeredgewidth=1.4)
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
    """Draws the right answers of each ``fixed`` K and of the model ``name`` by number of hops, and that model's depths.

    ``by_depth`` holds the model's numbers of questions: a row per number of hops (``needs``), a column per depth.
    """
    with house() as theme:
        figure = new_figure(width=PAGE, height=3.0)
        left, right = figure.subplots(1, 2, width_ratios=[1.25, 1.0])
        for index, (iterations, shares) in enumerate(sorted(fixed.items())):
            look = dict(series(index)) | {"color": depth_colours(max(fixed))[iterations - 1]}
            left.plot(needs, [100 * share for share in shares], **look, label=f"every token read {iterations}x")
        wrapped = textwrap.fill(name, _WIDEST)
        left.plot(needs, [100 * share for share in accuracy], "*", color=theme.ink, markersize=8, label=wrapped)
        left.set(xticks=needs, ylim=(0, 104), xlabel="hops that a question needs", ylabel="right answers (%)")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        table = [[100 * count / sum(row) for count in row] for row in by_depth]
        right.imshow(table, cmap="Greys", vmin=0, vmax=130, aspect="auto")
        for y, row in enumerate(table):
            for x, share in enumerate(row):
                right.text(x, y, f"{share:.0f}", ha="center", va="center", color="white" if share > 65 else "black")
        right.set_xticks(range(len(table[0])), [f"{depth}x" for depth in range(1, len(table[0]) + 1)])
        right.set_yticks(range(len(needs)), [str(need) for need in needs])
        right.set(xlabel=f"read so often by {name.partition(',')[0]}", ylabel="hops")
        right.grid(visible=False)
    return figure


# Two functions for each figure: the first returns the arguments of the second (none without records), which draws.
FIGURES: Mapping[str, tuple[Callable[[Evidence], tuple[Any, ...]], Callable[..., Figure]]] = {
    "loss-against-flops": (cost_points, draw_line),
    "loss-by-learning-rate": (rate_points, draw_rates),
    "loss-against-iterations": (frontier_points, draw_line),
    "loss-by-halting-step": (step_points, draw_steps),
    "policies-at-equal-depth": (policy_points, draw_policies),
    "depth-on-demand": (demand_points, draw_demand),
}


def all_points(evidence: Evidence) -> dict[str, tuple[Any, ...]]:
    """Maps the name of each figure that can be drawn to the arguments of its drawing function."""
    return {name: values for name, (points, _) in FIGURES.items() if (values := points(evidence))}


def fingerprint(points: Any) -> str:
    """Returns a hash of the arguments of a drawing function."""
    return hashlib.sha256(json.dumps(points, sort_keys=True).encode()).hexdigest()[:16]


def save(figure: Figure, path: Path, points: Any) -> None:
    """Writes a PNG that holds the fingerprint of its ``points`` in its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with house():
        figure.savefig(path, dpi=150, metadata={"Software": None, POINTS: fingerprint(points)})
