"""Defines the errors that this package raises, whose messages name the field and the cure."""

import difflib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

# The longest error message; names from a checkpoint may be of any length and number.
MOST_CHARACTERS = 500
# Held while standard error is redirected, which two threads cannot do at once.
_redirected = threading.Lock()


class AdaPonderError(ValueError):
    """The base class of all errors that this package raises; long messages are shortened."""

    def __init__(self, message: str = ""):
        super().__init__(shortened(message))


class ConfigError(AdaPonderError):
    """A config from which no model can be built."""


class BackboneError(AdaPonderError):
    """A Hugging Face decoder that the recurrence cannot wrap."""


class CacheError(AdaPonderError):
    """A cache that was filled by another model, for another batch or with other settings."""


class CheckpointError(AdaPonderError):
    """A checkpoint that is incomplete, foreign or unsafe to load."""


class InputError(AdaPonderError):
    """An argument, an option or a file that cannot be used."""


class TrainingError(AdaPonderError):
    """A training run that cannot start or must stop."""


class EvaluationError(AdaPonderError):
    """A failed measurement or generation, whose result must not be used."""


def is_panic(problem: BaseException) -> bool:
    """Returns whether ``problem`` is a panic of a native library written in Rust, such as tokenizers."""
    return type(problem).__name__ == "PanicException"


@contextmanager
def panics_as_errors(what: str, *, alone: bool = False) -> Iterator[None]:
    """Context manager that turns a native library's panic, which is no ``Exception``, into an :class:`InputError`.

    The error message begins with ``what``. If there is only one thread, or if ``alone`` is set, standard error is
    discarded during the block, so that the library prints no backtrace; other threads' output there is lost too.
    """
    stderr = None
    quiet = (alone or threading.active_count() == 1) and _redirected.acquire(blocking=False)
    try:
        if quiet:
            with suppress(OSError):  # standard error is closed
                stderr = os.dup(2)
        if stderr is not None:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 2)
        yield
    except BaseException as problem:
        if not is_panic(problem):
            raise
        raise InputError(f"{what}: {in_one_line(problem)}") from None
    finally:
        if stderr is not None:
            os.dup2(stderr, 2)
            os.close(stderr)
        if quiet:
            _redirected.release()


def in_one_line(problem: BaseException) -> str:
    """Returns the message of a library's error in one line of at most 400 characters."""
    return shortened(" ".join(str(problem).split()) or type(problem).__name__, 400)


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Cuts a text to ``most`` characters by removing its middle: errors begin with the fault and end with the cure."""
    first = most * 2 // 3
    return text if len(text) <= most else f"{text[:first]} … {text[first + 3 - most :]}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Joins the first ``most`` names by commas and adds how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def shown(value: Any) -> str:
    """Returns ``repr(value)`` for an error message, shortened to at most 60 characters."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of too many digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def choice(value: Any, words: Sequence[str]) -> str:
    """Returns ``one of a, b, …`` for an error about ``value``, with a spelling hint if there are more than three."""
    hint = did_you_mean(value, words) if isinstance(value, str) and len(words) > 3 else ""
    return f"one of {', '.join(words)}{hint}"


def did_you_mean(word: str, words: Iterable[str], prefix: str = "") -> str:
    """Returns ``; did you mean …?`` with the word of the closest spelling, or an empty string."""
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
