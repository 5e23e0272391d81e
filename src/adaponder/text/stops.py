"""Text up to a stop string, however it is cut into pieces: what may be the beginning of one is held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaponder.errors import InputError, shown

MOST_STOPS = 64
LONGEST_STOP = 1000


class Checked(NamedTuple):
    """Text that no stop string can begin in, and the stop string that followed it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Passes text on up to the stop string that ends first; of several that end there, the longest.

    Args:
        strings: none of them empty.
        include: whether the stop string itself is passed on too.
    """

    def __init__(self, strings: Sequence[str] = (), *, include: bool = False):
        self.strings, self.include = check_stops(strings), include
        # Every beginning of a stop string, the whole of it left out.
        self._beginnings = {string[:length] for string in self.strings for length in range(1, len(string))}
        self._longest = max((len(string) for string in self.strings), default=1) - 1
        self._held = ""

    def add(self, piece: str) -> Checked:
        """What can be shown of the text so far, and was not before; nothing may be added after a ``stop``."""
        text = self._held + piece
        ends = [(start + len(string), start, string) for string in self.strings if (start := text.find(string)) >= 0]
        if ends:
            end, start, string = min(ends)
            self._held = ""
            return Checked(text[: end if self.include else start], string)
        keep = next(
            (length for length in range(min(self._longest, len(text)), 0, -1) if text[-length:] in self._beginnings), 0
        )
        self._held = text[len(text) - keep :]
        return Checked(text[: len(text) - keep])

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def check_stops(strings: Sequence[str]) -> tuple[str, ...]:
    """The stop strings, each once; raises where one of them is none."""
    if isinstance(strings, str) or len(strings) > MOST_STOPS:
        raise InputError(f"stop={shown(strings)}: a list of at most {MOST_STOPS} strings is needed")
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= LONGEST_STOP:
            raise InputError(f"stop={shown(string)}: a string of 1 to {LONGEST_STOP} characters is needed")
    return tuple(dict.fromkeys(strings))
