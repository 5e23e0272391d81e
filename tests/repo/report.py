"""Prints how large the project is: lines, files and longest functions per package, and words of prose.

    make report
    python tests/repo/report.py OTHER_CHECKOUT     another tree, to compare with

Code lines leave out blank lines, comments, docstrings and imports. Prose words leave out tables and code blocks. These
figures inform; no test holds them, because a limit on the length of a file only produces more files.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = 10  # longest functions
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MEASURES = ("files", "lines", "code lines")


def size_of(text: str) -> Counter[str]:
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = text.splitlines()
    code = [line for number, line in enumerate(lines, 1) if number not in skipped and line.strip()]
    counts = (1, len(lines), sum(not line.lstrip().startswith("#") for line in code))
    return Counter(dict(zip(MEASURES, counts, strict=True)))


def sizes(folder: Path) -> dict[str, Counter[str]]:
    """Returns the size of each direct subfolder of ``folder``, and of the files directly in it (``.``)."""
    by_package: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        by_package[parts[0] if len(parts) > 1 else "."] += size_of(path.read_text())
    return dict(by_package)


def functions(folder: Path) -> Iterator[tuple[int, str]]:
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
    names = {path: path.relative_to(root) for path in sorted(root.rglob("*.md"))}
    hidden = {"build", "tests"}
    return {
        str(name): prose_words(path.read_text())
        for path, name in names.items()
        if not any(part in hidden or part.startswith(".") for part in name.parts)
    }


def show(root: Path) -> None:
    print(f"{'Python':<44}", *(f"{name:>10}" for name in MEASURES))
    for folder in ("src/adaponder", "benchmarks", "experiments", "tests"):
        by_package = sizes(root / folder)
        rows = {f"  {folder}/{package}": size for package, size in by_package.items()}
        rows = (
            dict(sorted(rows.items(), key=lambda row: -row[1]["lines"])) if folder in ("src/adaponder", "tests") else {}
        )
        for name, size in (rows | {folder: sum(by_package.values(), Counter())}).items():
            print(f"{name:<44}", *(f"{size[measure]:>10,}" for measure in MEASURES))
    words = documents(root)
    longest = sorted(functions(root / "src" / "adaponder"), reverse=True)[:SHOWN]
    prose = sorted(((count, name) for name, count in words.items()), reverse=True)
    prose.append((sum(words.values()), "all documents"))
    for title, counts in (("longest functions of src/", longest), ("words of prose", prose)):
        print(f"\n{title}", *(f"{count:>8,}  {name}" for count, name in counts), sep="\n")


if __name__ == "__main__":
    show(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
