"""Defines terminal output: a console, tables, progress bars, and text coloured by depth."""

from __future__ import annotations

import json
import math
import os
import shlex
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

# Maps ASCII control characters to visible symbols, and other control characters, bidirectional marks and surrogates
# to �.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F)], 0xFFFD)
_VISIBLE |= dict.fromkeys([*range(0x2066, 0x206A), *range(0xD800, 0xE000)], 0xFFFD)


def plain(text: str) -> str:
    """Replaces each control character, except newline and tab, by one visible character.

    Bidirectional marks and surrogates are replaced too.
    """
    return text.translate(_VISIBLE)


class Screen(Console):
    """Console that prints strings literally: no markup, no emoji, no control sequences.

    Prompts, model output, paths and errors may contain any characters. Styles are given as arguments:
    ``print("done", style="dim")``, or ``print(line("saved in ", (path, "bold")))``.
    """

    def __init__(self, *, stderr: bool = False):
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    @property
    def in_colour(self) -> bool:
        """Whether colours are shown: the terminal has them and ``NO_COLOR`` is not set."""
        return self.color_system is not None and not self.no_color

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Prints like rich, but ``soft_wrap`` wraps between words in a terminal, and not at all in a file or pipe."""
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **options)

    def print_whole(self, text: str) -> None:
        """Prints one line without line breaks, such as a command to copy; a terminal may wrap it anywhere."""
        super().print(text, soft_wrap=True)

    def print_next(self, *words: object) -> None:
        """Prints the adaponder command to type next, quoted for the shell."""
        self.print_whole("Next: " + shlex.join(["adaponder", *map(str, words)]))

    def render_str(self, text: str, **options: Any) -> Text:
        options |= {"markup": False, "emoji": False}
        return super().render_str(plain(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders as rich does, but replaces control characters in all texts, including those in tables and groups."""
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
    """Joins parts into one text; ``(part, style)`` is styled: ``line("saved in ", (path, "bold"))``."""
    return Text.assemble(*((str(part[0]), part[1]) if isinstance(part, tuple) else str(part) for part in parts))


# Deeper is brighter, so that depths can be told apart in grey prints and by colour-blind readers too.
_STEPS = ((48, 18, 59), (62, 73, 137), (33, 144, 140), (94, 201, 97), (253, 231, 37))


def depth_style(depth: int, deepest: int) -> str:
    """Returns the rich style of a token of this depth; depth 0, a token that was not processed, is dim."""
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
    """Joins pieces of text, each coloured by the depth of its token."""
    return Text.assemble(*((piece, depth_style(depth, deepest)) for piece, depth in zip(pieces, depths, strict=True)))


def legend(deepest: int) -> Text:
    """Returns the colour key of depths 1 … ``deepest``, in one line; empty if no colours are shown."""
    if not console.in_colour:
        return Text()
    return Text.assemble("read ", *((f" {depth}x ", depth_style(depth, deepest)) for depth in range(1, deepest + 1)))


_GAP = 2  # spaces between columns


@dataclass(frozen=True)
class Titled:
    """A table with a title; text columns are aligned left, number columns right.

    If the terminal is too narrow for all columns, they are printed as several tables, each with the first column, so
    that no number is broken over two lines.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold underline")
        least = [self._least_width(index, options.max_width) for index in range(len(self.columns))]
        groups = [[0]]
        for index in range(1, len(least)):
            if len(groups[-1]) > 1 and sum(least[i] + _GAP for i in groups[-1]) + least[index] > options.max_width:
                groups.append([0])
            groups[-1].append(index)
        for group in groups:
            drawn = Table(header_style="bold", show_header=any(self.columns), box=None, pad_edge=False)
            spare = options.max_width - _GAP * (len(group) - 1) - sum(least[index] for index in group)
            for index in group:
                widest = max(cell_len(cell) for cell in (self.columns[index], *(row[index] for row in self.rows)))
                extra = max(0, min(widest - least[index], spare))
                spare -= extra
                justify = "right" if self._holds_figures(index) else "left"
                drawn.add_column(self.columns[index], justify=justify, overflow="fold", width=least[index] + extra)
            for row in self.rows:
                drawn.add_row(*(row[index] for index in group))
            yield drawn

    def _holds_figures(self, index: int) -> bool:
        """Returns whether at least half of a column's non-empty cells are numbers.

        False for the first column and for a column without a heading.
        """
        cells = [row[index] for row in self.rows if row[index].strip(" –—")]
        figures = sum(cell.lstrip("+-±~ [")[:1].isdigit() for cell in cells)
        return index > 0 and bool(self.columns[index]) and 2 * figures >= len(cells)

    def _least_width(self, index: int, most: int) -> int:
        """Returns the minimum width of a column, at least that of the longest word of its heading.

        The widest cell must fit too, unless it is wider than half of the table's width ``most`` (or, in a table with
        one column, than ``most``). Such cells wrap.
        """
        cells = max((cell_len(row[index]) for row in self.rows), default=0)
        word = max((cell_len(word) for word in self.columns[index].split()), default=0)
        return max(min(cells, most // 2 if len(self.columns) > 1 else most), word)


def table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> Titled:
    """Returns a table to print, without its empty columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    used = [i for i in range(len(columns)) if i == 0 or not cells or any(row[i].strip(" –—") for row in cells)]
    return Titled(title, [columns[i] for i in used], [[row[i] for i in used] for row in cells])


def number(value: float | None, form: str) -> str:
    """Formats a number for a table cell; ``form`` is a format such as ``.3f``; ``None`` gives a dash."""
    return "–" if value is None else f"{value:{form}}"


def spread(interval: tuple[float, float] | None) -> str:
    """Formats an interval for a table cell as ``low … high``; ``None`` gives an empty cell."""
    return "" if interval is None else f"{interval[0]:.3f} … {interval[1]:.3f}"


def counted(number: int, what: str) -> str:
    """Returns a number with its noun: ``1 token``, ``2,000 tokens``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def progress_bars(*columns: str) -> Progress:
    """Returns progress bars with the time left, which disappear when done; outside a terminal, none are shown.

    ``columns`` are names of task fields to show after the bar.
    """
    # Imported here, because --help does not need it.
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        *(TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in columns),
        TimeElapsedColumn(),
        TimeLeft(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Context manager that shows a progress bar: ``with counting("scoring", n) as advance: … advance(count)``."""
    with progress_bars() as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def quiet_libraries() -> None:
    """Turns off the libraries' progress bars and notices, unless the user has set their environment variables."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # then it has read the variables already
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()


# The path that means standard output, and the JSON text of the latest result for it, which json_alone prints.
STDOUT = Path("-")
_last: list[str] = []


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes ``result`` as JSON, replacing the file atomically; does nothing if ``path`` is ``None``.

    If ``path`` is ``-``, :func:`json_alone` prints the result at the end. Infinity and NaN become null.
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
    """Returns ``value`` with every infinity and NaN in it, at any depth, replaced by ``None``."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def json_alone(path: Path | None) -> Iterator[None]:
    """Context manager for ``--json -``: only the JSON result goes to standard output, all else to standard error.

    The last result of :func:`write_json` is printed when the block ends, even after an error. Does nothing for other
    paths.
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
