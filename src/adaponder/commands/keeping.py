"""A command that is interrupted says what it keeps and how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.text import Text

from adaponder.evaluation.kept import Kept
from adaponder.terminal import console, errors


@contextmanager
def keeping(kept: Kept | None, parts: str) -> Iterator[None]:
    """Around a measurement that saves its ``parts`` (a plural) in ``kept``, or nowhere without ``--out``."""
    before = 0 if kept is None else len(kept)
    if kept is not None and before:
        console.print(Text(f"going on after an interruption: {before} finished {parts} are in {kept.folder}"))
    try:
        yield
    except KeyboardInterrupt:
        errors.print(Text(_farewell(kept, parts)), soft_wrap=True)
        raise


@contextmanager
def saying_if_interrupted(sentence: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        errors.print(Text(f"\ninterrupted: {sentence}"), soft_wrap=True)
        raise


def _farewell(kept: Kept | None, parts: str) -> str:
    if kept is None:
        return f"\ninterrupted: nothing is kept; with --out DIR, finished {parts} are"
    if not len(kept):
        return f"\ninterrupted before the first of its {parts} was finished: nothing is kept"
    return f"\ninterrupted: {len(kept)} finished {parts} are in {kept.folder}; the same command goes on from there"
