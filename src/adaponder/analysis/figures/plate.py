"""Defines the base class of the report's figures, and the number formats, axes and bars that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import ArrayLike

from adaponder.analysis.style import Theme, at_least, depth_limits
from adaponder.analysis.tables import Means
from adaponder.analysis.trace import Kind, Trace
from adaponder.methods import Method, method_class, method_names

DEPTH = "depth (iterations)"
HATCH = "////"
# Nats: captions show four decimals.
_MIN_HEIGHT = 4e-4


class Plate(ABC):
    """Base class of a figure: an instance holds numbers computed from a trace; it draws, describes and tabulates them.

    Attributes:
        name: the name of the figure in ``--only``, and of its files.
        alt: alternative text, without numbers (these are in the caption).
        needs: what the traced method must have: ``halting``, ``gates``, ``iterations`` (more than one).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    alt: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, trace: Trace): ...

    @classmethod
    def missing(cls, kind: Kind) -> str | None:
        """Returns why the figure cannot be drawn from a trace of this kind; ``None`` if it can."""
        if "halting" in cls.needs and not kind.halts:
            return f"{kind.method} never halts: every token has depth {kind.deepest}"
        if "gates" in cls.needs and not kind.gates:
            return f"{kind.method} has no gates" + (" with one iteration" if kind.halts else "")
        return "there is only one iteration" if "iterations" in cls.needs and kind.deepest == 1 else None

    @abstractmethod
    def draw(self, theme: Theme) -> Figure: ...

    @abstractmethod
    def caption(self) -> str: ...

    @abstractmethod
    def table(self) -> pd.DataFrame: ...


def traced_method(kind: Kind) -> type[Method]:
    """Returns the class of the traced method, or ``Method`` if that class is not registered in this process."""
    return method_class(kind.method) if kind.method in method_names() else Method


def percent(share: float) -> str:
    """Formats a share as a percentage; below one percent with two significant digits."""
    return f"{share:.1%}" if share == 0 or share >= 0.01 else f"{100 * share:.2g}%"


def listed(parts: list[str]) -> str:
    """Joins words as ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def draw_bars(axes: Axes, x: Any, height: Any, interval: ArrayLike, theme: Theme, **look: Any) -> None:
    """Draws bars with intervals; an outline in the background colour keeps intervals visible on dark bars."""
    axes.bar(x, height, **look)
    bars = axes.errorbar(x, height, yerr=interval, fmt="none", ecolor=theme.ink, elinewidth=1.0, zorder=3)
    for line in (*bars.lines[1], *bars.lines[2]):
        line.set_path_effects([Stroke(linewidth=2.6, foreground=theme.paper), Normal()])


def draw_zero(axes: Axes, theme: Theme) -> None:
    """Draws a line at 0, and widens the y axis (nats) enough that rounding errors do not fill the axis."""
    axes.axhline(0.0, color=theme.ink, linewidth=0.8, zorder=1.5)
    axes.set_ylim(at_least(_MIN_HEIGHT, *axes.get_ylim()))


def iteration_axis(axes: Axes, iterations: Any, names: list[str] | None = None) -> None:
    """Sets one tick per iteration on the x axis, without grid lines; ``names`` replaces the numbers as labels."""
    axes.set_xticks(iterations, names)
    axes.set_xlim(iterations[0] - 0.6, iterations[-1] + 0.6)
    axes.grid(visible=False, axis="x")


def depth_axis(axes: Axes, deepest: int) -> None:
    """Sets ticks of depths 1 … ``deepest`` on the x axis; the last is marked "(all)": its tokens never halted."""
    names = [str(depth) for depth in range(1, deepest)] + [f"{deepest}\n(all)" if deepest > 1 else "1"]
    iteration_axis(axes, range(1, deepest + 1), names)


def mean_depth_limits(groups: Means, deepest: int, *, least: float) -> tuple[float, float]:
    """Returns limits of an axis for these mean depths, with a margin of at least ``least`` iterations."""
    low, high = groups.range
    return depth_limits(low, high, deepest, margin=max(0.1 * (high - low), least))
