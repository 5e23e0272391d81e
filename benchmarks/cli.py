"""Builds the command lines of benchmarks and experiments: options from dataclasses, exit codes as adaponder's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from adaponder.cli import Command, main
from adaponder.terminal import quiet_libraries


def program(name: str, about: str) -> typer.Typer:
    """Returns an app without commands for ``python -m NAME``; ``about`` is its help text."""
    look: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}
    return typer.Typer(name=f"python -m {name}", help=about, rich_markup_mode="rich", **look)


def add_command(app: typer.Typer, name: str, run: Callable[..., Any]) -> None:
    """Registers ``run``: the fields of its first parameter's class, and its other parameters, become options."""
    first, *others = inspect.signature(run).parameters.values()
    kind: Any = get_type_hints(run)[first.name]
    fields = inspect.signature(kind).parameters
    hints = get_type_hints(kind, include_extras=True) | get_type_hints(run, include_extras=True)
    parameters = [
        field.replace(kind=field.KEYWORD_ONLY, annotation=hints[field.name]) for field in (*others, *fields.values())
    ]

    def command(**values: Any) -> None:
        run(kind(**{field: values.pop(field) for field in fields}), **values)

    command.__doc__ = run.__doc__
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {field.name: field.annotation for field in parameters}
    app.command(name, cls=Command)(command)


def run_program(app: typer.Typer) -> None:
    """Runs the command line; exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    quiet_libraries()
    main(app)
