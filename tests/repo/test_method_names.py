"""Methods own their facts: nobody outside ``methods/`` and the registry asks which method a model has."""

import ast
from collections.abc import Iterator
from pathlib import Path

from adaponder.methods import method_class
from adaponder.registry import method_names

SOURCE = Path(__file__).parents[2] / "src" / "adaponder"
# Also the name of the package, of the command and of the model type: a method only where a method is spoken of.
SHARED = "adaponder"
MODULES = {method_class(name).__module__ for name in method_names()}

# Who may name a method all the same, and why: (file, what it names).
ALLOWED = {
    ("conversion/open.py", "ponder"): "what PonderLM's released checkpoints are",
    ("conversion/checks.py", "adaponder"): "which methods equal PonderLM at full depth",
    ("conversion/checks.py", "ponder"): "which methods equal PonderLM at full depth",
    ("conversion/checks.py", "adaponder.methods.adaponder"): "its gates are opened to equal PonderLM",
    ("conversion/convert.py", "adaponder.methods.adaponder"): "tells how far gates are open in the beginning",
    ("conversion/exported/configuration_adaponder.py", "adaponder"): "it is copied to where there is no class to ask",
    ("conversion/exported/configuration_adaponder.py", "ponder"): "it is copied to where there is no class to ask",
    ("training/telemetry.py", "ponder"): "a term of the loss has that name too",
}


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of every method that a module's code names: as text, or by importing its class."""
    nodes = list(ast.walk(tree))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.lineno, node.module
        if isinstance(node, ast.Constant) and node.value in method_names():
            parent = parents[node]
            context = ast.unparse(parent)
            if isinstance(parent, (ast.Tuple, ast.List, ast.Set)):
                context = ast.unparse(parents[parent]).replace(context, "")
            if node.value != SHARED or "method" in context.lower():
                yield node.lineno, node.value


def test_no_method_is_named_outside_its_file_and_every_exception_is_still_needed():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE).as_posix()
        if where != "registry.py" and not where.startswith("methods/"):
            for line, name in names_in(ast.parse(path.read_text())):
                found[where, name] = line
    wrong = [f"{where}:{line} names {name}" for (where, name), line in found.items() if (where, name) not in ALLOWED]
    assert not wrong, "ask the method's class for the fact instead (methods/base.py):\n" + "\n".join(wrong)
    assert not set(ALLOWED) - set(found)
