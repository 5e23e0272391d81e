"""Every option of every command with values that make no sense: one line and an exit code, never a traceback."""

import shutil

import pytest
from typer.main import get_command

from adaponder import cli
from adaponder.commands import convert
from adaponder.conversion import convert as conversion
from adaponder.data import prepare as preparing
from stock_support import make_stock

NUMBERS = ("", "word", "nan", "-inf", "-1", "0", "9" * 25, "9" * 5000, "1,5")
WORDS = ("", "-1", "file/x", "nowhere/at/all", "\x1b]0;x\x07[/b]:smile:", "x" * 5000, "a,,b")
PATHS = WORDS[2:]
VALUES = {"N": NUMBERS, "X": NUMBERS, "DIR": PATHS, "PATH": PATHS}
CONVERT, PREPARE = conversion.convert, preparing.prepare


class StartedError(Exception):
    """The options were accepted and the work would begin."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Makes a folder with a stock checkpoint, its conversion, a text, and a file where a folder is expected."""
    folder = tmp_path_factory.mktemp("walk")
    make_stock(folder / "stock", seed=0)
    convert.convert(source=str(folder / "stock"), out=folder / "ada", method="adaponder", iterations=3)
    (folder / "text.txt").write_text("def f(x): return x\n" * 60)
    (folder / "file").write_text("in the way")
    return folder


@pytest.fixture(scope="module")
def parser():
    return get_command(cli.app)


@pytest.fixture(autouse=True)
def no_work(monkeypatch, place, parser):
    """Replaces the work behind the options by an error that says that it would begin."""
    monkeypatch.chdir(place)
    for path in place.iterdir():  # an earlier walk may have made folders, which would now be inputs
        if path.name not in ("stock", "ada", "text.txt", "file"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setattr(cli, "app", parser)

    def start(*args, **options):
        raise StartedError

    monkeypatch.setattr("adaponder.recipes.recipe_names", lambda: ["cpu/demo"])
    commands = ("evaluate.scored", "doctor.check_installation", "generate.continue_prompts", "demo.show_recipe")
    others = ("evaluation.lab.lab.Lab", "analysis.trace.make_trace", "training.run.train", "data.prepare.prepare")
    others += (
        "conversion.convert.convert",
        "conversion.export.export",
        "serving.server.run",
        "serving.folder.write_page",
    )
    for name in (*(f"commands.{name}" for name in commands), *others):
        monkeypatch.setattr(f"adaponder.{name}", start)


# What a command needs to get as far as the option in question.
BASE = {
    "convert": ("stock", "--out", "converted"),
    "generate": ("ada", "--prompt", "x"),
    "inspect": ("ada",),
    "puzzle": ("ada",),
    "doctor": (),
    "prepare": ("text.txt", "--tokenizer", "ada/tokenizer.json", "--out", "shards", "--workers", "1"),
    "train": ("cpu/demo",),
    "sweep": ("cpu/demo", "--grid", "train.k_max=0.1,0.2", "--dry-run"),
    "recipes": (),
    "demo": (),
    "eval": ("ada", "--data", "text.txt"),
    "compare": ("ada", "ada", "--data", "text.txt"),
    "policies": ("ada", "--data", "text.txt", "--window", "16"),
    "calibrate": ("ada", "--data", "text.txt", "--window", "16", "--budget", "2"),
    "analyze": ("ada", "--data", "text.txt", "--out", "report"),
    "export": ("ada", "--out", "exported"),
    "serve": ("ada", "--port", "0"),
    "page": ("ada", "--out", "paged"),
}


def test_every_command_is_walked(parser):
    assert set(parser.commands) - set(cli.MOVED) == set(BASE)


@pytest.fixture
def walk(command):
    """Runs a command; returns its error, or an empty text where it succeeded or the work would begin."""

    def walk(*arguments: str) -> str:
        try:
            code, _, error = command(*arguments)
        except StartedError:
            return ""
        if code == 0:
            return ""
        assert code in (1, 2), arguments
        assert error.startswith("error: "), (arguments, error)
        assert len(error.splitlines()) == 1, (arguments, error)
        assert "\x1b" not in error, arguments
        return error

    return walk


@pytest.mark.parametrize("words", BASE)
def test_no_value_of_any_option_ends_in_a_traceback(walk, parser, words):
    for param in parser.commands[words].params:
        option = param.opts[0]
        if not option.startswith("--") or getattr(param, "is_flag", False) or option == "--help":
            continue
        base = list(BASE[words])
        if option in base:
            del base[base.index(option) : base.index(option) + 2]
        for value in VALUES.get(param.metavar, WORDS):
            error = walk(words, *base, option, value)
            if error and param.metavar in ("N", "X") and words != "puzzle":  # which refuses the checkpoint first
                assert option in error or f"{param.name}=" in error, f"{words} {option} {value[:40]!r}: {error}"


@pytest.mark.parametrize("words", [words for words in BASE if words != "demo"])
def test_no_argument_ends_in_a_traceback(walk, monkeypatch, words):
    monkeypatch.setattr("adaponder.conversion.convert.convert", CONVERT)
    monkeypatch.setattr("adaponder.data.prepare.prepare", PREPARE)
    for value in WORDS:
        assert walk(words, value, *BASE[words][1:]), f"{words} {value[:40]!r} was accepted"
