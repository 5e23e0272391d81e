"""The base class of a figure of the report, and what figures share: conditions, number formats, axes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Self

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import ArrayLike

from adaponder.analysis.style import Theme
from adaponder.analysis.trace import Kind, Trace
from adaponder.methods import Method, method_class, method_names

DEPTH = "depth (iterations)"
# Nats: captions show four decimals.
_MIN_HEIGHT = 4e-4


class Plate(ABC):
    """One figure: an instance holds its numbers, measured from a trace, and draws, describes and tabulates them.

    Attributes:
        name: of its files, and of ``--only``.
        alt: alternative text; the numbers are in the caption.
        of_losses: whether it shows losses, and so only predictions of learned tokens (:attr:`Trace.scored`).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    alt: ClassVar[str]
    of_losses: ClassVar[bool] = False

    @staticmethod
    def missing(kind: Kind) -> str | None:
        """Returns why the figure cannot be drawn from a trace of this kind; ``None`` if it can."""
        return None

    @classmethod
    def measured(cls, trace: Trace) -> Self:
        """Measures the predictions of ``trace`` that this figure shows."""
        return cls.measure(trace.scored if cls.of_losses else trace)

    @classmethod
    @abstractmethod
    def measure(cls, trace: Trace) -> Self: ...

    @abstractmethod
    def draw(self, theme: Theme) -> Figure: ...

    @abstractmethod
    def caption(self) -> str: ...

    @abstractmethod
    def table(self) -> pd.DataFrame: ...


def facts_of(kind: Kind) -> type[Method]:
    """Returns the class of the traced method, or the base class where it is not registered in this process."""
    return method_class(kind.method) if kind.method in method_names() else Method


def needs_halting(kind: Kind) -> str | None:
    return None if kind.halts else f"{kind.method} never halts: every token has depth {kind.deepest}"


def needs_gates(kind: Kind) -> str | None:
    if kind.gates:
        return None
    return "with one iteration no gate is evaluated" if kind.halts else f"{kind.method} has no gates"


def needs_iterations(kind: Kind) -> str | None:
    return None if kind.deepest > 1 else "every token has depth 1: there is no second iteration"


def percent(share: float) -> str:
    """Formats a share as a percentage; below one percent with two significant digits."""
    return f"{share:.1%}" if share == 0 or share >= 0.01 else f"{100 * share:.2g}%"


def nats(value: float) -> str:
    return f"{value:.3f} nats"


def spread(low: float, high: float) -> str:
    """Formats an interval as `` [low, high]``; NaN gives an empty string."""
    return "" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"


def listed(parts: list[str]) -> str:
    """Joins words as ``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def whiskers(axes: Axes, x: ArrayLike, y: ArrayLike, bars: ArrayLike, theme: Theme) -> None:
    """Draws intervals over bars; a rim in the colour of the paper keeps them visible on dark bars."""
    drawn = axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=theme.ink, elinewidth=1.0, zorder=3)
    for line in (*drawn.lines[1], *drawn.lines[2]):
        line.set_path_effects([Stroke(linewidth=2.6, foreground=theme.paper), Normal()])


def not_of_noise(axes: Axes) -> None:
    """Makes an axis of nats high enough that rounding errors do not fill it."""
    low, high = axes.get_ylim()
    if (more := _MIN_HEIGHT - (high - low)) > 0:
        axes.set_ylim(low - more / 2, high + more / 2)


def depth_axis(axes: Axes, deepest: int) -> None:
    """Makes the x axis one of depths 1 … ``deepest``; the last is marked as that of tokens that never halted."""
    names = [str(depth) for depth in range(1, deepest)] + [f"{deepest}\n(all)" if deepest > 1 else "1"]
    axes.set_xticks(range(1, deepest + 1), names)
    axes.set_xlim(0.4, deepest + 0.6)
    axes.grid(visible=False, axis="x")
