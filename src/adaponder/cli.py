"""Builds the command line from one typed function per command, grouped under headings of ``--help``."""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from adaponder.commands.analyze import analyze
from adaponder.commands.calibrate import calibrate
from adaponder.commands.convert import convert
from adaponder.commands.demo import demo
from adaponder.commands.doctor import doctor
from adaponder.commands.evaluate import compare, evaluate
from adaponder.commands.export import export
from adaponder.commands.generate import generate
from adaponder.commands.inspect import inspect
from adaponder.commands.page import page
from adaponder.commands.policies import policies
from adaponder.commands.prepare import prepare
from adaponder.commands.puzzle import puzzle
from adaponder.commands.recipes import recipes
from adaponder.commands.serve import serve
from adaponder.commands.sweep import sweep
from adaponder.commands.train import train
from adaponder.errors import AdaPonderError, ConfigError, InputError, is_panic, shortened
from adaponder.fields import LARGEST_INT
from adaponder.terminal import errors, json_alone, line, quiet_libraries
from adaponder.version import __version__

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

# The base class of the parser's errors, ClickException, which cannot be imported if Typer bundles click.
_ParserError: Any = typer.BadParameter.__mro__[2]


# Renamed options: maps (command, old name) to the new name. Old names work for one release.
RENAMED = {("serve", "--tokens"): "--max-length", ("serve", "--max-tokens"): "--max-new-tokens"}


class _PlainFlags:
    """Mixin for commands that omits ``<bool>`` in the help of options without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Group(_PlainFlags, TyperGroup):
    """The root command group."""


class Command(_PlainFlags, TyperCommand):
    """A command that refuses empty options and numbers that are not finite or exceed 64 bits.

    Old names of options, listed in ``RENAMED``, are accepted with a notice.

    With ``--json -``, only the JSON result goes to standard output.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {flag for param in self.params if getattr(param, "is_flag", False) for flag in param.opts}
        for index, argument in enumerate(args):
            name, equals, value = argument.partition("=")
            flag = name if name.startswith("--") else args[index - 1] if index else ""
            if not argument or (name.startswith("--") and equals and not value):
                raise typer.BadParameter(f"{flag if flag.startswith('--') else 'an argument'} is empty", ctx=ctx)
            if flag in flags and argument in ("true", "false"):
                raise InputError(f"{flag} takes no value: leave {argument} out")
            if (renamed := RENAMED.get((str(ctx.info_name), name))) is not None:
                args[index] = renamed + equals + value
                errors.print(f"{name} is now {renamed}; the old name works until the next release", style="yellow")
        rest = super().parse_args(ctx, args)
        params: list[Any] = self.params
        for param in params:
            values = ctx.params.get(param.name)
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, float) and not math.isfinite(value):
                    raise typer.BadParameter(f"{value} is not a finite number", ctx=ctx, param=param)
                if isinstance(value, int) and abs(value) > LARGEST_INT:
                    raise typer.BadParameter("the number does not fit into 64 bits", ctx=ctx, param=param)
        return rest

    def invoke(self, ctx: Any) -> Any:
        with json_alone(ctx.params.get("json")):
            return super().invoke(ctx)


# Every command by its heading in ``--help``, in the order of first use.
COMMANDS: dict[str, dict[str, Callable[..., Any]]] = {
    "Try it": {"demo": demo, "generate": generate, "puzzle": puzzle, "serve": serve, "page": page},
    "Train": {"prepare": prepare, "recipes": recipes, "train": train, "sweep": sweep},
    "Measure": {"eval": evaluate, "compare": compare, "analyze": analyze, "policies": policies, "calibrate": calibrate},
    "Checkpoints": {"inspect": inspect, "doctor": doctor, "convert": convert, "export": export},
}
# Commands that left the wheel, and what replaces them in a checkout.
MOVED = {
    "bench": "python -m benchmarks (train, prefill, decode, serve, ops)",
    "reproduce": "python -m experiments (list, next, claim NAME, run LABEL, results)",
}

app = typer.Typer(
    name="adaponder",
    cls=Group,
    help="Language models that read hard tokens more often.\n\n"
    "A stock Hugging Face decoder is read up to K times per token; a gate decides, token by token, when it is enough. "
    "Start with [bold]adaponder puzzle[/] (seconds) or [bold]adaponder demo[/] (minutes), or convert a checkpoint you "
    "have.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for panel, functions in COMMANDS.items():
    for command_name, function in functions.items():
        app.command(command_name, cls=Command, rich_help_panel=panel)(function)


def moved(context: typer.Context) -> None:
    program, _, subcommands = MOVED[context.info_name or ""].partition(" (")
    arguments = " ".join(context.args) or f"and one of {subcommands.rstrip(')')}"
    raise InputError(f"adaponder {context.info_name} has moved: in a checkout, run {program} {arguments}")


for command_name, replacement in MOVED.items():
    any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True}
    about = f"Moved: run {replacement} in a checkout."
    app.command(command_name, help=about, rich_help_panel="Moved out", context_settings=any_arguments)(moved)


def show_version(version: bool) -> None:
    """Prints the version and exits if ``--version`` is given."""
    if version:
        typer.echo(f"adaponder {__version__}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    quiet_libraries()
    warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning in one line, without the file name and line number of its source."""
    text = shortened(" ".join(str(message).split()))
    errors.print(line(("warning:", "bold yellow"), " ", text), soft_wrap=True)


def main(commands: typer.Typer | None = None) -> None:
    """Runs the command line, ``app`` by default; exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
    try:
        code = (commands or app)(standalone_mode=False)
    except AdaPonderError as error:
        code = exit_code(error)
    except _ParserError as error:
        code = _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:  # a full disk, a file without read permission
        code = fail(str(error), FAILED)
    except (MemoryError, RuntimeError) as error:
        # Compares torch's error by name, so that torch need not be imported.
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        code = fail(f"out of memory: {error}", FAILED)
    except BaseException as error:
        if not is_panic(error):
            raise
        code = fail(f"a native library failed: {error}", FAILED)
    if code == INTERRUPTED:
        errors.print("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def exit_code(error: AdaPonderError) -> int:
    """Prints the error in one line and returns its exit code: 2 for wrong usage, 1 for a failure."""
    return fail(str(error), MISUSED if isinstance(error, (InputError, ConfigError)) else FAILED)


def fail(message: str, code: int) -> int:
    """Prints an error in one line and returns ``code``."""
    text = shortened(re.sub(r"\s*\n\s*", " ", message.strip()))
    errors.print(line(("error:", "bold red"), " ", text), soft_wrap=True)
    return code


def _misused(error: Exception) -> int:
    """Prints a usage error and the ``--help`` command to run; returns 2.

    Prints nothing if a command without arguments has already printed its help.
    """
    context = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".")
    if message and type(error).__name__ != "NoArgsIsHelpError":
        cure = "" if context is None else f"; see {context.command_path} --help"
        fail((message + cure).replace("?;", "?"), MISUSED)
    return MISUSED
