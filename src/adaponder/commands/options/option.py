"""What the command line must know of one option, beside its name, type and default, which its field states.

An option is written once, as a field of a dataclass::

    batch_size: Annotated[int, Option("Windows at a time.", metavar="N", min=1)] = 8

A class may inherit from others that hold shared options. ``--help`` lists a class's own options first, then those of
its bases from left to right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Option:
    """How one field is said on the command line.

    Attributes:
        help: its sentence in ``--help``.
        metavar: what stands for the value there.
        flags: its names; default: ``--`` and the field's name, with dashes.
        argument: it has no flag, and is known by its position.
        several: it may be repeated; the field holds a tuple.
        min: the least number.
        max: the greatest number.
        check: returns the value, or raises :class:`ValueError` with what is wrong with it; called while parsing.
        read: ``read(flag, text)`` makes the field's value of what was typed, where that is no plain number or text.
        hidden: not in ``--help``.
    """

    help: str | None = None
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    argument: bool = False
    several: bool = False
    min: float | None = None
    max: float | None = None
    check: Callable[[Any], Any] | None = None
    read: Callable[[str, str], Any] | None = None
    hidden: bool = False


class Field(NamedTuple):
    """One field of an options class: ``type`` is what follows ``Annotated[``, ``default`` may be ``MISSING``."""

    name: str
    type: Any
    option: Option
    default: Any

    @property
    def flag(self) -> str:
        """The option as errors name it."""
        return self.option.flags[0] if self.option.flags else f"--{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        return self.default is MISSING


def fields_of(options: type) -> Iterator[Field]:
    """Every option of a class, in the order of ``--help``."""
    known = {field.name: field for field in fields(options)}
    for kind in options.__mro__:
        for name, annotation in inspect.get_annotations(kind).items():
            if (field := known.pop(name, None)) is not None:
                yield Field(name, annotation.__origin__, annotation.__metadata__[0], field.default)
