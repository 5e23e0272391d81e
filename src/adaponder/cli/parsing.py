"""A command line made of an options class: every field becomes one option, and the command gets one object."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from adaponder.commands.options.option import Field, fields_of
from adaponder.commands.options.values import LARGEST
from adaponder.errors import InputError
from adaponder.terminal import json_alone

Options = TypeVar("Options")


class Command(TyperCommand):
    """A command whose options are never empty, and whose numbers are finite and fit into 64 bits."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for index, argument in enumerate(args):
            name, equals, value = argument.partition("=")
            named = name if name.startswith("--") else args[index - 1] if index else ""
            if not argument or (name.startswith("--") and equals and not value):
                raise typer.BadParameter(f"{named if named.startswith('--') else 'an argument'} is empty", ctx=ctx)
        rest = super().parse_args(ctx, args)
        params: list[Any] = self.params
        for param in params:
            for value in _each(ctx.params.get(param.name)):
                if isinstance(value, float) and not math.isfinite(value):
                    raise typer.BadParameter(f"{value} is not a finite number", ctx=ctx, param=param)
                if isinstance(value, int) and abs(value) > LARGEST:
                    raise typer.BadParameter(f"beyond {LARGEST}", ctx=ctx, param=param)
        return rest


class App(typer.Typer):
    """An application whose commands are functions of one options object."""

    def taking(
        self, options: type[Options], name: str | None = None
    ) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
        """Registers a function as the command ``name`` (default: the function's own), with the fields of ``options``
        as its command line and the function's docstring as its help."""

        def register(function: Callable[[Options], None]) -> Callable[..., None]:
            def called(**typed: Any) -> None:
                asked = options_from(options, typed)
                with json_alone(getattr(asked, "json", None)):
                    function(asked)

            parameters = [_parameter(field) for field in fields_of(options)]
            called.__name__, called.__doc__ = function.__name__, function.__doc__
            vars(called)["__signature__"] = inspect.Signature(parameters)
            called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
            return self.command(name, cls=Command)(called)

        return register


def options_from(options: type[Options], typed: Mapping[str, Any]) -> Options:
    """The options object of what the parser found, by field; what was not typed keeps the field's default."""
    values = {field.name: _value(field, typed[field.name]) for field in fields_of(options) if _typed(field, typed)}
    return options(**values)


def refuse(beside: str, **options: object) -> None:
    """Refuses options that would be ignored."""
    if unused := [name for name, value in options.items() if value]:
        raise InputError(f"--{unused[0].replace('_', '-')} means nothing beside {beside}: leave it out")


def _parameter(field: Field) -> inspect.Parameter:
    """The field as a parameter of a function that Typer makes a command of."""
    option = field.option
    kind, default = field.type, inspect.Parameter.empty if field.required else field.default
    if _is_text(field):
        kind = list[str] if option.several else str
        if not field.required:
            kind, default = kind | None, None
    settings = {"metavar": option.metavar, "help": option.help, "min": option.min, "max": option.max}
    settings |= {"callback": _callback(option.check), "hidden": option.hidden or None}
    made = typer.Argument if option.argument else typer.Option
    about = made(*option.flags, **{name: value for name, value in settings.items() if value is not None})
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about]
    )


def _is_text(field: Field) -> bool:
    """Whether the parser leaves the value as text, or as a list of it."""
    return field.option.read is not None or field.option.several


def _typed(field: Field, typed: Mapping[str, Any]) -> bool:
    return not _is_text(field) or bool(typed[field.name])


def _value(field: Field, typed: Any) -> Any:
    read = field.option.read or (lambda flag, text: text)
    if not _is_text(field):
        return typed
    return tuple(read(field.flag, text) for text in typed) if field.option.several else read(field.flag, typed)


def _callback(check: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The check as Typer calls it: what is wrong becomes the parser's error, which names the option."""
    if check is None:
        return None

    def callback(value: Any) -> Any:
        try:
            return check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return callback


def _each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, (list, tuple)) else [value]
