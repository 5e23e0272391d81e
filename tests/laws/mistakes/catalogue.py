"""The list of named mistakes: one edit of the source each, and the tests that must fail on it."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Mistake:
    """One mistake, as its YAML entry says it.

    Attributes:
        name: a sentence that says what is wrong.
        file: below ``src/adaponder``.
        source: text that stands in the file exactly once.
        mistake: the text that takes its place.
        caught_by: tests below ``tests/``, as pytest names them; every one of them must fail, by an assertion.
    """

    name: str
    file: str
    source: str
    mistake: str
    caught_by: tuple[str, ...]

    def path(self, source: Path = SOURCE) -> Path:
        return source / "adaponder" / self.file

    def plant(self, source: Path) -> None:
        """Makes the mistake in the package below ``source``."""
        path = self.path(source)
        path.write_text(self.planted(path.read_text()))
        # A stale compiled file with the same size and second would hide the mistake.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def planted(self, text: str) -> str:
        """The text of the file with the mistake in it."""
        if (count := text.count(self.source)) != 1:
            raise ValueError(f"its source text stands {count} times in {self.file}, not once: update the entry")
        return text.replace(self.source, self.mistake)


def load(folder: Path = HERE) -> list[Mistake]:
    """Every mistake of the YAML files of ``folder``, in their order."""
    known = {field.name for field in fields(Mistake)}
    mistakes = []
    for path in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text()):
            if entry.keys() != known:
                raise ValueError(f"{path.name}, {entry.get('name')!r}: needs exactly {', '.join(sorted(known))}")
            mistakes.append(Mistake(**entry | {"caught_by": tuple(entry["caught_by"])}))
    return mistakes


def problems(mistakes: list[Mistake], source: Path = SOURCE, tests: Path = TESTS) -> list[str]:
    """Why an entry can no longer be tried: its text moved on, the result is no Python, or a test of it is gone."""
    twice = [f"{name}: listed twice" for name, count in Counter(each.name for each in mistakes).items() if count > 1]
    return twice + [f"{each.name}: {why}" for each in mistakes for why in _problems(each, source, tests)]


def _problems(mistake: Mistake, source: Path, tests: Path) -> list[str]:
    if not mistake.path(source).is_file():
        return [f"there is no {mistake.file}"]
    text, found = mistake.path(source).read_text(), []
    try:
        ast.parse(mistake.planted(text))
    except (ValueError, SyntaxError) as error:
        found.append(str(error))
    if mistake.source.split() == mistake.mistake.split():
        found.append("changes nothing")
    if not mistake.caught_by:
        found.append("no test is named")
    return found + [f"there is no {name}" for name in mistake.caught_by if not _exists(name, tests)]


def _exists(name: str, tests: Path) -> bool:
    file, _, function = name.partition("::")
    return function.split("[")[0] in _functions(tests / file)


@cache
def _functions(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
