"""The figure of ``adaponder bench decode``: tokens per second by lanes, and by mean depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaponder.analysis.style import PAGE, house, new_figure, save, series

_OURS = "engine"


def draw(rows: Sequence[dict[str, Any]], path: Path, device: str) -> tuple[Path, Path]:
    """Writes ``path``.png and ``path``.svg from a record's rows; rows without figures are left out."""
    works = [row for row in rows if row["works"]]
    with house():
        figure = new_figure(width=PAGE, height=2.8)
        by_lanes, by_depth = figure.subplots(1, 2)
        for index, (label, points) in enumerate(_by_lanes(works).items()):
            by_lanes.plot(*zip(*sorted(points), strict=True), **series(index, max(6, len(points))), label=label)
        for index, (label, points) in enumerate(_by_depth(works).items()):
            by_depth.plot(*zip(*sorted(points), strict=True), **series(index), label=label)
        by_lanes.set(xscale="log", yscale="log", xlabel="lanes", ylabel="tokens/s", title=f"by lanes, {device}")
        by_depth.set(xlabel="mean depth", ylabel="tokens/s", title="by mean depth")
        by_depth.set_ylim(bottom=0)
        for axes in (by_lanes, by_depth):
            if axes.get_lines():
                axes.legend()
        return save(figure, path)


def _by_lanes(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(lanes, tokens/s) of each series: a shape and context of ours at its greatest depth, or another side."""
    deepest = max((row["depth"] or 0 for row in rows), default=0)
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if (row["side"] == _OURS and (row["depth"] or deepest) != deepest) or row["kind"] == "memory":
            continue
        label = f"{row['shape']}, {row['side']}" + (f", context {row['context']}" if row["side"] == _OURS else "")
        found.setdefault(label, []).append((row["lanes"], row["tokens_per_second"]))
    return found


def _by_depth(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(mean depth, tokens/s) of ours and of lock-step, where there are several depths."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["side"] in (_OURS, "padded", "dropping") and row["kind"] == "steady" and row["mean_depth"]:
            label = f"{row['shape']}, {row['side']}, {row['lanes']} lanes, context {row['context']}"
            found.setdefault(label, []).append((row["mean_depth"], row["tokens_per_second"]))
    return {label: points for label, points in found.items() if len(points) > 1}
