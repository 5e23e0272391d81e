"""The figure of ``adaponder bench decode``: tokens per second by lanes, and by mean depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaponder.analysis.style import PAGE, house, new_figure, save, series

_OURS, _LOCK_STEP = "engine", ("padded", "dropping")


def draw(rows: Sequence[dict[str, Any]], path: Path, device: str) -> tuple[Path, Path]:
    """Writes ``path``.png and ``path``.svg from a record's rows; rows without figures are left out."""
    works = [row for row in rows if row["works"]]
    with house():
        figure = new_figure(width=PAGE, height=4.2)
        by_lanes, by_depth = figure.subplots(1, 2)
        for axes, found in ((by_lanes, _by_lanes(works)), (by_depth, _by_depth(works))):
            for index, (label, points) in enumerate(found.items()):
                axes.plot(*zip(*sorted(points), strict=True), **series(index, len(found)), label=label)
        by_lanes.set(xscale="log", yscale="log", xlabel="lanes", ylabel="tokens/s", title=f"by lanes, {device}")
        by_depth.set(xlabel="mean depth", ylabel="tokens/s", title="by mean depth")
        by_depth.set_ylim(bottom=0)
        lanes = sorted({row["lanes"] for row in works})
        by_lanes.set_xticks(lanes, [str(count) for count in lanes], minor=False)
        by_lanes.minorticks_off()
        for axes in (by_lanes, by_depth):
            if axes.get_lines():
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize="small")
        return save(figure, path)


def _by_lanes(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(lanes, tokens/s) of each series: a shape and context of ours at its greatest depth, or another side."""
    deepest = max((row["depth"] or 0 for row in rows), default=0)
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        other_depth = row["side"] == _OURS and (row["depth"] or deepest) != deepest
        if other_depth or row["side"] in _LOCK_STEP or row["kind"] == "memory":
            continue
        label = f"{row['shape']}, {row['side']}" + (f", context {row['context']}" if row["side"] == _OURS else "")
        found.setdefault(label, []).append((row["lanes"], row["tokens_per_second"]))
    return found


def _by_depth(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(mean depth, tokens/s) of ours and of lock-step, where there are several depths."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["side"] in (_OURS, *_LOCK_STEP) and row["kind"] == "steady" and row["mean_depth"]:
            label = f"{row['shape']}, {row['side']}, {row['lanes']} lanes, context {row['context']}"
            found.setdefault(label, []).append((row["mean_depth"], row["tokens_per_second"]))
    return {label: points for label, points in found.items() if len(points) > 1}
