"""Every file can be read in one sitting and every function seen on one screen.

Cyclomatic complexity is counted as McCabe does, with every decision a reader has to follow: 1 for the function, and 1
more for each ``if``, ``elif``, conditional expression, loop, ``except``, ``case``, ``assert``, loop and condition of a
comprehension, and for each operand after the first of ``and`` and ``or``. Functions inside a function count with it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "adaponder"
LONGEST_FILE, LONGEST_FUNCTION, MOST_COMPLEX = 430, 80, 20

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DECISIONS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.Assert)


def complexity(function: ast.AST) -> int:
    """The cyclomatic complexity of a function, by the rule above."""
    decisions = 1
    for node in ast.walk(function):
        if isinstance(node, _DECISIONS):
            decisions += 1
        elif isinstance(node, ast.comprehension):
            decisions += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            decisions += len(node.values) - 1
    return decisions


def lines_of(function: Function) -> int:
    """Lines from ``def`` to the end, the docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def functions() -> Iterator[tuple[str, Function]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}", node


def test_no_file_is_longer_than_one_reads_in_one_sitting():
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_function_is_longer_than_a_screen():
    assert {name: lines_of(each) for name, each in functions() if lines_of(each) > LONGEST_FUNCTION} == {}


def test_no_function_decides_more_than_one_can_follow():
    assert {name: complexity(each) for name, each in functions() if complexity(each) > MOST_COMPLEX} == {}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 1", 1),
        ("if a:\n  pass\n elif b and c or d:\n  pass\n else:\n  pass", 5),
        ("return [x for x in y if x if z] if a else b", 5),
        ("for x in y:\n  while x:\n   assert x", 4),
        ("try:\n  pass\n except A:\n  pass\n except B:\n  pass", 3),
        ("match x:\n  case 1:\n   pass\n  case _:\n   pass", 3),
        ("def inner():\n  return a or b", 2),
    ],
)
def test_complexity_counts_decisions(body, expected):
    assert complexity(ast.parse(f"def f():\n {body}")) == expected
