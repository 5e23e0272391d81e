"""The bytes of single tokens, which need not be whole characters."""

from __future__ import annotations

import re
from functools import cache

from adaponder.text.detokenizer import UNFINISHED

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(piece: str, decoded: str) -> bytes:
    """The UTF-8 bytes of a token by itself, of its entry in the vocabulary and of what decoding it alone gives."""
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    letters = _byte_alphabet()
    if UNFINISHED in decoded and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    if piece.startswith("▁"):
        # Decoding drops the space before a first word, and here every word is the first.
        return piece.replace("▁", " ").encode()
    return (decoded or piece).encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters and the bytes they stand for: printable Latin-1 as itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
