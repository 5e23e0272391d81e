"""Decodes a sequence while it is generated: whole characters, up to a stop string.

The text of a token depends on its neighbours: a character may take several tokens, and with some vocabularies the
first word loses its leading space. So each token is decoded together with the few tokens before it, and the joined
pieces equal the decoded text of all tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from adaponder.errors import EvaluationError, InputError, in_one_line, is_panic, shown

MOST_STOPS = 64
LONGEST_STOP = 1000
# What a decoder returns for bytes that are not, or not yet, a character.
UNFINISHED = "\ufffd"
# The most tokens of an unfinished character, which has at most 3 of its 4 bytes.
_OF_A_CHARACTER = 3
# The most tokens held back in a run of invalid bytes, and the least number of earlier tokens to decode as context.
_MOST_WAITING = 12


class Detokenizer:
    """Decodes one sequence token by token, in constant time per token on average.

    Invalid UTF-8 bytes are decoded together with a few neighbours only. With byte fallback, a long run of them might
    decode differently as a whole, but text that was already returned cannot change.

    ``before`` are the prompt's token ids, whose text is not returned. If the prompt ends within a character, the whole
    character is returned with the token that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self._decode_ids = decoder_of(tokenizer)
        ids = list(before)
        self._begun = self._unfinished(ids)  # prompt tokens of an unfinished character, until some text is returned
        # The latest tokens; the text of the first ``_returned`` has been returned, or belongs to the prompt.
        whole = len(ids) - self._begun
        self._ids = self._context(ids[:whole]) + ids[whole:]
        self._returned = len(self._ids)

    @property
    def waiting(self) -> int:
        """The number of trailing tokens that have no text yet, because their character is unfinished."""
        return len(self._ids) - self._returned

    def add(self, token: int) -> str:
        """Returns the text that this token completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(UNFINISHED):
            return self._return(len(self._ids), text)
        if self.waiting < _MOST_WAITING:
            return ""
        # A long run of invalid bytes: tokens before the last 3 cannot be part of an unfinished character.
        end = len(self._ids) - _OF_A_CHARACTER
        return self._return(end, self._decode(self._ids[:end]))

    def flush(self) -> str:
        """Returns the text of the unfinished character at the end of the sequence, if any."""
        return self._return(len(self._ids), self._decode(self._ids)) if self.waiting else ""

    def _return(self, end: int, text: str) -> str:
        """Returns what is new in ``text``, the decoded ids up to ``end``; drops ids that later tokens do not need."""
        returned = self._decode(self._ids[: self._returned])
        completes = self._begun and not text.startswith(returned)
        if completes:
            returned = self._decode(self._ids[: self._returned - self._begun])
        self._begun = 0
        piece = text[len(returned) :] if text.startswith(returned) else self._decode(self._ids[self._returned : end])
        if piece and not completes:  # the piece is enough context for the next tokens
            self._ids, self._returned = self._ids[self._returned :], end - self._returned
        else:
            context = self._context(self._ids[:end])
            self._ids, self._returned = context + self._ids[end:], len(context)
        return piece

    def _unfinished(self, ids: list[int]) -> int:
        """Returns how many of the last ids belong to an unfinished character."""
        for count in range(min(_OF_A_CHARACTER, len(ids)) + 1):
            if not self._decode(self._context(ids[: len(ids) - count])).endswith(UNFINISHED):
                return count
        return 0

    def _context(self, ids: list[int]) -> list[int]:
        """Returns the last few ids, from a character boundary on if there is one."""
        starts = [max(0, len(ids) - _MOST_WAITING - more) for more in range(_OF_A_CHARACTER + 1)]
        whole = (start for start in starts if not self._decode(ids[start:]).startswith(UNFINISHED))
        return ids[next(whole, starts[0]) :]

    def _decode(self, ids: list[int]) -> str:
        return self._decode_ids(ids) if ids else ""


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Returns the decode function of the tokenizer's fast backend, or the tokenizer's own if its class overrides it.

    The function raises :class:`EvaluationError` if the tokenizer panics.
    """
    decode = partial(cast(Any, tokenizer).decode, clean_up_tokenization_spaces=False)
    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        decode = partial(cast(Any, tokenizer).backend_tokenizer.decode, skip_special_tokens=False)

    def decode_or_raise(ids: list[int]) -> str:
        try:
            return decode(ids)
        except BaseException as problem:
            if not is_panic(problem):
                raise
            raise EvaluationError(f"the tokenizer cannot decode its tokens: {in_one_line(problem)}") from None

    return decode_or_raise


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> list[str]:
    """Returns the text of each token; a character of several tokens belongs to the token that completes it."""
    decoder = Detokenizer(tokenizer)
    texts = [decoder.add(token) for token in tokens]
    if texts:
        texts[-1] += decoder.flush()
    return texts


class Piece(NamedTuple):
    """Text, and the index of the token that completed it, counted from 0 after the prompt."""

    token: int
    text: str


class TextStream:
    """Turns generated token ids into pieces of text that can be shown immediately.

    The text ends before the stop string that is completed first; if several end at the same place, before the longest.
    Text that may be the beginning of a stop string is held back.

    ``prompt`` ids are only context for decoding; ``silent`` ids, such as end-of-text ids, have no text. The attribute
    ``stop`` is the stop string that ended the text, or ``None``.
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
        """The number of leading tokens whose text is final: neither incomplete nor held back."""
        if self.stop is not None:
            return self._tokens
        complete = self._tokens - self._decoder.waiting
        return min(self._held[0].token, complete) if self._held else complete

    def add(self, token: int) -> list[Piece]:
        """Adds a token; returns the pieces that can be shown now (none after a stop string)."""
        self._tokens += 1
        if token in self._silent or self.stop is not None:
            return []
        return self._check(self._decoder.add(token))

    def finish(self) -> list[Piece]:
        """Returns the text still held back, at the end of the sequence."""
        if self.stop is not None:
            return []
        pieces = self._check(self._decoder.flush())
        return pieces if self.stop is not None else pieces + self._release(sum(len(text) for _, text in self._held))

    def _check(self, text: str) -> list[Piece]:
        """Adds text to the text held back; returns the pieces that cannot be part of a stop string any more."""
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
        """Removes the first ``left`` characters from the text held back and returns them as pieces."""
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
