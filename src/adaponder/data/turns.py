"""Conversations to tokens: which of them are learned, and where each turn ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from adaponder.data.tokenizers import encoding


class ConversationEncoder:
    """Encodes the text that a chat template wrote, whose special tokens are special tokens.

    A turn begins with a token of its own: what comes before it is encoded as a server encodes the prompt. A turn ends
    with the first end token in it, as generation does; what the template writes after that is not learned. A
    conversation that ends with the assistant's turn ends it with the end token, if the template has not.
    """

    def __init__(self, tokenizer_json: str, end_id: int):
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.encode_special_tokens = False
        self.end_id = end_id

    def __call__(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, list[int]]:
        """(ids with one end token after them, (first token, tokens) of each part that is learned, one after another).

        ``spans`` are (first, last + 1) of the characters that the assistant wrote.
        """
        ids, starts, ends = self._encode(text, [])
        torn = sorted({first for first, _ in spans if ((starts < first) & (first < ends)).any()})
        if torn:
            ids, starts, ends = self._encode(text, torn)
        learned = np.zeros(len(ids) + 1, bool)
        ended = False
        for first, last in spans:
            turn = np.flatnonzero((starts >= first) & (starts < last))
            stops = np.flatnonzero(ids[turn] == self.end_id)
            ended = bool(len(stops))
            learned[turn[: stops[0] + 1] if ended else turn] = True
        if len(ids) and ids[-1] == self.end_id:
            learned = learned[:-1]
        else:
            ids = np.append(ids, self.end_id)
            learned[-1] = bool(spans) and spans[-1][1] == len(text) and not ended
        return ids, _runs(learned)

    def _encode(self, text: str, cuts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, first character of each, last + 1) of the text, encoded piece by piece where it is cut."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            with encoding():
                encoded = self.tokenizer.encode(text[start:stop], add_special_tokens=False)
            ids += encoded.ids
            offsets += [(first + start, last + start) for first, last in encoded.offsets]
        places = np.array(offsets, np.int64).reshape(-1, 2)
        return np.array(ids, np.int64), places[:, 0], places[:, 1]


def _runs(flags: np.ndarray) -> list[int]:
    """(first, length) of each run of true entries, one after another."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], 1).ravel().tolist()
