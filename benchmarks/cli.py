"""Builds the command lines of benchmarks and experiments; options and exit codes work as in ``adaponder``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from adaponder.cli import Command, Group, main
from adaponder.commands.shared import command, listed
from adaponder.errors import InputError
from adaponder.terminal import quiet_libraries


def program(name: str, about: str, commands: Mapping[str, Callable[..., Any]]) -> typer.Typer:
    """Returns the app of ``python -m NAME`` with these commands; ``about`` is its help text."""
    app = typer.Typer(
        name=f"python -m {name}",
        cls=Group,
        help=about,
        rich_markup_mode="rich",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command_name, run in commands.items():
        app.command(command_name, cls=Command)(command(run))
    return app


def tuples(option: str, texts: Sequence[str] | None, count: int, kind: type, interval: str) -> list[tuple]:
    """Parses the values of a repeated option, each of ``count`` numbers such as ``1,2,3``; raises for another count."""
    values = {text: listed(option, text, kind, interval) for text in texts or ()}
    if wrong := [text for text, numbers in values.items() if len(numbers) != count]:
        raise InputError(f"{option} {wrong[0]} must be {count} numbers separated by commas")
    return [*values.values()]


def run_program(app: typer.Typer) -> None:
    """Runs the command line; exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    quiet_libraries()
    main(app)
