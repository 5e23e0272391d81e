"""The command line: ``python -m benchmarks train|prefill|decode|serve|ops``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from adaponder.errors import AdaPonderError, ConfigError, InputError
from adaponder.terminal import errors, json_alone, line, quiet_libraries
from benchmarks import decode, ops, prefill, serve, train

app = typer.Typer(
    help="Measure speed and memory: ours beside a plain PonderLM (stock modules, eager), in one run, with a record.\n\n"
    "Records (hardware, versions, commit, figures) go to benchmarks/records/. One test of each kernel runs first; if "
    "one fails, nothing is measured.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def add_command(name: str, run: Callable[..., Any]) -> None:
    """Registers ``run(options, ...)``: the fields of its options class and its other parameters are options."""
    first, *others = inspect.signature(run).parameters.values()
    kind: Any = get_type_hints(run, include_extras=True)[first.name]
    parameters = []
    for source, named in ((run, others), (kind, inspect.signature(kind).parameters.values())):
        hints = get_type_hints(source, include_extras=True)
        parameters += [each.replace(kind=each.KEYWORD_ONLY, annotation=hints[each.name]) for each in named]

    def command(**values: Any) -> None:
        options = kind(**{each: values.pop(each) for each in inspect.signature(kind).parameters})
        with json_alone(values.get("json", getattr(options, "json", None))):
            run(options, **values)

    command.__doc__ = run.__doc__
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name)(command)


for module in (train, prefill, decode, serve, ops):
    add_command(module.__name__.rpartition(".")[2], module.run)


def main() -> None:
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


if __name__ == "__main__":
    main()
