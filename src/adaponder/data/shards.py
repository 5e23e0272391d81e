"""Reads the tokens of a prepared folder, once tokens, document tables and manifest are known to agree."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from adaponder.data.manifest import CHAT_TEMPLATE, DTYPES, TOKENIZER, DataError, Manifest, Shard
from adaponder.data.verify import (
    DocumentTable,
    check_size,
    check_template,
    check_tokenizer,
    document_table,
    sums_of,
    verify_sums,
)


class Shards:
    """One split of a prepared folder, as the concatenation of its shards.

    Files are read by offset rather than mapped: thousands of shards need no open files, the object pickles, and a file
    that shrinks while in use is an error with a name, where a map would end the process with SIGBUS.

    Attributes:
        tokens, documents: how many the split holds.
        vocab_size, end_id, tokenizer_hash: of the tokenizer that made it.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest, table: DocumentTable):
        self.folder, self.split, self.manifest = folder, split, manifest
        self.tokens = manifest.total(split, "tokens")
        self.documents = manifest.total(split, "documents")
        self.utf8_bytes = manifest.total(split, "utf8_bytes")
        self.vocab_size, self.end_id, self.tokenizer_hash = (
            manifest.vocab_size,
            manifest.end_id,
            manifest.tokenizer_hash,
        )
        self._dtype = DTYPES[manifest.dtype]
        self._shards = manifest.splits[split]
        self._bounds = list(accumulate((shard.tokens for shard in self._shards), initial=0))
        self._document_starts, self._learned = table

    @classmethod
    def open(
        cls, folder: Path | str, split: str = "train", *, verify: bool = True, share: tuple[int, int] = (0, 1)
    ) -> Shards:
        """Checks sizes, types, counts and checksums of every shard of the split before anything is read.

        ``verify=False`` leaves out checksums of tokens and document tables, as ``ADAPONDER_VERIFY=0`` does for every
        open. ``share=(n, N)``: this is process n of the N on one machine, and hashes only its part of the files.
        """
        folder = Path(folder)
        manifest = Manifest.load(folder)
        if split not in manifest.splits:
            raise DataError(f"{folder} has no split {split!r}: it has {', '.join(manifest.splits)}")
        check_tokenizer(folder / TOKENIZER, manifest)
        check_template(folder, manifest)
        for shard in manifest.splits[split]:
            check_size(folder / split / shard.tokens_name, shard, DTYPES[manifest.dtype])
        if verify:
            verify_sums(folder, sums_of(folder / split, manifest.splits[split]), share=share)
        starts, learned, base = [np.empty(0, np.int64)], [np.empty((0, 2), np.int64)], 0
        for shard in manifest.splits[split]:
            table = document_table(folder / split / shard.docs_name, shard, masked=manifest.masked)
            starts.append(base + table.starts)
            if table.learned is not None:
                learned.append(base + table.learned)
            base += shard.tokens
        whole = DocumentTable(np.concatenate(starts), np.concatenate(learned) if manifest.masked else None)
        return cls(folder, split, manifest, whole)

    def read(self, start: int, count: int) -> np.ndarray:
        """``int64[count]``: tokens ``start … start + count - 1`` of the split."""
        return self.read_blocks(np.array([start]), count)[0]

    def read_blocks(self, starts: np.ndarray, count: int) -> np.ndarray:
        """``int64[len(starts), count]``: ``read(start, count)`` of each start."""
        self._check_range(starts, count)
        blocks = np.empty((len(starts), count), self._dtype)
        for block, start in zip(blocks, starts.tolist(), strict=True):
            self._fill(block, start)
        if blocks.size and blocks.max() >= self.vocab_size:
            self._refuse_foreign(blocks, starts)
        return blocks.astype(np.int64)

    def number_blocks(self, starts: np.ndarray, count: int) -> np.ndarray:
        """``int64[len(starts), count]``: for each token of ``read_blocks`` the running number of its document."""
        self._check_range(starts, count)
        # A 1 where a document begins inside a block: numbers are running sums of these.
        first = np.searchsorted(self._document_starts, starts, "right")
        inside = np.searchsorted(self._document_starts, starts + count, "left") - first
        inside = np.maximum(inside, 0)
        block = np.repeat(np.arange(len(starts)), inside)
        nth = np.arange(len(block)) - np.repeat(np.cumsum(inside) - inside, inside)
        begins = np.zeros((len(starts), count), np.int64)
        begins[block, self._document_starts[first[block] + nth] - starts[block]] = 1
        return (first - 1)[:, None] + np.cumsum(begins, 1)

    def learned_blocks(self, starts: np.ndarray, count: int) -> np.ndarray | None:
        """``bool[len(starts), count]``: whether each token is one to be learned; ``None`` where every one is."""
        if self._learned is None:
            return None
        self._check_range(starts, count)
        places = starts[:, None] + np.arange(count)
        part = np.searchsorted(self._learned[:, 0], places, "right") - 1
        if not len(self._learned):
            return np.zeros(places.shape, bool)
        return (part >= 0) & (places < self._learned[part, 1])

    def tokenizer_files(self) -> dict[str, str]:
        """The files, by name, with which a model folder's tokenizer opens in transformers."""
        content = (self.folder / TOKENIZER).read_text(encoding="utf-8")
        end = Tokenizer.from_str(content).id_to_token(self.end_id)
        begin = self.manifest.begin_token or end
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": begin}
        files = {TOKENIZER: content, "tokenizer_config.json": json.dumps(settings, indent=1)}
        if self.manifest.template_sha256 is not None:
            files[CHAT_TEMPLATE] = (self.folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
        return files

    def content_hash(self) -> str:
        """A hash of the tokens of all splits and of the tokenizer: equal for equal data, wherever it lies."""
        sums = [[shard.tokens_sha256 for shard in split] for split in self.manifest.splits.values()]
        if self.manifest.masked:  # what is learned of it stands in the tables
            sums += [[shard.docs_sha256 for shard in split] for split in self.manifest.splits.values()]
        return hashlib.sha256(json.dumps([sums, self.tokenizer_hash]).encode()).hexdigest()[:16]

    def require_tokenizer(self, tokenizer_hash: str, whose: str) -> None:
        """Refuses to go on with ids that mean something else to ``whose`` tokenizer."""
        if tokenizer_hash != self.tokenizer_hash:
            raise DataError(
                f"{self.folder} was tokenised with tokenizer {self.tokenizer_hash[:12]}, {whose} has "
                f"{tokenizer_hash[:12]}: prepare the data with the tokenizer of {whose}, or the other way round"
            )

    def _check_range(self, starts: np.ndarray, count: int) -> None:
        if count < 0 or (len(starts) and (starts.min() < 0 or starts.max() + count > self.tokens)):
            raise DataError(f"{count} tokens from {starts} asked of {self.folder}/{self.split}, it has {self.tokens}")

    def _fill(self, block: np.ndarray, start: int) -> None:
        """Writes the tokens from ``start`` on into ``block``, from as many shards as they lie in."""
        number = bisect_right(self._bounds, start) - 1
        filled = 0
        while filled < len(block):
            offset = start + filled - self._bounds[number]
            part = self._read_shard(self._shards[number], offset, len(block) - filled)
            block[filled : filled + len(part)] = part
            filled, number = filled + len(part), number + 1

    def _read_shard(self, shard: Shard, offset: int, count: int) -> np.ndarray:
        """At most ``count`` tokens: as many as the shard has from ``offset`` on."""
        path = self.folder / self.split / shard.tokens_name
        count = min(count, shard.tokens - offset)
        try:
            tokens = np.fromfile(path, self._dtype, count, offset=offset * self._dtype.itemsize)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        if len(tokens) < count:
            raise DataError(f"{path}: truncated since it was opened: {count} tokens from {offset}, found {len(tokens)}")
        return tokens

    def _refuse_foreign(self, blocks: np.ndarray, starts: np.ndarray) -> None:
        """Raises for the first token id that the tokenizer does not have."""
        block, offset = (int(indices[0]) for indices in np.nonzero(blocks >= self.vocab_size))
        token = starts[block] + offset
        number = bisect_right(self._bounds, token) - 1
        path = self.folder / self.split / self._shards[number].tokens_name
        raise DataError(
            f"{path}: token id {blocks[block, offset]} at offset {token - self._bounds[number]} "
            f"lies outside the vocabulary of {self.vocab_size}: "
            "the shard is corrupt, prepare the data again"
        )
