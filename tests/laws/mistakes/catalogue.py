"""The planted mistakes: each names a function, one edit of it, and the tests that must fail on the edit.

An edit is found in the normalised source (``ast.unparse``, docstrings left out), so rewording a comment or reformatting
does not break an entry. A function that has moved to another module is found by its qualified name if that is unique.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TESTS = ROOT / "tests"
# Folders with code in which mistakes are planted, by the first name of their modules ("": the package's own).
FOLDERS = {"": "src/adaponder", "benchmarks": "benchmarks", "experiments": "experiments"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Place(NamedTuple):
    """The code that a mistake replaces: ``field`` of the node ``holder``, from ``index`` on where that is a list."""

    path: Path
    tree: ast.Module
    holder: ast.AST
    field: str
    index: int | None


@dataclass(frozen=True)
class Mistake:
    """One mistake, as its YAML entry says it.

    Attributes:
        name: a sentence that says what is wrong.
        function: ``module:Qualified.name``, the module below ``adaponder`` (or ``benchmarks.…``, ``experiments.…``); a
            class is allowed too, and a module alone for code outside functions.
        old: an expression or consecutive statements of the function, found in it exactly once.
        new: the code that takes their place; empty for deleted statements.
        caught_by: tests below ``tests/``, as pytest names them; every one of them must fail, by an assertion.
    """

    name: str
    function: str
    old: str
    new: str
    caught_by: tuple[str, ...]

    def place(self, root: Path = ROOT) -> Place:
        """Returns where the mistake belongs; raises ValueError if it does not fit the source."""
        path = self._file(root)
        tree, named = _read(path)
        old, new = ast.parse(self.old).body, ast.parse(self.new).body
        if list(map(ast.unparse, old)) == list(map(ast.unparse, new)):
            raise ValueError("changes nothing")
        qualname = self.function.partition(":")[2]
        scopes = [node for name, node in named if name == qualname] if qualname else [tree]
        expression = _is_expression(old) and _is_expression(new)
        places = [place for scope in scopes for place in _places(scope, old, expression=expression)]
        if len(places) != 1:
            raise ValueError(f"{self.old!r} is {len(places)} times in {self.function}, not once: update the entry")
        return Place(path, tree, *places[0])

    def plant(self, root: Path) -> None:
        """Makes the mistake in the code below ``root``."""
        path, tree, holder, field, start = self.place(root)
        old, new = ast.parse(self.old).body, ast.parse(self.new).body
        value = getattr(holder, field)
        if start is None:
            setattr(holder, field, new[0].value)
        elif _is_expression(old) and _is_expression(new):
            value[start] = new[0].value
        else:
            value[start : start + len(old)] = new
            setattr(holder, field, value or [ast.Pass()])
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
        # A stale compiled file with the same size and second would hide the mistake.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def _file(self, root: Path) -> Path:
        module, _, qualname = self.function.partition(":")
        modules = _modules(root)
        if module in modules and (not qualname or qualname in _names(modules[module])):
            return modules[module]
        found = [name for name, path in modules.items() if qualname and qualname in _names(path)]
        if len(found) != 1:
            raise ValueError(f"{self.function} is in {', '.join(found) or 'no module'}: update the entry")
        return modules[found[0]]


def load(folder: Path = HERE) -> list[Mistake]:
    """Returns every mistake of the YAML files of ``folder``, in their order."""
    known = {field.name for field in fields(Mistake)}
    mistakes = []
    for path in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text()):
            if entry.keys() != known:
                raise ValueError(f"{path.name}, {entry.get('name')!r}: needs exactly {', '.join(sorted(known))}")
            mistakes.append(Mistake(**entry | {"caught_by": tuple(entry["caught_by"])}))
    return mistakes


def problems(mistakes: list[Mistake], root: Path = ROOT) -> list[str]:
    """Lists the entries that cannot be planted any more, or whose tests are gone."""
    counts = Counter(mistake.name for mistake in mistakes)
    wrong = [f"{name}: listed twice" for name, count in counts.items() if count > 1]
    for mistake in mistakes:
        try:
            mistake.place(root)
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{mistake.name}: {error}")
        if not mistake.caught_by:
            wrong.append(f"{mistake.name}: no test is named")
        missing = (test for test in mistake.caught_by if not _test_exists(test, root / "tests"))
        wrong += [f"{mistake.name}: there is no {test}" for test in missing]
    return wrong


@cache
def _modules(root: Path) -> dict[str, Path]:
    """Returns the file of each module by its name, without ``adaponder.`` in front."""
    found = {}
    for first, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join(part for part in (first, *parts) if part and part != "__init__")] = path
    return found


def _read(path: Path) -> tuple[ast.Module, list[tuple[str, ast.AST]]]:
    """Returns the tree of a file, and the qualified name and node of each function and class in it."""
    return _read_at(path, path.stat().st_mtime_ns)


@cache
def _read_at(path: Path, changed: int) -> tuple[ast.Module, list[tuple[str, ast.AST]]]:
    tree = ast.parse(path.read_text())
    return tree, list(_scopes(tree))


@cache
def _names(path: Path) -> frozenset[str]:
    return frozenset(name for name, _ in _read(path)[1])


def _scopes(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields (qualified name, node) of every function and class inside ``node``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _SCOPES):
            yield prefix + child.name, child
            yield from _scopes(child, f"{prefix}{child.name}.")
        else:
            yield from _scopes(child, prefix)


def _is_expression(code: list[ast.stmt]) -> bool:
    return len(code) == 1 and isinstance(code[0], ast.Expr)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _places(scope: ast.AST, old: list[ast.stmt], *, expression: bool) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yields (parent, field, index in the field) of each place in ``scope`` where the code ``old`` is."""
    texts = [_text(statement) for statement in old]
    kind = ast.expr if expression else ast.stmt
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            if not isinstance(value, list):
                if _matches([value], texts, kind):
                    yield node, field, None
                continue
            for start in range(len(value) - len(texts) + 1):
                if _matches(value[start : start + len(texts)], texts, kind):
                    yield node, field, start


def _matches(nodes: list[Any], texts: list[str], kind: type[ast.AST]) -> bool:
    """Compares by text; assigned names (of another context than Load) are no expressions."""
    return all(
        isinstance(node, kind) and isinstance(getattr(node, "ctx", None), (ast.Load, NoneType)) and _text(node) == text
        for node, text in zip(nodes, texts, strict=True)
    )


def _text(node: ast.AST) -> str:
    """Returns the normalised source of a node, docstrings of functions inside it left out."""
    if isinstance(node, ast.Expr):
        node = node.value
    if any(isinstance(inner, _SCOPES) for inner in ast.walk(node)):
        node = ast.parse(ast.unparse(node))
        for inner in ast.walk(node):
            if isinstance(inner, _SCOPES):
                inner.body = [statement for statement in inner.body if not _is_docstring(statement)] or [ast.Pass()]
    return ast.unparse(node)


def _test_exists(name: str, tests: Path) -> bool:
    file, _, function = name.partition("::")
    return function.split("[")[0] in _test_functions(tests / file)


@cache
def _test_functions(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions))
