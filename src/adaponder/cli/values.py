"""What an option may hold, checked while the command line is read: before any library is imported or work is begun."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from adaponder.errors import InputError

if TYPE_CHECKING:
    from adaponder.policies import Policy

LARGEST = 2**63 - 1


class Command(TyperCommand):
    """A command whose options are never empty, and whose numbers are finite and fit into 64 bits."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place, argument in enumerate(args):
            name, equals, value = argument.partition("=")
            named = name if name.startswith("--") else args[place - 1] if place else ""
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
    """An application whose commands are :class:`Command`."""

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        return super().command(name, cls=Command, **options)


def _each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, (list, tuple)) else [value]


# --- callbacks: an option's range stands beside it, as ``typer.Option(callback=between(0, 1))`` ---------------------


def between(low: float, high: float) -> Callable[[Any], Any]:
    """Above ``low`` and below ``high``."""

    def check(value: Any) -> Any:
        if value is not None and not low < value < high:
            raise typer.BadParameter(f"{value:g} is not between {low:g} and {high:g}")
        return value

    return check


def above(low: float, *, most: float = math.inf) -> Callable[[Any], Any]:
    """Above ``low``, at most ``most``."""

    def check(value: Any) -> Any:
        if value is not None and not low < value <= most:
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise typer.BadParameter(f"{value:g} is not above {low:g}{limit}")
        return value

    return check


def share(value: float | None) -> float | None:
    """From 0 up to, but not, 1."""
    if value is not None and not 0 <= value < 1:
        raise typer.BadParameter(f"{value:g} is not a share from 0 up to, but not, 1")
    return value


def one_of(*names: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(names)}")
        return value

    return check


def folder(path: Path | None) -> Path | None:
    """A folder that is there, or can be made."""
    if path is not None:
        _refuse_unwritable(path)
        if path.exists() and not path.is_dir():
            raise typer.BadParameter(f"{path} is a file, not a folder")
    return path


def file(path: Path | None) -> Path | None:
    """A file that can be written, in a folder that is there or can be made."""
    if path is not None:
        _refuse_unwritable(path)
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder, not a file")
    return path


def _refuse_unwritable(path: Path) -> None:
    try:
        there = next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise typer.BadParameter(f"{path} cannot be written to: {error.strerror}") from None
    if there != path and not there.is_dir():
        raise typer.BadParameter(f"{path} cannot be made: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written to: permission denied for {there}")


# --- lists, and options that exclude one another ------------------------------------------------------------------


def numbers(option: str, text: str | None, *, least: int = 1, most: int = LARGEST) -> list[int]:
    """``1,2,3`` as a list of whole numbers from ``least`` to ``most``."""
    return _listed(option, text, int, least, most, "whole numbers", "1,2,3")


def decimals(option: str, text: str | None, *, least: float = 0.0, most: float = LARGEST) -> list[float]:
    """``1.5,2`` as a list of numbers from ``least`` to ``most``."""
    return _listed(option, text, float, least, most, "numbers", "1.5,2.5")


def _listed(
    option: str, text: str | None, kind: Callable[[str], Any], least: float, most: float, what: str, example: str
) -> list[Any]:
    if text is None:
        return []
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: {what} with commas between them, as in {example}") from None
    if wrong := [value for value in found if not least <= value <= most]:
        limit = f"from {least:g}" + ("" if most == LARGEST else f" to {most:g}")
        raise InputError(f"{option} {text}: {wrong[0]} is out of range; {limit}")
    return found


def names(option: str, text: str | None) -> list[str]:
    """``a,b`` as a list of names."""
    found = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(found):
        raise InputError(f"{option} {text}: names with commas between them, as in a,b")
    return found


def refuse(beside: str, **options: object) -> None:
    """Refuses options that would be ignored."""
    if given := [name for name, value in options.items() if value]:
        raise InputError(f"--{given[0].replace('_', '-')} means nothing beside {beside}: leave it out")


def policy_from(option: str, text: str | None) -> Policy | None:
    """The policy that an option says; what is wrong with it is said under that option's name."""
    if text is None:
        return None
    from adaponder.policies import parse_policy

    try:
        return parse_policy(text)
    except InputError as error:
        raise InputError(str(error).replace("--policy", option, 1)) from None
