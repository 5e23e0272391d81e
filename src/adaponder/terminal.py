"""How results look in a terminal: one console, one palette, tables, and text coloured by depth."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.status import Status

# Every control character as a symbol that only looks like one; what turns text around, and halves of a pair, as �.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F)], 0xFFFD)
_VISIBLE |= dict.fromkeys([*range(0x2066, 0x206A), *range(0xD800, 0xE000)], 0xFFFD)


def plain(text: str) -> str:
    """Returns the text, equally long, with control characters replaced by visible ones."""
    return text.translate(_VISIBLE)


class Screen(Console):
    """A console on which a string is only ever text: no markup, no emoji, no control sequence.

    Prompts, model output, paths and errors may hold anything. What is to be coloured is said beside it, by a style:
    ``print("done", style="dim")``, or ``print(line("saved in ", (path, "bold")))``.
    """

    def __init__(self, *, stderr: bool = False):
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """``soft_wrap``: one line where it goes to a file or a pipe; in a window, broken between words."""
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **options)

    def print_whole(self, text: str) -> None:
        """One line also in a window, which may break it anywhere: a command that is to be copied."""
        super().print(text, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        options |= {"markup": False, "emoji": False}
        return super().render_str(plain(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed comes through here, however deep in a table or a group it lies."""
        if isinstance(renderable, Text) and (shown := plain(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = shown
        return super().render(renderable, options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        # A spinner would read a string as markup.
        return super().status(Text(status) if isinstance(status, str) else status, **options)


console = Screen()
errors = Screen(stderr=True)


def line(*parts: object) -> Text:
    """Joins parts to one text; ``(part, style)`` is styled: ``line("saved in ", (path, "bold"))``."""
    return Text.assemble(*((str(part[0]), part[1]) if isinstance(part, tuple) else str(part) for part in parts))


# Dark to bright with depth: told apart by lightness alone, so also without colour vision and in grey print.
_STEPS = ((48, 18, 59), (62, 73, 137), (33, 144, 140), (94, 201, 97), (253, 231, 37))


def depth_style(depth: int, deepest: int) -> str:
    """Returns the rich style of a token of this depth; dim for a token that was not read."""
    if depth < 1:
        return "dim"
    position = 0 if deepest == 1 else (depth - 1) * (len(_STEPS) - 1) / (deepest - 1)
    low = min(int(position), len(_STEPS) - 2)
    red, green, blue = (
        round(a + (b - a) * (position - low)) for a, b in zip(_STEPS[low], _STEPS[low + 1], strict=True)
    )
    ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 110 else "white"
    return f"{ink} on rgb({red},{green},{blue})"


def by_depth(pieces: Sequence[str], depths: Sequence[int], deepest: int) -> Text:
    """Joins the pieces to one text, each coloured by its depth."""
    text = Text()
    for piece, depth in zip(pieces, depths, strict=True):
        text.append(piece, style=depth_style(depth, deepest))
    return text


def legend(deepest: int) -> Text:
    """Returns the colours of the depths 1 to ``deepest``, in one line."""
    text = Text("read ")
    for depth in range(1, deepest + 1):
        text.append(f" {depth}x ", style=depth_style(depth, deepest))
    return text


# One number or a few, with signs and marks around and between them and perhaps a unit: 12.3 MB, 61.2 ± 1.3, +0.01*.
# A number is taken whole or not at all: its commas are marks between numbers too, and a list has many ways to be cut.
_NUMBER = r"(?>\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)"
_FIGURE = re.compile(rf"[^\w.]*{_NUMBER}([^\w.]+{_NUMBER})*\s?[A-Za-z%/]{{0,6}}[^\w.]*")


@dataclass(frozen=True)
class Titled:
    """A table under its title: words to the left, figures, which have a head, to the right.

    Where the window is too narrow for all columns, several tables follow one another, each with the first column: no
    figure is ever broken in two.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold underline")
        for widths in _side_by_side(self._widths(options.max_width), options.max_width):
            drawn = Table(header_style="bold", show_header=any(self.columns), box=None, pad_edge=False)
            for index, width in widths.items():
                justify = "right" if self._holds_figures(index) else "left"
                drawn.add_column(self.columns[index], justify=justify, overflow="fold", width=width)
            for row in self.rows:
                drawn.add_row(*(row[index] for index in widths))
            yield drawn

    def _holds_figures(self, index: int) -> bool:
        """Whether a column is one of figures: most cells are, and the others say why there is none."""
        cells = [row[index] for row in self.rows if row[index].strip(" –—")]
        figures = sum(_FIGURE.fullmatch(cell) is not None for cell in cells)
        return index > 0 and bool(self.columns[index]) and 2 * figures >= len(cells)

    def _widths(self, most: int) -> list[tuple[int, int]]:
        """Per column the least width, with its head broken between words, and the width that needs no break."""
        widths = []
        for index, head in enumerate(self.columns):
            cells = max((cell_len(row[index]) for row in self.rows), default=0)
            # Sentences and paths may be broken where there is no room; and a first column must leave some for others.
            least = min(cells, most // 2 if len(self.columns) > 1 else most)
            word = max((cell_len(word) for word in head.split()), default=0)
            widths.append((max(least, word), max(cells, cell_len(head))))
        return widths


_GAP = 2


def _side_by_side(widths: Sequence[tuple[int, int]], most: int) -> Iterator[dict[int, int]]:
    """The width of each column, by its index, for each of the tables that columns of (least, best) width need."""
    needed = len(_grouped(widths, most))
    # As few tables as possible, and then of about equal width: no column stands alone for a cell too much.
    fair = next(width for width in range(most + 1) if len(_grouped(widths, width)) == needed)
    for group in _grouped(widths, fair):
        chosen, spare = {}, most - _GAP * (len(group) - 1) - sum(widths[index][0] for index in group)
        for index in group:
            least, best = widths[index]
            more = min(best - least, max(spare, 0))
            chosen[index], spare = least + more, spare - more
        yield chosen


def _grouped(widths: Sequence[tuple[int, int]], most: int) -> list[list[int]]:
    """Columns by index, in groups that fit into ``most`` beside the first column, which each of them begins with."""
    groups, used = [[0]], widths[0][0]
    for index in range(1, len(widths)):
        needed = _GAP + widths[index][0]
        if used + needed > most and len(groups[-1]) > 1:
            groups, used = [*groups, [0]], widths[0][0]
        groups[-1].append(index)
        used += needed
    return groups


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Titled:
    """Returns a table to print, with its cells as strings and without empty columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if i == 0 or not cells or any(row[i].strip(" –—") for row in cells)]
    return Titled(title, [columns[i] for i in kept], [[row[i] for i in kept] for row in cells])


def counted(number: int, what: str) -> str:
    """``1 token``, ``2,000 tokens``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def progress_bars() -> Progress:
    """Returns progress bars with the time left, which vanish when done; none are shown outside a terminal."""
    from rich.progress import (  # here, since --help needs none
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TaskProgressColumn())
    columns = (*columns, TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar: ``with counting("scoring", n) as advance: … advance(some)``."""
    with progress_bars() as progress:
        task = progress.add_task(what, total=total)
        yield lambda some: progress.advance(task, some)


def quiet_libraries() -> None:
    """Turns off progress bars and notices of libraries; environment variables that are set already stay as they are."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # it has read them already; and is not imported for this
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()


# The path of a result that is to go to standard output, and the last result that was written there.
STDOUT = Path("-")
_last: list[str] = []


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes ``result`` as JSON, replacing the file atomically; does nothing if ``path`` is ``None``.

    An infinity or NaN becomes null: JSON has neither.
    """
    if path is None:
        return
    text = json.dumps(_finite(result), indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        _last[:] = [text]
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    from adaponder.files import replace_file  # here, since it imports YAML, which --help does not need

    replace_file(path, text.encode())


def _finite(value: Any) -> Any:
    """Returns the value with ``None`` for each number in it that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def json_alone(path: Path | None) -> Iterator[None]:
    """While a command runs that writes its result to ``path``: if that is ``-``, standard output gets it alone.

    It gets the last result, when the command has ended, however it ended; all that is printed goes to standard error.
    """
    if path != STDOUT:
        yield
        return
    _last.clear()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.write("".join(_last))
        sys.stdout.flush()
