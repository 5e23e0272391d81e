"""Builds the command lines of benchmarks and experiments: options from dataclasses, exit codes as adaponder's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

from adaponder.cli import Command, main
from adaponder.errors import InputError
from adaponder.terminal import quiet_libraries

Number = TypeVar("Number", int, float)


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


def numbers(
    option: str, text: str | None, kind: Callable[[str], Number], low: float, high: float, count: int | None = None
) -> list[Number]:
    """Parses an option such as ``1,2,3`` whose numbers must be between ``low`` and ``high``; [] if it is not given."""
    if text is None:
        return []
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or len(values) != (count or len(values)):
        raise InputError(f"{option} {text} must be {f'{count} ' if count else ''}numbers separated by commas")
    if wrong := [value for value in values if not low <= value <= high]:
        raise InputError(f"{option} {text}: {wrong[0]:g} must be between {low:g} and {high:g}")
    return values


def run_program(app: typer.Typer) -> None:
    """Runs the command line; exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    quiet_libraries()
    main(app)
