"""Defines the style of all figures: readable without colour vision and in grey print, the same bytes when drawn again.

Inside ``with house():`` (``house(dark=True)`` for a dark page) ``new_figure`` makes a figure; ``save`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib import colormaps
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from rich.style import Style

from adaponder.terminal import depth_style

# Inches: the text width of a two-column page; font sizes are chosen for printing at this width.
PAGE = 7.0
_STYLE = Path(__file__).with_name("page") / "house.mplstyle"

# Okabe and Ito's colours that stand out on white and on dark, ordered so that neighbours differ in lightness too.
PALETTE = ("#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)))
_RAMP = colormaps["plasma"]


class Theme(NamedTuple):
    """Colours of a light or dark page; ``muted`` is for guides and remarks."""

    paper: str
    ink: str
    muted: str
    grid: str


LIGHT = Theme(paper="#FFFFFF", ink="#1A1A1A", muted="#5C5C5C", grid="#DEDEDE")
DARK = Theme(paper="#14171C", ink="#E8E8E8", muted="#A6A6A6", grid="#343A42")


@contextmanager
def house(*, dark: bool = False) -> Iterator[Theme]:
    """Context manager in which matplotlib draws in this style; yields its colours."""
    theme = DARK if dark else LIGHT
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "patch.edgecolor")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    colours: dict[Any, Any] = dict.fromkeys(inked, theme.ink) | dict.fromkeys(papers, theme.paper)
    colours |= {"grid.color": theme.grid, "axes.prop_cycle": matplotlib.cycler(color=PALETTE)}
    # after_reset starts from matplotlib's own defaults, so that no matplotlibrc changes a figure.
    with matplotlib.style.context([_STYLE, colours], after_reset=True):
        yield theme


def new_figure(*, width: float = PAGE, height: float = 2.6) -> Figure:
    """Returns an empty figure (size in inches) that is not registered with pyplot, so it need not be closed."""
    return Figure(figsize=(width, height))


def series(index: int, count: int = len(PALETTE)) -> dict[str, Any]:
    """Returns colour, marker and line style of series ``index`` of ``count``; neighbours differ in grey print too."""
    # More series than the palette has colours are ordered ones: they get a colour ramp.
    colour = PALETTE[index] if count <= len(PALETTE) else to_hex(_RAMP(0.3 + 0.5 * index / (count - 1)))
    return {"color": colour, "marker": MARKERS[index % len(MARKERS)], "linestyle": LINES[index % len(LINES)]}


def depth_colours(deepest: int) -> list[tuple[float, float, float]]:
    """Returns (red, green, blue) of depths 1 … ``deepest``: the background colours of ``terminal.depth_style``."""
    grounds = [Style.parse(depth_style(depth, deepest)).bgcolor for depth in range(1, deepest + 1)]
    return [ground.get_truecolor().normalized for ground in grounds if ground is not None]


def density_map(theme: Theme) -> LinearSegmentedColormap:
    """Returns a colour map from the page's background to a colour that no depth has."""
    return LinearSegmentedColormap.from_list("adaponder", [theme.paper, PALETTE[0 if theme == LIGHT else 3]])


def depth_limits(low: float, high: float, deepest: int, *, margin: float) -> tuple[float, float]:
    """Returns the limits of an axis of mean depths: ``low`` and ``high`` with a ``margin``, within 1 … ``deepest``."""
    if deepest == 1:
        return 0.5, 1.5
    return max(1.0, low - margin), min(float(deepest), high + margin)


def at_least(span: float, low: float, high: float) -> tuple[float, float]:
    """Widens axis limits on both sides to a width of at least ``span``, so that tiny differences do not look large."""
    more = max(0.0, span - (high - low)) / 2
    return low - more, high + more


def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Writes a figure of the light style as ``path``.png and ``path``.svg, and returns these two paths.

    The same figure gives the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not with_suffix: a name may hold a dot of its own, as in "lambda-0.1".
    png, svg = (path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg"))
    with house():  # ticks are made while drawing
        # Laid out once for both files, which saves half of the time.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        figure.savefig(png, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg
