"""The text of single tokens; bytes that are no character by themselves are spelled out."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from tokenizers import Tokenizer


def token_texts(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    """The text of each id by itself, with incomplete characters as ``\\xe2`` and the space that stands before it."""
    decoded = tokenizer.decode_batch([[int(one)] for one in ids], skip_special_tokens=False)
    # A tokenizer of whole words has no decoder: decoding puts a space between any two.
    before = " " if tokenizer.decoder is None else ""
    return [
        before + _spelled(text, tokenizer.id_to_token(int(one)), int(one))
        for text, one in zip(decoded, ids, strict=True)
    ]


def _spelled(text: str, piece: str | None, number: int) -> str:
    if piece is None:
        return f"<{number}>"
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)]).decode("utf-8", "backslashreplace")
    letters = _byte_alphabet()
    if "\ufffd" in text and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece).decode("utf-8", "backslashreplace")
    if piece.startswith("▁"):
        # Decoding drops the space before a first word, and here every word is the first.
        return piece.replace("▁", " ")
    return text or piece


@cache
def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters and the bytes they stand for: printable Latin-1 as itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
