"""Commands that documents show are run in their order, at a size of seconds; those that cannot be are parsed."""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command

from adaponder import cli
from adaponder.evaluation.lab.profiles import check_name
from adaponder.policies import parse_policy
from adaponder.recipes import load_recipe

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "experiments/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    ROOT / "src" / "adaponder" / "sample" / "README.md",
]
COMMANDS = get_command(cli.app).commands

# What makes a command that is run small, by its name.
SMALL_RECIPE = [
    "train.steps=4",
    "train.global_batch=2",
    "train.eval_tokens=512",
    "train.ponder_start=2",
    "train.ponder_full=3",
    "data.sequence=64",
    "model.backbone.hidden_size=32",
    "model.backbone.intermediate_size=64",
    "model.backbone.num_hidden_layers=1",
]
SMALLER = {
    "prepare": ["--workers", "1"],
    "train": [word for value in SMALL_RECIPE for word in ("--set", value)],
    "eval": ["--max-tokens", "100"],
    "compare": ["--max-tokens", "100"],
    "calibrate": ["--max-tokens", "400"],
    "analyze": ["--max-tokens", "64", "--only", "grid"],
    "export": ["--max-tokens", "64"],
    "generate": ["--max-new-tokens", "4"],
}
# Why a command of the pages that are run is not: the first pattern that is found in it.
NOT_RUN = {
    r"--device cuda": "needs a GPU",
    r"^demo": "trains for minutes; tests/unit/test_cli.py runs its parts",
    r"^serve": "does not end; tests/unit/serving and tests/browser ask it",
    r"^policies": "every rule takes 16 s; tests/unit/evaluation",
    r"^doctor$": "takes 4 s; tests/unit/test_cli.py",
    r"^sweep": "trains six times; tests/unit/training",
    r"^analyze sample": "takes 3 s; tests/examples",
    r"^train finetune": "takes minutes; tests/repo/test_finetune_page.py runs it small",
    r"^prepare hops": "takes 7 s; tests/unit/data",
    r"EleutherAI|zeng123": "needs the hub",
    r"--tasks": "needs sets of questions; tests/unit/commands/test_task_command.py",
    r"--push": "sends to the hub; tests/unit/conversion",
    r"--interactive": "needs somebody at the keyboard; tests/unit/commands/test_generate.py",
}


def shown_commands(text: str) -> list[str]:
    """Returns the command lines in the code blocks of a document, without ``adaponder`` and comments."""
    lines = []
    for language, block in re.findall(r"^```(\w*)\n(.+?)^```", text, flags=re.DOTALL | re.MULTILINE):
        if language not in ("", "bash", "sh"):
            continue
        lines += re.findall(r"^(?:.*(?:\| |-m ))?adaponder (\S.*)$", block.replace("\\\n", " "), flags=re.MULTILINE)
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


def said_commands(text: str) -> list[str]:
    """Returns the commands within sentences, which may be incomplete."""
    return [" ".join(line.split()) for line in re.findall(r"`adaponder ([^`]+)`", text)]


def examples_of_help() -> list[str]:
    helps = [command.help or "" for command in COMMANDS.values()]
    return re.findall(r"\[dim\](?:.* -m )?adaponder (.+?)\[/\]", "\n".join(helps))


def docstrings() -> str:
    paths = sorted((ROOT / "examples").glob("*.py"))
    return "\n".join(str(ast.get_docstring(ast.parse(path.read_text()))) for path in paths)


def parsed(line: str) -> tuple[str, dict[str, Any]]:
    """Returns the command's name and its parameters, as the command line parses them."""
    name, *arguments = shlex.split(line)
    return name, COMMANDS[name].make_context(name, arguments).params


def in_documents() -> list[str]:
    lines = {line for path in DOCUMENTS for line in shown_commands(path.read_text())}
    lines |= set(re.findall(r"^ +adaponder (.+)$", docstrings(), flags=re.MULTILINE))
    return sorted(lines | set(examples_of_help()))


@pytest.mark.parametrize("line", in_documents())
def test_a_command_that_is_shown_is_one_that_the_command_line_takes(line):
    _, values = parsed(line)
    if line.startswith(("train ", "sweep ")):
        load_recipe(values["recipe"], list(values.get("overrides") or ()))
    if values.get("policy"):
        parse_policy(values["policy"])
    if values.get("profile"):
        check_name(values["profile"])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_that_is_mentioned_and_its_options_exist(path):
    for line in said_commands(path.read_text()):
        name, *words = line.split()
        if name in ("COMMAND", "--help", "--install-completion"):
            continue
        params = COMMANDS[name].params
        known = {option for param in params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, line


def test_commands_of_the_tutorial_the_readme_and_the_page_of_commands_run(command, tmp_path, monkeypatch):
    """Runs in one folder with the files that the pages assume: sources, and a run under the pages' names for it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("policies", "methods", "execution"):
        shutil.copytree(ROOT / "src" / "adaponder" / folder, tmp_path / "src" / folder)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "import "}) + "\n")
    lines: dict[str, None] = {}
    for name in ("docs/tutorial.md", "README.md", "docs/commands.md", "docs/export.md"):
        for line in shown_commands((ROOT / name).read_text()):
            # The run of `make demo` and its data are the tutorial's here.
            lines[line.replace("runs/demo", "runs/src").replace("data/stdlib-train-bpe-2048", "data/src")] = None
    left_out = {line: why for line in lines for pattern, why in NOT_RUN.items() if re.search(pattern, line)}
    assert set(left_out.values()) == set(NOT_RUN.values()), "a reason that no command has any more"
    ran, forms, following = [], set(), {}
    for line in lines:
        form = re.sub(r"(--\S+) '?[^-'][^']*?'?(?= --|$)", r"\1", line)  # without the values of its options
        if line not in left_out and form not in forms:
            name, *words = shlex.split(line)
            monkeypatch.setattr(sys, "stdin", io.StringIO("import "))
            code, *output = command(name, *words, *SMALLER.get(name, []))
            assert not code, (line, output)
            ran.append(name)
            for shown in re.findall(r"^Next: adaponder (.+)$", output[0], flags=re.MULTILINE):
                following[name], _ = parsed(shown)
            forms.add(form)
        if line.startswith("train") and "runs/src" in line:
            (tmp_path / "data" / "mine").symlink_to("src")
            for name in ("one", "other"):
                (tmp_path / "runs" / name).symlink_to("src")
            (tmp_path / "pythia-70m-ada").symlink_to("runs/src/final")
    assert len(ran) >= 18
    assert {*SMALLER, "doctor", "inspect", "puzzle", "recipes", "convert", "page"} == set(ran)
    assert following == {"prepare": "train", "train": "eval", "eval": "calibrate", "calibrate": "generate"}
    assert (tmp_path / "analysis" / "report.html").is_file()
    assert "budget-3" in (tmp_path / "runs" / "src" / "final" / "profiles.json").read_text()
    (opening,) = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.DOTALL)
    without_package = f"import sys; sys.modules['adaponder'] = None\n{opening}"
    opened = subprocess.run([sys.executable, "-c", without_package], capture_output=True, text=True)
    assert opened.stdout.startswith("import "), opened.stderr


@pytest.mark.every  # it trains for minutes
def test_the_tutorial_runs_as_it_is_written(tmp_path):
    """Runs each line of its code blocks at full size; the server is stopped once its page is there."""
    shutil.copytree(ROOT / "src", tmp_path / "src")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    run = functools.partial(subprocess.Popen, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    ran = []
    for language, block in re.findall(
        r"^```(\w+)\n(.+?)^```", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.DOTALL | re.MULTILINE
    ):
        if language == "python":
            lines = [["-c", block]]
        else:
            lines = [["-m", *shlex.split(line)] for line in block.splitlines() if line.startswith("adaponder ")]
        for words in lines:
            serves = "serve" in words
            with run([sys.executable, *words, *(["--port", "0"] if serves else [])]) as process:
                assert process.stdout is not None
                if serves:
                    addresses = (re.search(r"http://[\d.:]+/", line) for line in process.stdout)
                    address = next(address[0] for address in addresses if address)
                    assert "AdaPonder" in httpx.get(address, trust_env=False).text
                    process.send_signal(signal.SIGTERM)
                output = process.stdout.read()
            assert process.returncode == 0, (words, output)
            ran.append(words[2] if words[0] == "-m" else "python")
    expected = "doctor generate prepare train eval calibrate generate analyze serve export python"
    assert ran == expected.split()


def test_targets_and_extras_that_documents_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for path in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        text = path.read_text()
        blocks = "\n".join(re.findall(r"^```\w*\n(.+?)^```", text, flags=re.DOTALL | re.MULTILINE))
        named = re.findall(r"`make ([a-z-]+)`", text) + re.findall(r"^make ([a-z-]+)", blocks, flags=re.MULTILINE)
        assert set(named) <= targets, path.name
        wanted = re.findall(r"(?:adaponder|\.)\[([a-z, ]+)\]", text)
        assert {one.strip() for group in wanted for one in group.split(",")} <= extras, path.name


def test_every_target_of_the_makefile_is_explained_to_contributors():
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    guide = (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "README.md").read_text()
    assert not [name for name in targets if f"make {name}" not in guide and name not in ("help", "check", "clean")]
