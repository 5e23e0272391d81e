"""The style of all figures: readable without colour vision and in grey print, the same bytes when drawn again.

A figure is made inside ``with house():`` (``house(dark=True)`` for a dark page) and written by ``save``::

    with house():
        figure = new_figure(width=PAGE, height=2.6)
        axes = figure.subplots(1, 2)
        axes[0].plot(x, y, **series(0), label="learned gate")
        axes[1].bar(depths, shares, color=depth_colours(deepest))
    save(figure, out / "name")  # name.png and name.svg
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib
from matplotlib import colormaps
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from rich.style import Style

from adaponder.terminal import depth_style

Colour = tuple[float, float, float]

# Inches: one column and the whole text width of a two-column page. Text below keeps its size when printed so.
COLUMN, PAGE = 3.4, 7.0
DPI = 200

# Okabe and Ito's colours that stand out on white and on dark, ordered so that neighbours differ in lightness too.
PALETTE = ("#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)))
_RAMP = colormaps["plasma"]

_COMMON = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same shapes on every machine
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.titlelocation": "left",
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2.0,
    # Bright bars need an outline on white paper.
    "patch.force_edgecolor": True,
    "patch.linewidth": 0.5,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "adaponder",  # else the ids in an SVG are random
}


class Theme(NamedTuple):
    """Colours of a light or dark page; ``muted`` is for grids, guides and remarks."""

    paper: str
    ink: str
    muted: str
    grid: str


LIGHT = Theme(paper="#FFFFFF", ink="#1A1A1A", muted="#5C5C5C", grid="#DEDEDE")
DARK = Theme(paper="#14171C", ink="#E8E8E8", muted="#A6A6A6", grid="#343A42")


def rc_params(theme: Theme = LIGHT) -> dict[Any, Any]:
    """Returns the style as matplotlib settings."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "patch.edgecolor")
    return {
        **_COMMON,
        **dict.fromkeys(inked, theme.ink),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper),
        "grid.color": theme.grid,
        "axes.prop_cycle": matplotlib.cycler(color=PALETTE),
    }


@contextmanager
def house(*, dark: bool = False) -> Iterator[Theme]:
    """Context manager in which matplotlib draws in this style; yields its colours."""
    theme = DARK if dark else LIGHT
    with matplotlib.rc_context():
        # Start from matplotlib's own defaults, so that no matplotlibrc changes a figure.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(rc_params(theme))
        yield theme


def new_figure(*, width: float = PAGE, height: float = 2.6) -> Figure:
    """Returns an empty figure, size in inches, not registered with pyplot, so it needs no closing."""
    return Figure(figsize=(width, height))


def series(index: int, of: int = len(PALETTE)) -> Mapping[str, Any]:
    """Returns colour, marker and line style of series ``index`` of ``of``; colours are distinct within a figure.

    Markers and line styles separate neighbours in grey print too.
    """
    # More series than the palette has colours: they come in an order, so a ramp suits them.
    colour = PALETTE[index] if of <= len(PALETTE) else to_hex(_RAMP(0.3 + 0.5 * index / (of - 1)))
    return MappingProxyType(
        {
            "color": colour,
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": LINES[index % len(LINES)],
        }
    )


def depth_colour(depth: int, deepest: int) -> Colour:
    """Returns the background of ``terminal.depth_style`` at this depth as (red, green, blue)."""
    background = Style.parse(depth_style(depth, deepest)).bgcolor
    if background is None:
        raise ValueError(f"depth {depth} has no colour; it must be at least 1")
    red, green, blue = background.get_truecolor().normalized
    return red, green, blue


def depth_colours(deepest: int) -> list[Colour]:
    """Returns the colours of depths 1 … ``deepest``."""
    return [depth_colour(depth, deepest) for depth in range(1, deepest + 1)]


def density_map(theme: Theme) -> LinearSegmentedColormap:
    """Returns a colour map from the paper to a colour that no depth uses."""
    return LinearSegmentedColormap.from_list("adaponder", [theme.paper, PALETTE[0 if theme == LIGHT else 3]])


def depth_limits(low: float, high: float, deepest: int, *, margin: float) -> tuple[float, float]:
    """Returns the limits of an axis of mean depths: ``margin`` around the values, within 1 … ``deepest``."""
    if deepest == 1:
        return 0.5, 1.5
    return max(1.0, low - margin), min(float(deepest), high + margin)


def lightness(colour: Any) -> float:
    """Returns the brightness of a colour in grey print, 0 … 1 (Rec. 709 weights, without gamma)."""
    red, green, blue = to_rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Writes ``path``.png and ``path``.svg and returns both; the same figure gives the same bytes.

    Ticks are made while drawing, so the style holds here too: light or dark as the figure's own paper is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not with_suffix: a name may hold a dot of its own, as in "lambda-0.1".
    png, svg = (path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg"))
    with house(dark=lightness(figure.get_facecolor()) < 0.5):
        # Laid out once for both files: that is half of the drawing.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        figure.savefig(png, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg
