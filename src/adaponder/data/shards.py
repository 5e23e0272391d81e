"""Writes, verifies and reads the shards of a prepared folder; an interruption loses no complete shard.

``progress.json`` lists the complete shards, and ``manifest.json`` is written last. Opening a folder hashes every file;
``ADAPONDER_VERIFY=0`` skips the checksums of tokens and document tables, but no other check.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.filesize import decimal
from tokenizers import Tokenizer

from adaponder.checkpoints.manifest import sealed
from adaponder.data.encode import EncodedDocument
from adaponder.data.manifest import (
    CHAT_TEMPLATE,
    COUNTS,
    DOCS,
    DTYPES,
    FORMAT,
    JOURNAL,
    MANIFEST,
    MASKED_DOCS,
    SPLITS,
    TOKENIZER,
    DataError,
    Manifest,
    Shard,
    is_masked,
    shard_from,
    unsealed,
)
from adaponder.data.tokenizers import tokenizer_hash
from adaponder.errors import InputError
from adaponder.files import checksums_wanted, open_plain, sha256_of, sha256_of_each, write_whole
from adaponder.journal import changed_settings
from adaponder.terminal import errors

# From this size on, verifying takes noticeably long and is announced.
_LARGE = 2**33


@dataclass
class WriterState:
    """The content of ``progress.json``.

    Attributes:
        shards: the complete shards of each split.
        documents: for each split, the number of the first input document that these shards do not cover.
    """

    fingerprint: dict[str, Any]
    tokenizer_hash: str | None = None
    end_token: str | None = None
    shards: dict[str, list[Shard]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))

    def save(self, out: Path) -> None:
        write_whole(out / JOURNAL, sealed(asdict(self) | {"format": FORMAT}).encode(), DataError)

    @classmethod
    def load(cls, out: Path) -> WriterState | None:
        """Returns the state in ``out``, or ``None`` if there is no ``progress.json``; raises if that is damaged."""
        if not os.path.isfile(out / JOURNAL):
            return None
        content = unsealed(out / JOURNAL)
        try:
            del content["format"]
            content["shards"] = {split: [shard_from(shard) for shard in content["shards"][split]] for split in SPLITS}
            return cls(**content)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{out / JOURNAL}: damaged ({error}); delete {out} and prepare again") from None


class ShardWriter:
    """Writes both splits as shards, ``progress.json`` after each shard, and at the end the manifest.

    ``out`` is an empty folder, or one that was begun with the same ``fingerprint`` (arguments and inputs): its complete
    shards are kept. A shard ends with the document that fills it: no document is split between two shards.
    """

    def __init__(self, out: Path, fingerprint: dict[str, Any]):
        state = WriterState.load(out)
        if state is None and any(path.name != JOURNAL + ".tmp" for path in out.iterdir()):
            raise InputError(f"--out {out} is not empty and was not made by adaponder prepare: name another folder")
        if state is None or state.end_token is None:
            # Nothing has been written yet, so the folder may be used again, e.g. after a mistyped tokenizer.
            state = WriterState(fingerprint)
            state.save(out)
        _require_same(out, state.fingerprint, fingerprint)
        self.out, self.state = out, state
        try:
            for split in SPLITS:
                _verify_sums(out / split, state.shards[split])
        except DataError as error:
            raise DataError(f"{error}; delete {out} and prepare again") from None
        try:
            for leftover in (*out.glob("*.tmp"), *out.glob("*/*.tmp")):
                leftover.unlink()
            for split in SPLITS:
                (out / split).mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}") from None
        self.tokens = sum(shard.tokens for shards in state.shards.values() for shard in shards)
        # For each split, the documents that are not in a shard yet, and their number of tokens.
        self._open: dict[str, list[EncodedDocument]] = {split: [] for split in SPLITS}
        self._size: dict[str, int] = dict.fromkeys(SPLITS, 0)

    def set_tokenizer(self, tokenizer: Tokenizer, end_id: int) -> None:
        """Writes ``tokenizer.json`` and records its hash and end token. A rerun then uses this tokenizer."""
        write_whole(self.out / TOKENIZER, tokenizer.to_str(pretty=True).encode(), DataError)
        self.state.tokenizer_hash, self.state.end_token = tokenizer_hash(tokenizer), tokenizer.id_to_token(end_id)
        self.state.save(self.out)

    def add(self, documents: Iterable[EncodedDocument]) -> None:
        """Adds documents and writes each shard once it is full."""
        for document in documents:
            split = SPLITS[document.validation]
            self._open[split].append(document)
            self._size[split] += len(document.tokens)
            self.tokens += len(document.tokens)
            if self._size[split] >= self.state.fingerprint["shard_tokens"]:
                self._write(split, document.index + 1)

    def _write(self, split: str, documents: int) -> None:
        """Writes a split's pending documents as a shard. ``documents`` is the number of input documents read so far."""
        pending, self._open[split], self._size[split] = self._open[split], [], 0
        joined = np.concatenate([document.tokens for document in pending])
        tokens = joined.astype(joined.dtype.newbyteorder("<"), copy=False).tobytes()
        lengths = [len(document.tokens) for document in pending]
        columns = {"start": list(accumulate(lengths[:-1], initial=0)), "length": lengths}
        schema = MASKED_DOCS if is_masked(self.state.fingerprint) else DOCS
        columns |= {name: [getattr(document, name) for document in pending] for name in schema.names[2:]}
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns, schema=schema), sink)
        docs = sink.getvalue().to_pybytes()
        shard = Shard(
            number=len(self.state.shards[split]),
            tokens=len(joined),
            documents=len(pending),
            utf8_bytes=sum(columns["utf8_bytes"]),
            tokens_sha256=hashlib.sha256(tokens).hexdigest(),
            docs_sha256=hashlib.sha256(docs).hexdigest(),
        )
        write_whole(self.out / split / shard.docs_name, docs, DataError)
        write_whole(self.out / split / shard.tokens_name, tokens, DataError)
        self.state.shards[split].append(shard)
        self.state.documents[split] = documents
        self.state.save(self.out)

    def finish(self, documents: int, **facts: Any) -> Manifest:
        """Writes the unfinished shards, then the manifest. ``facts`` are further fields of the manifest."""
        for split in SPLITS:
            if self._open[split]:
                self._write(split, documents)
        assert self.state.tokenizer_hash is not None
        manifest = Manifest(
            tokenizer_hash=self.state.tokenizer_hash,
            tokenizer_sha256=sha256_of(self.out / TOKENIZER, DataError),
            splits={split: tuple(shards) for split, shards in self.state.shards.items()},
            fingerprint=self.state.fingerprint,
            **facts,
        )
        write_whole(self.out / MANIFEST, sealed(manifest.as_dict()).encode(), DataError)
        (self.out / JOURNAL).unlink()
        return manifest


def finished(out: Path, fingerprint: dict[str, Any]) -> Manifest | None:
    """Returns the manifest of a finished folder after verifying its files, or ``None`` if the folder is unfinished.

    Raises if the folder was made with other arguments or inputs, or is damaged.
    """
    if not (out / MANIFEST).is_file():
        return None
    manifest = Manifest.load(out)
    _require_same(out, manifest.fingerprint, fingerprint)
    for split in manifest.splits:
        Shards.open(out, split)
    (out / JOURNAL).unlink(missing_ok=True)
    return manifest


def _require_same(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises if a folder was begun with other arguments or inputs; the error lists the differences."""
    if changes := changed_settings(before, now, _text_of):
        raise InputError(f"--out {out} has other arguments: {'; '.join(changes)}; delete it or name another folder")


def _text_of(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return ", ".join(
            f"{entry['input']} ({entry['files']} files, {entry['bytes']} bytes, {entry['contents'][:8]})"
            for entry in value
        )
    return str(value)


class Shards:
    """Reads one split of a prepared folder, as the concatenation of its shards.

    Files are read by offset, not memory-mapped, so that thousands of shards need no open files, the object can be
    pickled, and a file that shrinks while in use raises an error (with a memory map, SIGBUS would end the process).
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest, starts: np.ndarray, learned: np.ndarray):
        self.folder, self.split, self.manifest = folder, split, manifest
        self.tokens, self.documents, self.utf8_bytes = (manifest.total(split, what) for what in COUNTS)
        self.vocab_size, self.end_id = manifest.vocab_size, manifest.end_id
        self.tokenizer_hash = manifest.tokenizer_hash
        self._dtype = DTYPES[manifest.dtype]
        self._shards = manifest.splits[split]
        self._bounds = list(accumulate((shard.tokens for shard in self._shards), initial=0))
        self._document_starts, self._learned = starts, learned

    @classmethod
    def open(
        cls, folder: Path | str, split: str = "train", *, verify: bool = True, share: tuple[int, int] = (0, 1)
    ) -> Shards:
        """Opens a split after checking sizes, types, counts and checksums of all its shards.

        ``verify=False`` skips the checksums of tokens and document tables, as ``ADAPONDER_VERIFY=0`` does everywhere.
        ``share=(n, N)``: this is process n of the N processes of a machine, which divide the hashing among them.
        """
        folder = Path(folder)
        manifest = Manifest.load(folder)
        if split not in manifest.splits:
            raise DataError(f"{folder} has no split {split!r}: it has {', '.join(manifest.splits)}")
        _check_tokenizer(folder, manifest)
        dtype, shards = DTYPES[manifest.dtype], manifest.splits[split]
        for shard in shards:
            path, expected = folder / split / shard.tokens_name, shard.tokens * dtype.itemsize
            if (size := _size_of(path)) != expected:
                raise DataError(f"{path}: {size} bytes, {shard.tokens} tokens of {dtype.name} take {expected}: damaged")
        if verify:
            _verify_sums(folder / split, shards, share=share)
        starts, learned, base = [np.empty(0, np.int64)], [np.empty((0, 2), np.int64)], 0
        for shard in shards:
            shard_starts, shard_learned = _document_table(folder / split / shard.docs_name, shard, manifest.masked)
            starts.append(base + shard_starts)
            learned.append(base + shard_learned)
            base += shard.tokens
        return cls(folder, split, manifest, np.concatenate(starts), np.concatenate(learned))

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns ``int64[count]``: tokens ``start … start + count - 1`` of the split."""
        return self.read_blocks(np.array([start]), count)[0]

    def read_blocks(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Returns ``int64[len(starts), count]``: row i is ``read(starts[i], count)``."""
        self._check_range(starts, count)
        blocks = np.empty((len(starts), count), np.int64)
        for block, start in zip(blocks, starts.tolist(), strict=True):
            self._fill(block, start)
        return blocks

    def number_blocks(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Returns, for each token of ``read_blocks``, the number of its document: ``int64[len(starts), count]``."""
        self._check_range(starts, count)
        return np.searchsorted(self._document_starts, starts[:, None] + np.arange(count), "right") - 1

    def learned_blocks(self, starts: np.ndarray, count: int) -> np.ndarray | None:
        """Returns ``bool[len(starts), count]``, whether each token is learned, or ``None`` if all are."""
        if not self.manifest.masked:
            return None
        self._check_range(starts, count)
        # Spans are in order and disjoint: within one, the number of bounds (first, last + 1) up to a token is odd.
        return np.searchsorted(self._learned.ravel(), starts[:, None] + np.arange(count), "right") % 2 == 1

    def tokenizer_files(self) -> dict[str, str]:
        """Returns the tokenizer files that transformers expects in a model folder: a dict from file name to content."""
        content = (self.folder / TOKENIZER).read_text(encoding="utf-8")
        end = Tokenizer.from_str(content).id_to_token(self.end_id)
        begin = self.manifest.begin_token or end
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": begin}
        files = {TOKENIZER: content, "tokenizer_config.json": json.dumps(settings, indent=1)}
        if self.manifest.template_sha256 is not None:
            files[CHAT_TEMPLATE] = (self.folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
        return files

    def content_hash(self) -> str:
        """Returns a hash of tokens, learned spans and tokenizer, which is equal for equal data in any folder."""
        sums = [[shard.tokens_sha256 for shard in split] for split in self.manifest.splits.values()]
        if self.manifest.masked:  # the document tables hold the learned spans
            sums += [[shard.docs_sha256 for shard in split] for split in self.manifest.splits.values()]
        return hashlib.sha256(json.dumps([sums, self.tokenizer_hash]).encode()).hexdigest()[:16]

    def require_tokenizer(self, tokenizer_hash: str, owner: str) -> None:
        """Raises unless the data was tokenized with the tokenizer of this hash; the error names its ``owner``."""
        if tokenizer_hash != self.tokenizer_hash:
            raise DataError(
                f"{self.folder} was tokenized with tokenizer {self.tokenizer_hash[:12]}, {owner} has "
                f"{tokenizer_hash[:12]}: prepare the data with the tokenizer of {owner}, or use another checkpoint"
            )

    def _check_range(self, starts: np.ndarray, count: int) -> None:
        if count < 0 or (len(starts) and (starts.min() < 0 or starts.max() + count > self.tokens)):
            raise DataError(f"{self.folder}/{self.split} has {self.tokens} tokens, not {count} from {starts} on")

    def _fill(self, block: np.ndarray, start: int) -> None:
        """Fills ``block`` with tokens ``start, start + 1, …`` of the split, which may be in several shards."""
        number = bisect_right(self._bounds, start) - 1
        filled = 0
        while filled < len(block):
            shard, offset = self._shards[number], start + filled - self._bounds[number]
            count = min(len(block) - filled, shard.tokens - offset)
            path = self.folder / self.split / shard.tokens_name
            try:
                tokens = np.fromfile(path, self._dtype, count, offset=offset * self._dtype.itemsize)
            except OSError as error:
                raise DataError(f"{path}: {error.strerror or error}") from error
            if len(tokens) < count:
                raise DataError(f"{path}: truncated since it was opened: {len(tokens)} of {count} tokens at {offset}")
            if (tokens >= self.vocab_size).any():
                wrong = int(np.argmax(tokens >= self.vocab_size))
                raise DataError(
                    f"{path}: token id {tokens[wrong]} at offset {offset + wrong} is outside the vocabulary of "
                    f"{self.vocab_size}: the shard is damaged, prepare the data again"
                )
            block[filled : filled + count] = tokens
            filled, number = filled + count, number + 1


def _check_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Raises if the file of the tokenizer or the chat template differs from the one that made the data."""
    for name, checksum in ((TOKENIZER, manifest.tokenizer_sha256), (CHAT_TEMPLATE, manifest.template_sha256)):
        if checksum is not None and sha256_of(folder / name, DataError) != checksum:
            raise DataError(
                f"{folder / name}: its checksum differs, so it was damaged, edited or replaced: restore the file that "
                "made the data, or prepare the data again"
            )


def _document_table(path: Path, shard: Shard, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns each document's first token, ``int64[documents]``, and the learned spans, ``int64[spans, 2]``.

    Raises unless the documents cover the shard's tokens exactly. Unless ``masked``, there are no spans.
    """
    schema = MASKED_DOCS if masked else DOCS
    try:
        with open_plain(path, DataError) as raw, pq.ParquetFile(raw) as file:
            if file.schema_arrow.remove_metadata() != schema:
                raise DataError(f"{path}: columns {file.schema_arrow.names} must be {schema.names} of their types")
            table = file.read(columns=["start", "length", *(["learned"] if masked else [])])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: truncated or not a Parquet file ({error})") from None
    start, length = (table.column(name).to_numpy() for name in ("start", "length"))
    if len(start) != shard.documents or length.sum() != shard.tokens:
        raise DataError(
            f"{path}: {len(start)} documents of {length.sum()} tokens, "
            f"the manifest lists {shard.documents} of {shard.tokens}: the files do not belong together"
        )
    if (length < 1).any() or (start != np.cumsum(length) - length).any():
        raise DataError(f"{path}: documents do not follow one another: damaged or foreign")
    return start, _learned(path, table, start, length) if masked else np.empty((0, 2), np.int64)


def _learned(path: Path, table: pa.Table, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns the learned spans of a shard; raises unless they are in order, disjoint and within their documents."""
    column = table.column("learned").combine_chunks()
    counts = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten().to_numpy(zero_copy_only=False)
    if (counts % 2).any() or counts.sum() != len(values):
        raise DataError(f"{path}: learned must hold pairs of numbers: damaged or foreign")
    first, size = values.reshape(-1, 2).T
    owner = np.repeat(np.arange(len(counts)), counts // 2)
    spans = np.stack([start[owner] + first, start[owner] + first + size], 1)
    wrong = (first < 0) | (size < 1) | (first + size > length[owner])
    if wrong.any() or (spans[1:, 0] < spans[:-1, 1]).any():
        raise DataError(f"{path}: learned spans do not follow one another within documents: damaged or foreign")
    return spans


def _size_of(path: Path) -> int:
    """Opens a regular file and returns its size in bytes."""
    with open_plain(path, DataError) as file:
        return os.fstat(file.fileno()).st_size


def _verify_sums(folder: Path, shards: Iterable[Shard], *, share: tuple[int, int] = (0, 1)) -> None:
    """Raises if a file of ``shards`` has another SHA-256. With ``share=(n, N)``, checks files n, n + N, n + 2N, … only.

    With ``ADAPONDER_VERIFY=0`` no file is read, and the first process prints a note.
    """
    number, processes = share
    if not 0 <= number < processes:
        raise InputError(f"share={share} must be (number of this process, number of processes)")
    if not checksums_wanted():
        if number == 0:
            errors.print(f"{folder}: checksums are not verified (ADAPONDER_VERIFY=0)", soft_wrap=True)
        return
    sums = {}
    for shard in shards:
        sums[folder / shard.tokens_name] = shard.tokens_sha256
        sums[folder / shard.docs_name] = shard.docs_sha256
    files = list(sums)[number::processes]
    if number == 0 and (size := sum(map(_size_of, files))) >= _LARGE:
        text = f"verifying checksums of {decimal(size)} (once per start; ADAPONDER_VERIFY=0 skips it)"
        errors.print(f"{folder}: {text}", soft_wrap=True)
    for path, sha in zip(files, sha256_of_each(files, DataError), strict=True):
        if sha != sums[path]:
            raise DataError(
                f"{path}: checksum {sha[:12]}, the manifest lists {sums[path][:12]}: damaged, prepare the data again"
            )
