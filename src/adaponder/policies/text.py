"""One line of text for a policy, ``word:value[,value…][@threshold,…]``, taken apart; and numbers written into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaponder.errors import InputError


class PolicyLine(NamedTuple):
    """The parts of a line: ``uniform:0.5@0.1,0.2`` has word ``uniform``, value ``0.5``, thresholds ``0.1,0.2``."""

    text: str
    word: str
    value: str
    thresholds: str

    @classmethod
    def split(cls, text: str) -> PolicyLine:
        word, _, rest = text.partition(":")
        value, _, thresholds = rest.partition("@")
        return cls(text, word, value, thresholds)

    def number(self) -> float:
        """The value, where it must be one number."""
        values = self.numbers()
        if len(values) != 1:
            raise InputError(f"--policy {self.word}: takes one value, {len(values)} were given")
        return values[0]

    def whole_number(self) -> int:
        """The value, where it must be one whole number."""
        number = self.number()
        if not number.is_integer():
            raise InputError(f"--policy {self.text}: a whole number is needed, how often each token is read")
        return int(number)

    def numbers(self) -> tuple[float, ...]:
        """The value as a list of numbers."""
        return self._numbers(self.value)

    def number_or_numbers(self) -> float | tuple[float, ...]:
        """The value, where it may be one number for all gates or one for each."""
        values = self.numbers()
        return values[0] if len(values) == 1 else values

    def threshold_numbers(self) -> tuple[float, ...]:
        """What follows the ``@`` as a list of numbers; empty where nothing does."""
        return self._numbers(self.thresholds) if self.thresholds else ()

    def _numbers(self, part: str) -> tuple[float, ...]:
        try:
            return tuple(float(number) for number in part.split(","))
        except ValueError:
            raise InputError(f"--policy {self.text}: {part!r} is not a number or a list of numbers") from None


def number_text(value: float | Sequence[float]) -> str:
    """One number or several with commas between them, as text that reads back as the very same numbers."""
    # repr of a float is the shortest such text.
    return ",".join(repr(number) for number in (value if isinstance(value, Sequence) else (value,)))
