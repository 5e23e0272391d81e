"""The text of single tokens; bytes that are no character by themselves are spelled out."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from adaponder.text.token_bytes import token_bytes


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
    return f"<{number}>" if piece is None else token_bytes(piece, text).decode("utf-8", "backslashreplace")
