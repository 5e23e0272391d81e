"""The figure of ``adaponder bench serve``: tokens per second and waiting times by offered load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaponder.analysis.style import PAGE, house, new_figure, save, series


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str, *, most: float | None) -> tuple[Path, Path]:
    """Writes ``path``.png and ``path``.svg from a record's rows; ``most`` is the tokens/s with all streams at once."""
    offered = [row["offered_tokens_per_second"] for row in rows]
    with house():
        figure = new_figure(width=PAGE, height=3.2)
        speed, first, between = figure.subplots(1, 3)
        speed.plot(offered, [row["tokens_per_second"] for row in rows], **series(0, 3), label="answered")
        speed.plot(offered, offered, **series(1, 3), label="offered")
        if most:
            speed.axhline(most, color="0.5", linewidth=0.8, linestyle=":", label="all streams at once")
        speed.set(title=title, ylabel="tokens/s")
        speed.set_ylim(bottom=0, top=1.15 * max([*(row["tokens_per_second"] for row in rows), most or 0.0]) or 1.0)
        for axes, name, what in ((first, "first_token", "to the first token"), (between, "between_tokens", "between")):
            for index, share in enumerate(("p50", "p95", "p99")):
                points = [
                    (load, 1e3 * row[name][share])
                    for load, row in zip(offered, rows, strict=True)
                    if row[name][share] is not None
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), **series(index, 3), label=share)
            axes.set(title=what + (" tokens" if name == "between_tokens" else ""), ylabel="ms")
            axes.set_ylim(bottom=0)
        for axes in (speed, first, between):
            axes.set(xlabel="offered tokens/s")
            axes.set_xlim(left=0)
            axes.legend(loc="upper left", fontsize="small")
        return save(figure, path)
