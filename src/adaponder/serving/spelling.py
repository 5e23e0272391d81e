"""The text and the bytes of single tokens, as OpenAI's ``logprobs`` spell them."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
        if not isinstance(piece, str):
            return Spelled(text, list(text.encode()))
        if match := _BYTE.fullmatch(piece):
            return _of_bytes(bytes([int(match[1], 16)]))
        letters = _byte_alphabet()
        if "\ufffd" in text and all(letter in letters for letter in piece):
            return _of_bytes(bytes(letters[letter] for letter in piece))
        if piece.startswith("▁"):
            # Decoding drops the space before a first word, and here every word is the first.
            text = piece.replace("▁", " ")
        return Spelled(text or piece, list((text or piece).encode()))


def _of_bytes(spelled: bytes) -> Spelled:
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{one:02x}" for one in spelled)
    return Spelled(text, list(spelled))


@cache
def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters and the bytes they stand for: printable Latin-1 as itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
