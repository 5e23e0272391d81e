"""The house keeps its order: who may import whom, what importing costs, which names are public, who names a method."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import transformers

import adaponder
from adaponder.methods import method_class
from adaponder.registry import method_names
from support import tiny

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "adaponder"

# From the foundation up: a room may use the rooms before it.
_ROOMS = """
errors version files devices registry fields ops halting policies backbones execution methods config checkpoints
modeling inference conversion terminal journal text data recipes evaluation training integrations serving analysis
commands cli lm_eval __main__ __init__
"""
ORDER = _ROOMS.split()
_NAMES = """
AdaPonderConfig AdaPonderError AdaPonderForCausalLM AdaPonderOutput Change Confidence Divergence Engine Entropy
ExitThreshold FixedDepth ForcedDepths Geometric Iteration LearnedGate Ledger Method Objective Policy PolicyInput Random
Ranked Request SampledExit Similarity Uniform __version__ load_profile register_method sample_path
"""
PUBLIC = _NAMES.split()


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


PACKAGES = (SOURCE, ROOT / "benchmarks", ROOT / "experiments")
FILES = {
    ".".join(path.relative_to(folder.parent).with_suffix("").parts): path
    for folder in PACKAGES
    for path in folder.rglob("*.py")
}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """Returns the modules of the repository that a file imports, also those for types alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            those = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in MODULES else node.module for name in those}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & MODULES.keys()


def test_every_import_goes_down_the_stairs():
    assert {room_of(path) for path in SOURCE.rglob("*.py")} == set(ORDER)
    wrong = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in SOURCE.rglob("*.py")
        for name in imported_modules(path)
        if ORDER.index(room_of(MODULES[name])) > ORDER.index(room_of(path))
    ]
    assert not wrong


def test_no_module_is_imported_by_one_that_it_imports():
    TopologicalSorter({name: imported_modules(path) for name, path in MODULES.items()}).prepare()


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> dict[str, list[str]]:
    """Returns the modules of a new process: after ``import adaponder``, and after an Auto class made a model."""
    folder = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(folder)
    code = f"""
import json, sys, adaponder
package = list(sys.modules)
import adaponder.checkpoints.loading  # a room below the model, which imports Auto classes itself
from transformers import AutoConfig, AutoModelForCausalLM
unused = list(sys.modules)
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
assert type(model) is adaponder.AdaPonderForCausalLM
assert type(AutoConfig.from_pretrained({str(folder)!r})) is adaponder.AdaPonderConfig
assert adaponder.policies.FixedDepth is adaponder.FixedDepth
print(json.dumps({{"package": package, "unused": unused, "model": list(sys.modules)}}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_importing_costs_no_kernel_no_plot_and_no_web(imported):
    assert not {"torch", "transformers", "numpy", "yaml"} & set(imported["package"])
    assert "adaponder.modeling.model" not in imported["unused"]
    unwanted = {"matplotlib", "fastapi", "starlette", "uvicorn", "pandas", "lm_eval", "datasets", "typer"}
    # Triton itself may be there: transformers imports it where it is installed.
    unwanted |= {f"adaponder.ops.{path.parent.name}.triton" for path in SOURCE.glob("ops/*/triton.py")}
    assert "adaponder.modeling.model" in imported["model"]
    assert not unwanted & set(imported["model"])


def test_the_auto_classes_know_the_family_whichever_is_imported_first(imported):
    """The other process imports transformers after adaponder, this one before."""
    assert transformers.CONFIG_MAPPING["adaponder"] is adaponder.AdaPonderConfig
    known = transformers.AutoModelForCausalLM._model_mapping[adaponder.AdaPonderConfig]
    assert known is adaponder.AdaPonderForCausalLM


def test_the_public_door_is_this_wide():
    assert sorted(adaponder.__all__) == PUBLIC
    assert all(hasattr(adaponder, name) for name in adaponder.__all__)
    assert set(adaponder.__all__) <= set(dir(adaponder))
    assert not hasattr(adaponder, "Everything")


def test_pins_are_exact_and_cover_what_is_required():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in pins)
    names = {line.split("==")[0].lower() for line in pins}
    assert {"torch", "transformers", "safetensors", "tokenizers", "numpy", "typer", "rich"} <= names
    assert "torch==2.13.0" in pins
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert set(build) <= set(pins), "what builds the package is pinned too"


def test_no_path_of_any_machine_is_written_down():
    needles = ("/" + "root/", "/" + "work/", "/" + "home/")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        text = (ROOT / name).read_text(errors="ignore")
        assert not any(needle in text for needle in needles), name


def test_nothing_printed_is_markup():
    """Strings are text on our consoles (terminal.Screen): a tag in one would be shown, or would swallow a path."""
    tags = re.compile(r"\[/?(bold|dim|italic|underline|red|green|yellow|blue|cyan)\b|\[/\]|rich\.markup|from_markup")
    for path in SOURCE.rglob("*.py"):
        if room_of(path) != "cli":  # typer prints help texts, docstrings too; they hold nothing from outside
            code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
            assert not (found := tags.search(code)), f"{path}: {found.group()}; use terminal.line"


# Also the name of the package, of the command and of the model type: a method only where a method is spoken of.
SHARED = "adaponder"
METHOD_MODULES = {method_class(name).__module__ for name in method_names()}

# Who may name a method all the same, and why: (file, what it names).
ALLOWED = {
    ("checkpoints/looped.py", "loop"): "what Nanbeige's released checkpoints are",
    ("checkpoints/looped.py", "ouro"): "what Ouro's released checkpoints are",
    ("conversion/open.py", "ouro"): "whose exit gate a release publishes",
    ("conversion/checks.py", "ouro"): "which method equals Ouro's published code loop by loop",
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
        if isinstance(node, ast.ImportFrom) and node.module in METHOD_MODULES:
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


@pytest.mark.every
def test_gpu_tests_are_collected_where_only_the_libraries_of_a_gpu_machine_are():
    """Hides every library that the package and its tests may do without."""
    absent = (
        "accelerate datasets fastapi httpx jsonschema lm_eval openai peft playwright psutil pydantic ray schemathesis "
        "scipy starlette trl uvicorn wandb"
    )
    code = f"""
import sys
from importlib.machinery import PathFinder
import pytest
finder = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda _, name, *rest: None if name in {absent.split()} else finder(name, *rest))
sys.exit(pytest.main("--collect-only -q -m gpu -p no:cacheprovider -p hypothesis.extra.pytestplugin tests".split()))
"""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "tests collected" in done.stdout
