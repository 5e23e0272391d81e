"""How results look in a terminal: one console, one palette, tables, and text coloured by depth."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

# Dark to bright with depth: told apart by lightness alone, so also without colour vision and in grey print.
_STEPS = ((48, 18, 59), (62, 73, 137), (33, 144, 140), (94, 201, 97), (253, 231, 37))


def depth_style(depth: int, deepest: int) -> str:
    """The rich style of a token read ``depth`` of at most ``deepest`` times; nothing for a token not read."""
    if depth < 1:
        return "dim"
    place = 0 if deepest == 1 else (depth - 1) * (len(_STEPS) - 1) / (deepest - 1)
    low = min(int(place), len(_STEPS) - 2)
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(_STEPS[low], _STEPS[low + 1], strict=True))
    ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 110 else "white"
    return f"{ink} on rgb({red},{green},{blue})"


def by_depth(pieces: Sequence[str], depths: Sequence[int], deepest: int) -> Text:
    """Text whose background says how often each piece was read."""
    text = Text()
    for piece, depth in zip(pieces, depths, strict=True):
        text.append(piece, style=depth_style(depth, deepest))
    return text


def legend(deepest: int) -> Text:
    text = Text("read ")
    for depth in range(1, deepest + 1):
        text.append(f" {depth}x ", style=depth_style(depth, deepest))
    return text


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Group:
    """A titled table: first column to the left, figures to the right."""
    drawn = Table(header_style="bold", show_header=any(columns), box=None, pad_edge=False)
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(escape(str(cell)) for cell in row))  # a path may hold brackets
    return Group(Text(title, style="bold underline"), drawn)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with its ETA that vanishes when done: ``with counting("scoring", n) as advance: … advance(some)``."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn())
    columns = (*columns, TimeElapsedColumn(), TimeRemainingColumn())
    # Where nobody watches, a bar would only leave empty lines.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda some: progress.advance(task, some)


def quiet_libraries() -> None:
    """Progress bars and notices of libraries do not belong between our lines; who wants them sets the variables."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # it has read them already; and is not imported for this
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".part")  # whole or not there, also when killed while writing
        beside.write_text(json.dumps(result, indent=2) + "\n")
        beside.replace(path)
