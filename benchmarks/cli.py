"""Command lines of the programs beside the package: options from dataclasses, errors as one line, exit codes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from adaponder.errors import AdaPonderError, ConfigError, InputError
from adaponder.terminal import errors, json_alone, line, quiet_libraries


def program(name: str, about: str) -> typer.Typer:
    """Returns an app without commands."""
    look: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}
    return typer.Typer(name=f"python -m {name}", help=about, rich_markup_mode="rich", **look)


def add_command(app: typer.Typer, name: str, run: Callable[..., Any]) -> None:
    """Registers ``run(options, ...)``: the fields of its options class and its other parameters are options."""
    first, *others = inspect.signature(run).parameters.values()
    kind: Any = get_type_hints(run, include_extras=True)[first.name]
    parameters = []
    for source, named in ((run, others), (kind, inspect.signature(kind).parameters.values())):
        hints = get_type_hints(source, include_extras=True)
        parameters += [field.replace(kind=field.KEYWORD_ONLY, annotation=hints[field.name]) for field in named]

    def command(**values: Any) -> None:
        options = kind(**{field: values.pop(field) for field in inspect.signature(kind).parameters})
        with json_alone(values.get("json", getattr(options, "json", None))):
            run(options, **values)

    command.__doc__ = run.__doc__
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {field.name: field.annotation for field in parameters}
    app.command(name)(command)


def run_program(app: typer.Typer) -> None:
    """Runs the command line; exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    quiet_libraries()
    try:
        code = app(standalone_mode=False)
    except AdaPonderError as error:
        errors.print(line(("error:", "bold red"), f" {error}"), soft_wrap=True)
        code = 2 if isinstance(error, InputError | ConfigError) else 1
    except (KeyboardInterrupt, typer.Abort):
        errors.print("interrupted")
        code = 130
    except Exception as error:
        # Typer vendors its own click in newer releases, so the parser's errors have no importable name.
        if not hasattr(error, "format_message"):
            raise
        errors.print(line(("error:", "bold red"), f" {error.format_message()}"), soft_wrap=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
