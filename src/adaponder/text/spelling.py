"""Finds the text and bytes of single tokens, which need not be whole characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from adaponder.text.stream import UNFINISHED, decoder_of

_BYTE_ENTRY = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelled(NamedTuple):
    """Text and bytes of a token. Bytes that are not UTF-8 have a text like ``bytes:\\xe2\\x80``, as in OpenAI's API."""

    text: str
    bytes: list[int]


class TokenSpeller:
    """Callable that returns the :class:`Spelled` text and bytes of a token id, with a cache."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._decode = tokenizer, decoder_of(tokenizer)
        self._spell = lru_cache(maxsize=1 << 16)(self._spell_once)

    def __call__(self, token: int) -> Spelled:
        return self._spell(token)

    def _spell_once(self, token: int) -> Spelled:
        decoded = self._decode([token])
        entry = self._tokenizer.convert_ids_to_tokens(token)
        spelled = token_bytes(entry, decoded) if isinstance(entry, str) else decoded.encode()
        try:
            return Spelled(spelled.decode(), list(spelled))
        except UnicodeDecodeError:
            return Spelled("bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled), list(spelled))


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Returns each id's text with its leading space; bytes of a part of a character are written as ``\\xe2``.

    An id that is not in the vocabulary is written as ``<7>``.
    """
    tokens = [int(token) for token in ids]
    decoded = tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)
    # A tokenizer of whole words has no decoder, and its decoding puts a space between any two tokens.
    space = " " if tokenizer.decoder is None else ""
    texts = []
    for token, text in zip(tokens, decoded, strict=True):
        entry = tokenizer.id_to_token(token)
        spelled = f"<{token}>" if entry is None else token_bytes(entry, text).decode("utf-8", "backslashreplace")
        texts.append(space + spelled)
    return texts


def unknown_id(tokenizer: Tokenizer, end_id: int | None) -> int | None:
    """Returns the id of the unknown token (UNK); ``None`` if there is none, or if it is the end token ``end_id``."""
    model = json.loads(tokenizer.to_str())["model"]
    token = model.get("unk_token")
    unknown = model.get("unk_id") if token is None else tokenizer.token_to_id(token)
    return None if unknown == end_id else unknown  # byte-level vocabularies may declare the end token as UNK, unused


def token_bytes(entry: str, decoded: str) -> bytes:
    """Returns the UTF-8 bytes of a token, given its vocabulary entry and the text decoded from it alone."""
    if match := _BYTE_ENTRY.fullmatch(entry):
        return bytes([int(match[1], 16)])
    letters = _byte_alphabet()
    if UNFINISHED in decoded and all(letter in letters for letter in entry):
        return bytes(letters[letter] for letter in entry)
    if entry.startswith("▁"):
        # Decoding drops the space before the first word of a text, and a token decoded alone is the first.
        return entry.replace("▁", " ").encode()
    return (decoded or entry).encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Maps the characters of byte-level BPE to bytes: printable Latin-1 to itself, U+0100 … to the other bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}
