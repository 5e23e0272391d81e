"""Writes the documents of one split as shards: their tokens end to end, and a table of where each document lies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from adaponder.data.manifest import DOCS, DTYPES, MASKED_DOCS, DataError, Shard
from adaponder.files import write_whole


class ShardWriter:
    """Gathers the documents of one split and writes them as whole shards."""

    def __init__(self, folder: Path, *, dtype: str, shard_tokens: int, number: int = 0, masked: bool = False):
        self.schema = MASKED_DOCS if masked else DOCS
        self.folder, self.dtype, self.shard_tokens, self.number = folder, DTYPES[dtype], shard_tokens, number
        self.tokens = 0
        self._parts: list[np.ndarray] = []
        self._table: list[tuple[int, int, str, int, int, Sequence[int]]] = []

    @property
    def full(self) -> bool:
        """A shard is closed by the document that fills it: no document is cut, none waits."""
        return self.tokens >= self.shard_tokens

    def add(
        self, tokens: np.ndarray, *, source: str, utf8_bytes: int, content_hash: int, learned: Sequence[int] = ()
    ) -> None:
        """Adds a document; ``learned`` is (first token, tokens) of each part that is learned, for conversations."""
        self._table.append((self.tokens, len(tokens), source, utf8_bytes, content_hash, learned))
        self._parts.append(tokens)
        self.tokens += len(tokens)

    def write(self) -> Shard:
        """Writes what was gathered and starts the next shard. Tokens come last: where they are, the table is too."""
        tokens = np.concatenate(self._parts, dtype=self.dtype).tobytes()
        columns = dict(zip(MASKED_DOCS.names, zip(*self._table, strict=True), strict=True))
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({name: list(columns[name]) for name in self.schema.names}, schema=self.schema), sink)
        docs = sink.getvalue().to_pybytes()
        shard = Shard(
            number=self.number,
            tokens=self.tokens,
            documents=len(self._table),
            utf8_bytes=sum(columns["utf8_bytes"]),
            tokens_sha256=hashlib.sha256(tokens).hexdigest(),
            docs_sha256=hashlib.sha256(docs).hexdigest(),
        )
        write_whole(self.folder / shard.docs_name, docs, DataError)
        write_whole(self.folder / shard.tokens_name, tokens, DataError)
        self.number, self.tokens, self._parts, self._table = self.number + 1, 0, [], []
        return shard


def leftovers(folder: Path) -> Iterator[Path]:
    """Temporary files that an interrupted preparation left in ``folder``."""
    yield from folder.glob("*.tmp")
    yield from folder.glob("*/*.tmp")
