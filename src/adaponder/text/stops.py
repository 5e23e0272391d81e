"""Cuts streamed text at stop strings; text that may be the beginning of one is held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaponder.errors import InputError, shown

MOST_STOPS = 64
LONGEST_STOP = 1000


class CheckedText(NamedTuple):
    """Text that can be shown, and the stop string that followed it, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Passes text on up to the stop string that ends first; of several that end there, the longest.

    Args:
        strings: stop strings, none of them empty.
        include: whether the text includes the stop string.
    """

    def __init__(self, strings: Sequence[str] = (), *, include: bool = False):
        self.strings, self.include = check_stops(strings), include
        self._prefixes = {string[:length] for string in self.strings for length in range(1, len(string))}
        self._longest = max((len(string) for string in self.strings), default=1) - 1
        self._held = ""

    def add(self, piece: str) -> CheckedText:
        """Returns the new text that can be shown. Nothing may be added after a stop string."""
        text = self._held + piece
        ends = [(start + len(string), start, string) for string in self.strings if (start := text.find(string)) >= 0]
        if ends:
            end, start, string = min(ends)
            self._held = ""
            return CheckedText(text[: end if self.include else start], string)
        longest = min(self._longest, len(text))
        keep = next((length for length in range(longest, 0, -1) if text[-length:] in self._prefixes), 0)
        self._held = text[len(text) - keep :]
        return CheckedText(text[: len(text) - keep])

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def check_stops(strings: Sequence[str]) -> tuple[str, ...]:
    """Returns the distinct stop strings; raises :class:`InputError` on too many, empty or too long ones."""
    if isinstance(strings, str) or len(strings) > MOST_STOPS:
        raise InputError(f"stop={shown(strings)} must be a list of at most {MOST_STOPS} strings")
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= LONGEST_STOP:
            raise InputError(f"stop={shown(string)} must be a string of 1 to {LONGEST_STOP} characters")
    return tuple(dict.fromkeys(strings))
