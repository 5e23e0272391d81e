"""What an option may hold: checks that raise ``ValueError`` while parsing, and readers of text such as ``1,2,3``.

Readers raise :class:`InputError`, which names the option and shows how it is written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaponder.errors import InputError
from adaponder.fields import Field, violation
from adaponder.terminal import STDOUT

if TYPE_CHECKING:
    from adaponder.policies import Policy

LARGEST = 2**63 - 1


# --- checks: an option's range stands beside it, as ``Option(check=between(0, 1))`` --------------------------------


def between(low: float, high: float) -> Callable[[Any], Any]:
    """Above ``low`` and below ``high``."""

    def check(value: Any) -> Any:
        if value is not None and not low < value < high:
            raise ValueError(f"{value:g} is not between {low:g} and {high:g}")
        return value

    return check


def from_to(least: float, most: float) -> Callable[[Any], Any]:
    """At least ``least``, at most ``most``."""

    def check(value: Any) -> Any:
        if value is not None and not least <= value <= most:
            raise ValueError(f"{value:g} is not from {least:g} to {most:g}")
        return value

    return check


def above(low: float, *, most: float = math.inf) -> Callable[[Any], Any]:
    """Above ``low``, at most ``most``."""

    def check(value: Any) -> Any:
        if value is not None and not low < value <= most:
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise ValueError(f"{value:g} is not above {low:g}{limit}")
        return value

    return check


def allowed(field: Field) -> Callable[[Any], Any]:
    """A value that the field takes."""

    def check(value: Any) -> Any:
        if value is not None and (problem := violation(field, value)):
            raise ValueError(f"{value} {problem}")
        return value

    return check


def share(value: float | None) -> float | None:
    """From 0 up to, but not, 1."""
    if value is not None and not 0 <= value < 1:
        raise ValueError(f"{value:g} is not a share from 0 up to, but not, 1")
    return value


def one_of(*names: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and value not in names:
            raise ValueError(f"{value!r} is none of {', '.join(names)}")
        return value

    return check


_STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def folder(path: Path | None) -> Path | None:
    """A folder that is there, or can be made."""
    if path is not None:
        _refuse_unwritable(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file, not a folder")
    return path


def result(path: Path | None) -> Path | None:
    """A file that can be written, in a folder that is there or can be made; or ``-``, standard output."""
    if path is not None and path != STDOUT:
        _refuse_unwritable(path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder, not a file")
        # What is written takes the place of what is there: of /dev/stdout itself, where one may do that.
        if path.absolute().parent in _STREAMS or (path.exists() and not path.is_file()):
            raise ValueError(f"{path} is a device or a pipe, not a file; - is standard output")
    return path


def _refuse_unwritable(path: Path) -> None:
    try:
        there = next((part for part in (path, *path.absolute().parents) if part.exists()), Path("/"))
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise ValueError(f"{path} cannot be written to: {error.strerror}") from None
    if there != path and not there.is_dir():
        raise ValueError(f"{path} cannot be made: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{path} cannot be written to: permission denied for {there}")


# --- readers: text to values, as ``Option(read=numbers(least=0))`` -------------------------------------------------


def numbers(*, least: int = 1, most: int = LARGEST) -> Callable[[str, str], tuple[int, ...]]:
    """``1,2,3`` as whole numbers from ``least`` to ``most``."""
    return lambda flag, text: _listed(flag, text, int, least, most, "whole numbers", "1,2,3")


def decimals(*, least: float = 0.0, most: float = LARGEST) -> Callable[[str, str], tuple[float, ...]]:
    """``1.5,2`` as numbers from ``least`` to ``most``."""
    return lambda flag, text: _listed(flag, text, float, least, most, "numbers", "1.5,2.5")


def _listed(
    flag: str, text: str, kind: Callable[[str], Any], least: float, most: float, what: str, example: str
) -> tuple[Any, ...]:
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{flag} {text}: {what} with commas between them, as in {example}") from None
    if wrong := [value for value in values if not least <= value <= most]:
        limit = f"from {least:g}" + ("" if most == LARGEST else f" to {most:g}")
        raise InputError(f"{flag} {text}: {wrong[0]} is out of range; {limit}")
    return values


def names(flag: str, text: str) -> tuple[str, ...]:
    """``a,b`` as names."""
    values = tuple(part.strip() for part in text.split(","))
    if not all(values):
        raise InputError(f"{flag} {text}: names with commas between them, as in a,b")
    return values


def policy(flag: str, text: str) -> Policy:
    """The policy that a line of text says; what is wrong with it is said under the option's name."""
    from adaponder.policies import parse_policy

    try:
        return parse_policy(text)
    except InputError as error:
        raise InputError(str(error).replace("--policy", flag, 1)) from None
