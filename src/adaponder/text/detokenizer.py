"""Decodes a sequence token by token: the pieces, joined, are the decoded text of all tokens.

The text of a token depends on its neighbours: a character may have several tokens, and a word at the beginning loses
its space in some vocabularies. So each token is decoded together with the few before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# What a decoder returns for bytes that are not, or not yet, a character.
UNFINISHED = "\ufffd"
# A character has at most 4 bytes and a token at least one: of tokens that end within a character, 3 can belong to it.
_OF_A_CHARACTER = 3
_MOST_WAITING = 12


class Detokenizer:
    """Decodes one sequence, in constant time per token on average.

    Bytes that are not valid UTF-8 are decoded with their neighbours only. A vocabulary with byte fallback decodes a
    whole run of such bytes differently, which pieces that were already returned could not follow.

    Args:
        tokenizer: any tokenizer of transformers.
        before: token ids of the prompt, whose text is not returned. A character that the prompt ends within is returned
            with the token that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self._decode_ids = _decoder_of(tokenizer)
        # The last tokens: the text of ids[:returned] has been returned, or belongs to the prompt.
        ids = list(before)
        self._begun = self._unfinished(ids)  # prompt tokens of an unfinished character, until some text is returned
        whole = len(ids) - self._begun
        self._ids = self._context(ids[:whole]) + ids[whole:]
        self._returned = len(self._ids)

    @property
    def waiting(self) -> int:
        """Number of last tokens without text yet, because their character is unfinished."""
        return len(self._ids) - self._returned

    def add(self, token: int) -> str:
        """Returns the text that this token completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(UNFINISHED):
            return self._return(len(self._ids), text)
        if self.waiting < _MOST_WAITING:
            return ""
        # A long run of bytes that are not text: all but the last 3 can no longer become a character.
        end = len(self._ids) - _OF_A_CHARACTER
        return self._return(end, self._decode(self._ids[:end]))

    def flush(self) -> str:
        """Returns the rest at the end of the sequence: the text of an unfinished character."""
        return self._return(len(self._ids), self._decode(self._ids)) if self.waiting else ""

    def _return(self, end: int, text: str) -> str:
        """Returns the new part of ``text``, which is the text of ``ids[:end]``, and drops tokens no longer needed."""
        shown = self._decode(self._ids[: self._returned])
        completes = self._begun and not text.startswith(shown)
        if completes:
            shown = self._decode(self._ids[: self._returned - self._begun])
        self._begun = 0
        piece = text[len(shown) :] if text.startswith(shown) else self._decode(self._ids[self._returned : end])
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
        """Returns the last few ids, beginning at a character boundary where there is one."""
        starts = [max(0, len(ids) - _MOST_WAITING - more) for more in range(_OF_A_CHARACTER + 1)]
        whole = (start for start in starts if not self._decode(ids[start:]).startswith(UNFINISHED))
        return ids[next(whole, starts[0]) :]

    def _decode(self, ids: list[int]) -> str:
        return self._decode_ids(ids) if ids else ""


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Returns a function equal to ``tokenizer.decode``: the faster one of the backend where nothing overrides it."""
    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        return partial(cast(Any, tokenizer).backend_tokenizer.decode, skip_special_tokens=False)
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> list[str]:
    """Returns the text of each token; a character of several tokens belongs to the token that completes it."""
    decoder = Detokenizer(tokenizer)
    texts = [decoder.add(token) for token in tokens]
    if texts:
        texts[-1] += decoder.flush()
    return texts
