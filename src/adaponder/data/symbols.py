"""The fixed vocabulary of generated puzzles: one word, one token, the same ids in every prepared folder."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

SYMBOLS = "symbols"
UNKNOWN = "<unknown>"
MOST_LETTERS, MOST_NUMBERS = 24, 40
LETTERS = tuple(chr(ord("a") + index) for index in range(MOST_LETTERS))
# A word's place is its id; the end token follows the last one.
WORDS = (
    *(UNKNOWN, "|", "=", ".", "+", "-", "*"),
    *LETTERS,
    *(letter.upper() for letter in LETTERS),
    *map(str, range(MOST_NUMBERS)),
)
END_ID = len(WORDS)
_ID_OF = {word: index for index, word in enumerate(WORDS)}


def symbol_tokenizer(end_token: str) -> Tokenizer:
    """Splits at white space; a word outside the vocabulary becomes ``<unknown>``. Only ``end_token`` is special."""
    tokenizer = Tokenizer(models.WordLevel(_ID_OF, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([end_token])
    return tokenizer


def ids_of(words: Iterable[str]) -> np.ndarray:
    """``int64[words]``: what the tokenizer makes of words of the vocabulary."""
    return np.array([_ID_OF[word] for word in words], np.int64)


def words_of(ids: np.ndarray) -> list[str]:
    """The words of ``ids``, none of which may be the end token; ids beyond the vocabulary are ``<unknown>``."""
    return [WORDS[index] if 0 <= index < END_ID else UNKNOWN for index in ids.tolist()]
