"""The pieces of text that tokens complete, joined, are the decoded text of all tokens.

What a token spells depends on its neighbours: a character may have several tokens, and a word at the beginning loses
its space in some vocabularies. So each token is decoded together with the few before it, never with all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# What a decoder makes of bytes that are no character, or not yet one.
UNFINISHED = "\ufffd"
# A character has at most 4 bytes, a token at least one: of tokens that end within a character, 3 can be a part of it.
_OF_A_CHARACTER = 3
_MOST_WAITING = 12


class Detokenizer:
    """Decodes one sequence, token by token, in constant time for each on average.

    Where tokens spell bytes that are no text, the pieces are those of the bytes around; a vocabulary that falls back to
    single bytes decodes a whole run of such bytes otherwise, and no piece that was returned could follow it.

    Args:
        tokenizer: any tokenizer of transformers.
        before: ids that the sequence begins with, of which no text is returned: a prompt. A character that it ends
            within is returned with the token that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self._decode_ids = _decoder_of(tokenizer)
        # The last tokens: the text of ids[:returned] has been returned, or is the prompt's.
        ids = list(before)
        self._begun = self._unfinished(ids)  # the last ids of the prompt, until something is returned
        whole = len(ids) - self._begun
        self._ids = self._context(ids[:whole]) + ids[whole:]
        self._returned = len(self._ids)

    @property
    def waiting(self) -> int:
        """How many of the last tokens have no text yet: they are a part of an unfinished character."""
        return len(self._ids) - self._returned

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(UNFINISHED):
            waiting = len(self._ids) - self._returned
            return "" if waiting < _MOST_WAITING else self._settle()
        return self._return(len(self._ids), text)

    def flush(self) -> str:
        """The rest at the end of the sequence: what is left of an unfinished character."""
        if self._returned == len(self._ids):
            return ""
        return self._return(len(self._ids), self._decode(self._ids))

    def _settle(self) -> str:
        """The text of waiting tokens that later ones cannot change: bytes that are no text, and go on and on."""
        end = len(self._ids) - _OF_A_CHARACTER
        return self._return(end, self._decode(self._ids[:end]))

    def _return(self, end: int, text: str) -> str:
        """The part of ``text``, which is that of ``ids[:end]``, that was not returned before."""
        shown = self._decode(self._ids[: self._returned])
        completes = self._begun and not text.startswith(shown)
        if completes:
            shown = self._decode(self._ids[: self._returned - self._begun])
        self._begun = 0
        piece = text[len(shown) :] if text.startswith(shown) else self._decode(self._ids[self._returned : end])
        if piece and not completes:  # it is context enough for what comes next
            self._ids, self._returned = self._ids[self._returned :], end - self._returned
        else:
            kept = self._context(self._ids[:end])
            self._ids, self._returned = kept + self._ids[end:], len(kept)
        return piece

    def _unfinished(self, ids: list[int]) -> int:
        """How many of the last of ``ids`` are a part of a character that they do not finish."""
        for count in range(min(_OF_A_CHARACTER, len(ids)) + 1):
            if not self._decode(self._context(ids[: len(ids) - count])).endswith(UNFINISHED):
                return count
        return 0

    def _context(self, ids: list[int]) -> list[int]:
        """The last of ``ids``, a few, beginning between two characters where they are text."""
        starts = [max(0, len(ids) - _MOST_WAITING - more) for more in range(_OF_A_CHARACTER + 1)]
        whole = (start for start in starts if not self._decode(ids[start:]).startswith(UNFINISHED))
        return ids[next(whole, starts[0]) :]

    def _decode(self, ids: list[int]) -> str:
        return self._decode_ids(ids) if ids else ""


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Decodes ids as ``tokenizer.decode`` does; where nothing stands between, by the library below it, sooner."""
    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        return partial(cast(Any, tokenizer).backend_tokenizer.decode, skip_special_tokens=False)
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> list[str]:
    """The text of each token; a character of several tokens belongs to the token that completes it."""
    decoder = Detokenizer(tokenizer)
    texts = [decoder.add(token) for token in tokens]
    if texts:
        texts[-1] += decoder.flush()
    return texts
