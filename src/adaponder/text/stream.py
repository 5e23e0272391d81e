"""Turns the tokens of one sequence into text as they are generated: whole characters, up to a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from adaponder.text.detokenizer import Detokenizer
from adaponder.text.stops import StopStrings


class Piece(NamedTuple):
    """Text, and the index of the token that completed it, counted from 0 after the prompt."""

    token: int
    text: str


class TextStream:
    """Turns generated token ids into pieces of text that can be shown at once.

    Args:
        tokenizer: any tokenizer of transformers.
        prompt: token ids of the prompt; they are context and produce no text.
        stops: strings that end the text.
        include_stop: whether the text includes the stop string.
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
        include_stop: bool = False,
        silent: Collection[int] = (),
    ):
        self.stop: str | None = None
        self._decoder = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops, include=include_stop)
        self._silent = frozenset(silent)
        self._tokens = 0
        self._held: deque[Piece] = deque()  # text that may be the beginning of a stop string

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
        return pieces if self.stop is not None else pieces + self._release(self._stops.flush())

    def _check(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._held.append(Piece(self._tokens - 1, text))
        checked = self._stops.add(text)
        self.stop = checked.stop
        return self._release(checked.text)

    def _release(self, text: str) -> list[Piece]:
        """Returns ``text``, with which the held pieces begin, as pieces."""
        pieces, left = [], len(text)
        while left:
            piece = self._held.popleft()
            if len(piece.text) > left:
                self._held.appendleft(Piece(piece.token, piece.text[left:]))
                piece = Piece(piece.token, piece.text[:left])
            pieces.append(piece)
            left -= len(piece.text)
        return pieces
