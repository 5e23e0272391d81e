"""Prints how large the project is: lines, files and longest functions per package, and words of prose.

    make report
    python tests/repo/report.py OTHER_CHECKOUT     another tree, to compare with

Code lines leave out blank lines, comments, docstrings and imports. Prose words leave out tables and code blocks. These
figures inform; no test holds them, because a limit on the length of a file only produces more files.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
SHOWN = 10  # longest functions
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Size(NamedTuple):
    files: int = 0
    lines: int = 0
    code: int = 0

    def plus(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


def size_of(text: str) -> Size:
    """Returns the size of one Python file."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = text.splitlines()
    code = [line for number, line in enumerate(lines, 1) if number not in skipped and line.strip()]
    return Size(1, len(lines), sum(not line.lstrip().startswith("#") for line in code))


def sizes(folder: Path) -> dict[str, Size]:
    """Returns the size of each direct subfolder of ``folder``, and of the files directly in it (``.``)."""
    found: defaultdict[str, Size] = defaultdict(Size)
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        package = parts[0] if len(parts) > 1 else "."
        found[package] = found[package].plus(size_of(path.read_text()))
    return dict(found)


def functions(folder: Path) -> Iterator[tuple[int, str]]:
    """Yields the length of each function with its place."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield length, f"{path.relative_to(folder)}:{node.lineno} {node.name}"


def prose_words(text: str) -> int:
    """Returns the number of words outside of tables and code blocks."""
    words, in_code = 0, False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith("|"):
            words += len(line.split())
    return words


def documents(root: Path) -> dict[str, int]:
    """Returns the words of prose in each Markdown document of the tree, hidden and built folders left out."""
    paths = [path for path in sorted(root.rglob("*.md")) if not {"build", "tests"} & set(path.relative_to(root).parts)]
    visible = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    return {str(path.relative_to(root)): prose_words(path.read_text()) for path in visible}


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table with its names to the left and its numbers to the right."""
    drawn = Table(title=title)
    for head in heads:
        drawn.add_column(head, justify="left" if head in ("", "function", "document") else "right")
    for row in rows:
        drawn.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    return drawn


def show(root: Path) -> None:
    """Prints the whole report of a tree."""
    rows: list[tuple[object, ...]] = []
    for folder in ("src/adaponder", "benchmarks", "experiments", "tests"):
        packages = sorted(sizes(root / folder).items(), key=lambda item: -item[1].lines)
        total = Size()
        for package, size in packages:
            total = total.plus(size)
            if folder in ("src/adaponder", "tests"):
                rows.append((f"  {folder}/{package}", *size))
        rows.append((folder, *total))
    longest = sorted(functions(root / "src" / "adaponder"), reverse=True)[:SHOWN]
    counted = sorted(documents(root).items(), key=lambda item: -item[1])
    words = [*((count, name) for name, count in counted), (sum(count for _, count in counted), "all documents")]
    console = Console()
    console.print(table("Python", ("", "files", "lines", "code lines"), rows))
    console.print(table("Longest functions of src/", ("lines", "function"), longest))
    console.print(table("Prose", ("words", "document"), words))


if __name__ == "__main__":
    show(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
