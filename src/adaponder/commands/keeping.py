"""Messages of an interrupted command: what it has kept, and how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.text import Text

from adaponder.evaluation.kept import Kept
from adaponder.terminal import console, errors


@contextmanager
def keeping(kept: Kept | None, part: str) -> Iterator[None]:
    """Wraps a measurement that saves each finished ``part`` in ``kept`` (``None``: there is no ``--out``).

    Prints how many parts an earlier call has left and, when interrupted, how many are kept.
    """
    if kept is not None and len(kept):
        console.print(Text(f"going on after an interruption: {_finished(kept, part)} in {kept.folder}"))
    try:
        yield
    except KeyboardInterrupt:
        if kept is None:
            _say(f"nothing is kept; with --out DIR, each finished {part} is")
        elif not len(kept):
            _say(f"nothing is kept: no {part} was finished")
        else:
            _say(f"{_finished(kept, part)} kept in {kept.folder}; the same command goes on from there")
        raise


@contextmanager
def saying_if_interrupted(sentence: str) -> Iterator[None]:
    """Prints ``sentence`` if the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        _say(sentence)
        raise


def _finished(kept: Kept, part: str) -> str:
    """Subject and verb of a sentence: "1 finished row is", "2 finished rows are"."""
    count = len(kept)
    return f"1 finished {part} is" if count == 1 else f"{count} finished {part}s are"


def _say(sentence: str) -> None:
    errors.print(Text(f"\n{sentence}"), soft_wrap=True)
