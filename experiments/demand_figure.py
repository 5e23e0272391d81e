"""The figure of depth on demand: accuracy by need, and how often a model that halts reads the token that answers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from adaponder.analysis.style import PAGE, depth_colours, house, new_figure, series

# Characters of a line of the legend: three columns must fit on the page.
_WIDEST = 40


def demand(
    needs: Sequence[int],
    fixed: Mapping[int, Sequence[float]],
    name: str,
    accuracy: Sequence[float],
    by_depth: Sequence[Sequence[int]],
    *,
    dark: bool = False,
) -> Figure:
    """Shares of right answers by need, ``fixed`` by K and of the model called ``name``; its answers by need and depth.

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
