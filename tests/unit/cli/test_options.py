"""An option is one field: its dataclass is the command line, and the object that the command is called with."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from adaponder import cli
from adaponder.cli.parsing import App, options_from
from adaponder.commands import options as every
from adaponder.commands.options import EvalOptions, Option, values
from adaponder.commands.options.option import fields_of
from adaponder.commands.options.values import between, numbers
from adaponder.errors import InputError
from adaponder.policies import FixedDepth


@dataclass(frozen=True, kw_only=True)
class Shared:
    seed: Annotated[int, Option(metavar="N", min=0, help="Of what is random.")] = 0


@dataclass(frozen=True, kw_only=True)
class Knitting(Shared):
    pattern: Annotated[str, Option(argument=True, metavar="PATTERN", help="What to knit.")]
    stripes: Annotated[Sequence[int], Option(metavar="1,2", help="Rows of each.", read=numbers())] = ()
    yarn: Annotated[Sequence[str], Option(several=True, metavar="COLOUR", help="May be repeated.")] = ("grey",)
    tension: Annotated[float, Option(metavar="X", help="Between 0 and 1.", check=between(0, 1))] = 0.5
    fast: Annotated[bool, Option(flags=("--fast",), help="Skip every other row.")] = False


@pytest.fixture
def knit():
    """(runs the command line, the options that the command was called with)."""
    app, called = App(), []

    @app.taking(Knitting)
    def knit(options: Knitting) -> None:
        """Knit a pattern."""
        called.append(options)

    return (lambda *words: CliRunner().invoke(app, words)), called


def test_a_field_appears_in_help_with_its_default_and_reaches_the_command(knit):
    run, called = knit
    shown = run("--help").output
    for word in ("Knit a pattern.", "PATTERN", "--stripes", "Rows of each.", "--seed", "Of what is random.", "0.5"):
        assert word in shown
    words = (
        "scarf",
        "--stripes",
        "2,3",
        "--yarn",
        "red",
        "--yarn",
        "blue",
        "--tension",
        "0.9",
        "--fast",
        "--seed",
        "7",
    )
    assert run(*words).exit_code == 0
    assert called == [Knitting(pattern="scarf", stripes=(2, 3), yarn=("red", "blue"), tension=0.9, fast=True, seed=7)]


def test_what_is_not_typed_is_the_fields_default(knit):
    run, called = knit
    assert run("scarf").exit_code == 0
    assert called == [Knitting(pattern="scarf")]
    assert called[0].yarn == ("grey",)


def test_own_options_come_before_shared_ones():
    assert [field.name for field in fields_of(Knitting)] == ["pattern", "stripes", "yarn", "tension", "fast", "seed"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("scarf", "--tension", "1"), "Invalid value for '--tension': 1 is not between 0 and 1"),
        (("scarf", "--seed", "-1"), "Invalid value for '--seed'"),
        (("scarf", "--yarn="), "--yarn is empty"),
        ((), "Missing argument 'PATTERN'"),
    ],
    ids=["check", "range", "empty", "missing"],
)
def test_a_value_out_of_range_is_the_parsers_error_and_names_its_option(knit, words, said):
    run, called = knit
    result = run(*words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    assert not called


def test_text_that_cannot_be_read_is_an_error_that_shows_how_to_write_it(knit):
    run, called = knit
    result = run("scarf", "--stripes", "two")
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == "--stripes two: whole numbers with commas between them, as in 1,2,3"
    assert not called


def test_a_policy_is_typed_as_text_and_given_as_an_object():
    typed = {field.name: None if field.required else field.default for field in fields_of(EvalOptions)}
    made = options_from(EvalOptions, typed | {"checkpoint": "ada", "policy": "fixed:2", "depths": "1,3"})
    assert made == EvalOptions(checkpoint="ada", policy=FixedDepth(2), depths=(1, 3))


def test_every_command_but_for_groups_takes_one_options_object():
    """Each class is some command's, and has exactly that command's options."""
    root = get_command(cli.app)
    commands = {name: one for name, one in root.commands.items() if not hasattr(one, "commands")}
    commands |= {f"bench {name}": one for name, one in root.commands["bench"].commands.items()}
    lines = {frozenset(param.name for param in one.params if param.name != "help") for one in commands.values()}
    shared = {"BenchOptions", "Option"}
    classes = [getattr(every, name) for name in every.__all__ if name not in shared]
    assert len(classes) == len(commands)
    assert {frozenset(field.name for field in dataclasses.fields(one)) for one in classes} == lines


def test_options_and_help_import_neither_torch_nor_the_libraries_of_commands():
    code = "import sys; from adaponder.commands.options import EvalOptions; print('typer' in sys.modules); "
    code += "import adaponder.cli; print(sorted({'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False", "[]"]


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (*map(Path, ("/dev/stdout", "/dev/null", "/dev/fd/1", "/proc/self/fd/1")), tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"{path} is a device or a pipe, not a file"):
            values.result(path)
    assert values.result(tmp_path / "new.json") == tmp_path / "new.json"
