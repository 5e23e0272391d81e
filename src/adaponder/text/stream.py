"""Decodes one sequence while it is generated: whole characters, up to a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from adaponder.errors import InputError, shown
from adaponder.text.detokenizer import Detokenizer

MOST_STOPS = 64
LONGEST_STOP = 1000


class Piece(NamedTuple):
    """Text, and the index of the token that completed it, counted from 0 after the prompt."""

    token: int
    text: str


class TextStream:
    """Turns generated token ids into pieces of text that can be shown at once.

    The text ends before the stop string that ends first; of several that end there, the longest counts. Text that may
    be the beginning of a stop string is held back.

    Args:
        tokenizer: any tokenizer of transformers.
        prompt: token ids of the prompt; they are context and produce no text.
        stops: strings that end the text.
        silent: ids without text, such as end-of-text ids.

    Attributes:
        stop: the stop string that ended the text, or ``None``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] = (),
        *,
        stops: Sequence[str] = (),
        silent: Collection[int] = (),
    ):
        self.stop: str | None = None
        self._decoder = Detokenizer(tokenizer, prompt)
        self._stops = check_stops(stops)
        self._prefixes = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._silent = frozenset(silent)
        self._tokens = 0
        self._held: deque[Piece] = deque()

    @property
    def settled(self) -> int:
        """Number of leading tokens whose text is final."""
        if self.stop is not None:
            return self._tokens
        complete = self._tokens - self._decoder.waiting
        return min(self._held[0].token, complete) if self._held else complete

    def add(self, token: int) -> list[Piece]:
        """Returns the pieces that can be shown now; none after a stop string."""
        self._tokens += 1
        if token in self._silent or self.stop is not None:
            return []
        return self._check(self._decoder.add(token))

    def finish(self) -> list[Piece]:
        """Returns the rest of the text, at the end of the sequence."""
        if self.stop is not None:
            return []
        pieces = self._check(self._decoder.flush())
        return pieces if self.stop is not None else pieces + self._release(sum(len(text) for _, text in self._held))

    def _check(self, text: str) -> list[Piece]:
        """Adds text and returns the pieces that no longer can belong to a stop string."""
        if not text:
            return []
        self._held.append(Piece(self._tokens - 1, text))
        text = "".join(piece.text for piece in self._held)
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            _, start, self.stop = min(ends)
            return self._release(start)
        lengths = range(min(self._longest, len(text)), 0, -1)
        keep = next((length for length in lengths if text[-length:] in self._prefixes), 0)
        return self._release(len(text) - keep)

    def _release(self, left: int) -> list[Piece]:
        """Removes the first ``left`` characters of the held text and returns them as pieces."""
        pieces = []
        while left:
            piece = self._held.popleft()
            if len(piece.text) > left:
                self._held.appendleft(Piece(piece.token, piece.text[left:]))
                piece = Piece(piece.token, piece.text[:left])
            pieces.append(piece)
            left -= len(piece.text)
        return pieces


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Returns the distinct stop strings; raises :class:`InputError` on too many, empty or too long ones."""
    if isinstance(stops, str) or len(stops) > MOST_STOPS:
        raise InputError(f"stop={shown(stops)} must be a list of at most {MOST_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= LONGEST_STOP:
            raise InputError(f"stop={shown(stop)} must be a string of 1 to {LONGEST_STOP} characters")
    return tuple(dict.fromkeys(stops))
