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

from adaponder.analysis.style import MARKERS, PAGE, PALETTE, house, new_figure, series
from experiments.evidence import Evidence

# The field of PNG metadata that holds the fingerprint of the drawn points.
POINTS = "Description"
# Characters of a line of the legend: three columns must fit on the page.
_WIDEST = 40
# The alias of the setting whose losses by step are drawn.
_ANALYSED = "ada"
_WAYS = {"nll": "as it came out", "nll_at_depth_1": "every token at depth 1", "nll_at_full_depth": "at full depth"}
Spot = tuple[float, float, float]


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


# Two functions for each figure: the first returns the arguments of the second (none without records), which draws.
FIGURES: Mapping[str, tuple[Callable[[Evidence], tuple[Any, ...]], Callable[..., Figure]]] = {
    "loss-against-flops": (cost_points, draw_line),
    "loss-against-iterations": (frontier_points, draw_line),
    "loss-by-halting-step": (step_points, draw_steps),
}


def all_points(evidence: Evidence) -> dict[str, tuple[Any, ...]]:
    """Maps the name of each figure that can be drawn to the arguments of its drawing function."""
    return {name: values for name, (points, _) in FIGURES.items() if (values := points(evidence))}


def fingerprint(points: Any) -> str:
    """Returns a hash of the arguments of a drawing function."""
    return hashlib.sha256(json.dumps(points, sort_keys=True).encode()).hexdigest()[:16]


def save(figure: Figure, path: Path, points: Any) -> None:
    """Writes a PNG that holds the fingerprint of its ``points`` in its metadata."""
    with house():
        figure.savefig(path, dpi=150, metadata={"Software": None, POINTS: fingerprint(points)})
