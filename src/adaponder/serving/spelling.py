"""The text and the bytes of single tokens, as OpenAI's ``logprobs`` spell them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from adaponder.text.token_bytes import token_bytes


class Spelled(NamedTuple):
    """A token by itself; one that is no whole text is written ``bytes:\\xe2\\x80``."""

    text: str
    bytes: list[int]


class Spelling:
    """Spells token ids, each by itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._of = lru_cache(maxsize=1 << 16)(self._spell)

    def __call__(self, token: int) -> Spelled:
        return self._of(token)

    def _spell(self, token: int) -> Spelled:
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        piece = self._tokenizer.convert_ids_to_tokens(token)
        spelled = token_bytes(piece, text) if isinstance(piece, str) else text.encode()
        try:
            return Spelled(spelled.decode(), list(spelled))
        except UnicodeDecodeError:
            return Spelled("bytes:" + "".join(f"\\x{one:02x}" for one in spelled), list(spelled))
