"""The text of one sequence as it is generated: whole characters, up to a stop string, token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from adaponder.text.detokenizer import Detokenizer
from adaponder.text.stops import StopStrings


class Piece(NamedTuple):
    """A part of the text and the token that completed it, counted from 0 after the prompt."""

    token: int
    text: str


class TextStream:
    """Turns generated token ids into pieces of text that can be shown at once.

    Args:
        tokenizer: any tokenizer of transformers.
        prompt: ids of the prompt: context, of which no text is returned.
        stops: strings to end before.
        include_stop: whether the stop string is a part of the text.
        silent: ids that have no text, as the one that ended the sequence.

    Attributes:
        stop: the stop string that ended the text; ``None`` before there is one.
        text: all text returned so far.
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
        self._returned: list[str] = []
        # Text of tokens that is held back, as it may be the beginning of a stop string.
        self._held: deque[Piece] = deque()

    @property
    def text(self) -> str:
        return "".join(self._returned)

    @property
    def settled(self) -> int:
        """So many tokens, from the first on, have all the text that they will ever have."""
        if self.stop is not None:
            return self._tokens
        waiting = self._tokens - self._decoder.waiting
        return min(self._held[0].token, waiting) if self._held else waiting

    def add(self, token: int) -> list[Piece]:
        """The pieces that can be shown now; none after a stop string."""
        self._tokens += 1
        if token in self._silent or self.stop is not None:
            return []
        return self._pass_on(self._decoder.add(token))

    def finish(self) -> list[Piece]:
        """The rest of the text, at the end of the sequence."""
        if self.stop is not None:
            return []
        pieces = self._pass_on(self._decoder.flush())
        return pieces if self.stop is not None else pieces + self._release(self._stops.flush())

    def _pass_on(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._held.append(Piece(self._tokens - 1, text))
        checked = self._stops.add(text)
        self.stop = checked.stop
        return self._release(checked.text)

    def _release(self, text: str) -> list[Piece]:
        """``text``, which is what the held pieces begin with, as pieces."""
        pieces, left = [], len(text)
        while left:
            piece = self._held.popleft()
            if len(piece.text) > left:
                self._held.appendleft(Piece(piece.token, piece.text[left:]))
                piece = Piece(piece.token, piece.text[:left])
            pieces.append(piece)
            left -= len(piece.text)
        self._returned += [piece.text for piece in pieces]
        return pieces
