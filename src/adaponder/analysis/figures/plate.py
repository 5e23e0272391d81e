"""A plate: one figure with its measurement from a trace, its caption in numbers and its table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import ArrayLike

from adaponder.analysis.style import Theme
from adaponder.analysis.trace import Kind, Trace
from adaponder.methods import Method, method_class, method_names

DEPTH = "depth (iterations read)"
# Nats: captions tell four decimals.
_LEAST_HEIGHT = 4e-4


@dataclass(frozen=True)
class Plate:
    """One figure.

    Attributes:
        name: of its files, and what ``--only`` calls it.
        alt: alternative text; the numbers are in the caption.
        missing: why it cannot be drawn from a trace of this kind; ``None`` if it can.
        measure: computes what ``draw``, ``caption`` and ``table`` show.
        of_losses: whether it shows losses, and so only predictions of what is learned (:attr:`Trace.scored`).
    """

    name: str
    title: str
    alt: str
    missing: Callable[[Kind], str | None]
    measure: Callable[[Trace], Any]
    draw: Callable[[Any, Theme], Figure]
    caption: Callable[[Any], str]
    table: Callable[[Any], pd.DataFrame]
    of_losses: bool = False

    def measured(self, trace: Trace) -> Any:
        """What is shown of ``trace``."""
        return self.measure(trace.scored if self.of_losses else trace)


def facts_of(kind: Kind) -> type[Method]:
    """The class of the traced method; a method of one's own that is not registered here is drawn as any other."""
    return method_class(kind.method) if kind.method in method_names() else Method


def needs_nothing(kind: Kind) -> str | None:
    return None


def needs_halting(kind: Kind) -> str | None:
    return None if kind.halts else f"{kind.method} never halts: every token is read {times(kind.deepest)}"


def needs_gates(kind: Kind) -> str | None:
    if kind.gates:
        return None
    return "at one iteration no gate is asked" if kind.halts else f"{kind.method} has no gates"


def needs_iterations(kind: Kind) -> str | None:
    return None if kind.deepest > 1 else f"every token is read {times(kind.deepest)}: there is no second iteration"


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def percent(share: float) -> str:
    """A share as a percentage; below one percent with two significant digits."""
    return f"{share:.1%}" if share == 0 or share >= 0.01 else f"{100 * share:.2g}%"


def nats(value: float) -> str:
    return f"{value:.3f} nats"


def spread(low: float, high: float) -> str:
    """`` [low, high]``, or an empty string for NaN."""
    return "" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"


def listed(parts: list[str]) -> str:
    """``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def whiskers(axes: Axes, x: ArrayLike, y: ArrayLike, bars: ArrayLike, theme: Theme) -> None:
    """Draws intervals over bars; a rim in the colour of the paper keeps them visible on dark bars."""
    drawn = axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=theme.ink, elinewidth=1.0, zorder=3)
    for line in (*drawn.lines[1], *drawn.lines[2]):
        line.set_path_effects([Stroke(linewidth=2.6, foreground=theme.paper), Normal()])


def not_of_noise(axes: Axes) -> None:
    """Makes an axis of nats at least so high that rounding errors do not fill it."""
    low, high = axes.get_ylim()
    if (more := _LEAST_HEIGHT - (high - low)) > 0:
        axes.set_ylim(low - more / 2, high + more / 2)


def depth_axis(axes: Axes, deepest: int) -> None:
    """Makes the x axis one of depths 1 … ``deepest``; the last is marked as that of tokens that never halted."""
    names = [str(depth) for depth in range(1, deepest)] + [f"{deepest}\n(all)" if deepest > 1 else "1"]
    axes.set_xticks(range(1, deepest + 1), names)
    axes.set_xlim(0.4, deepest + 0.6)
    axes.grid(visible=False, axis="x")
