"""What can go wrong, by name: each error says which field is at fault and what cures it."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class AdaPonderError(ValueError):
    """The base of every error this package raises on purpose."""


class ConfigError(AdaPonderError):
    """A configuration that no model can be built from."""


class BackboneError(AdaPonderError):
    """A Hugging Face decoder that cannot be read again and again, and why."""


class CacheError(AdaPonderError):
    """A cache that does not belong to this model, this batch or this run."""


class CheckpointError(AdaPonderError):
    """A checkpoint that is incomplete, foreign or unsafe to load."""


class InputError(AdaPonderError):
    """An argument, an option or a file that cannot be honoured."""


class TrainingError(AdaPonderError):
    """A run that cannot start or must not go on."""


class EvaluationError(AdaPonderError):
    """A measurement or a generation that went wrong: what it gave must not be used."""


def in_one_line(problem: BaseException) -> str:
    """What a library says went wrong, without its line breaks and cut where it goes on for ever."""
    said = " ".join(str(problem).split()) or type(problem).__name__
    return said if len(said) <= 400 else said[:400] + " …"


def shown(value: Any) -> str:
    """A value as an error shows it: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of too many digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def choice(value: Any, words: Sequence[str]) -> str:
    """Returns ``one of a, b, …`` for an error about ``value``, with the word that is spelled most alike."""
    hint = did_you_mean(value, words) if isinstance(value, str) and len(words) > 3 else ""
    return f"one of {', '.join(words)}{hint}"


def did_you_mean(word: str, words: Iterable[str], prefix: str = "") -> str:
    """``; did you mean …?`` with the one of ``words`` that is spelled most alike; empty where none is like it."""
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
