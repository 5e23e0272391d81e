"""A shard is whole or it is refused: tokens, document table and manifest must agree before one token is read."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from adaponder.data.tokenizers import hash_of_json
from adaponder.errors import AdaPonderError

FORMAT = 1
MANIFEST = "manifest.json"
JOURNAL = "progress.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
DOCS = pa.schema(
    [
        ("start", pa.int64()),  # offset of the first token within the shard
        ("length", pa.int64()),  # tokens, the end token counted
        ("source", pa.string()),
        ("utf8_bytes", pa.int64()),
        ("hash", pa.uint64()),  # first 8 bytes of the text's SHA-256, big-endian
    ]
)


class DataError(AdaPonderError):
    """Data that is truncated, mismatched, too small or not what it claims to be."""


def dtype_of(vocab_size: int) -> str:
    """The narrower of the two token types that holds every id."""
    return "uint16" if vocab_size < 65536 else "uint32"


@dataclass(frozen=True)
class Shard:
    """One entry of the manifest: what ``tokens-NNNNN.bin`` and ``docs-NNNNN.parquet`` must hold."""

    number: int
    tokens: int
    documents: int
    utf8_bytes: int
    tokens_sha256: str
    docs_sha256: str

    @property
    def tokens_name(self) -> str:
        return f"tokens-{self.number:05d}.bin"

    @property
    def docs_name(self) -> str:
        return f"docs-{self.number:05d}.parquet"


SKIPPED = {
    "hidden": "hidden files and folders left out",
    "binary": "binary files left out",
    "empty": "empty documents left out",
    "invalid_utf8": "documents with invalid UTF-8, mended with U+FFFD",
}


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds.

    Attributes:
        splits: split name to its shards, in order.
        fingerprint: the arguments and inputs it was made from; a rerun with others is refused.
        skipped: what preparation left out or mended, counted by kind.
    """

    dtype: str
    vocab_size: int
    end_id: int
    tokenizer_hash: str
    splits: dict[str, tuple[Shard, ...]]
    fingerprint: dict[str, Any]
    skipped: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def total(self, split: str, what: str) -> int:
        """The sum of ``tokens``, ``documents`` or ``utf8_bytes`` over the shards of a split."""
        return sum(getattr(shard, what) for shard in self.splits[split])

    def remarks(self) -> list[str]:
        """What preparation left out or mended, and a validation split that was wanted and is empty, in words."""
        found = [f"{SKIPPED[kind]}: {count:,}" for kind, count in self.skipped.items() if count]
        if self.fingerprint.get("validation") and not self.total("validation", "tokens"):
            found.append(
                f"no document fell to validation: of {self.total('train', 'documents'):,}, each does with probability "
                f"{self.fingerprint['validation']:g}; give more documents, or a larger share"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        splits = {
            name: {what: self.total(name, what) for what in ("tokens", "documents", "utf8_bytes")}
            | {"shards": [asdict(shard) for shard in shards]}
            for name, shards in self.splits.items()
        }
        return asdict(self) | {"splits": splits}

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """The manifest of a finished folder; an unfinished one is named as such."""
        path = folder / MANIFEST
        if not path.is_file():
            if (folder / JOURNAL).is_file():
                raise DataError(f"{folder} is prepared only in part: run the same adaponder prepare again to finish it")
            raise DataError(f"{path} is missing: not a folder made by adaponder prepare")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise DataError(
                    f"{path}: format {found['format']}, this version reads {FORMAT}: prepare the data again"
                )
            splits = {name: _shards_of(split) for name, split in found.pop("splits").items()}
            manifest = cls(splits=splits, **found)
            consistent = manifest.dtype == dtype_of(manifest.vocab_size) and 0 <= manifest.end_id < manifest.vocab_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: not a valid manifest ({type(error).__name__}: {error})") from None
        if not consistent:
            raise DataError(
                f"{path}: dtype {manifest.dtype}, vocab_size {manifest.vocab_size} and end_id {manifest.end_id} "
                "do not go together"
            )
        return manifest


def _shards_of(split: dict[str, Any]) -> tuple[Shard, ...]:
    shards = tuple(Shard(**shard) for shard in split["shards"])
    for what in ("tokens", "documents", "utf8_bytes"):
        if split[what] != sum(getattr(shard, what) for shard in shards):
            raise ValueError(f"{what} of the shards do not add up to {split[what]}")
    if [shard.number for shard in shards] != list(range(len(shards))):
        raise ValueError("shards are not numbered from 0")
    return shards


class Shards:
    """One split of a prepared folder, as the concatenation of its shards.

    Files are read by offset rather than mapped: thousands of shards need no open files, the object pickles, and a file
    that shrinks while in use is an error with a name, where a map would end the process with SIGBUS.

    Attributes:
        tokens, documents: how many the split holds.
        vocab_size, end_id, tokenizer_hash: of the tokenizer that made it.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest, document_starts: np.ndarray):
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
        self._document_starts = document_starts

    @classmethod
    def open(cls, folder: Path | str, split: str = "train", *, verify: bool = False) -> Shards:
        """Checks sizes, types and counts of every shard (``verify``: and every checksum) before anything is read."""
        folder = Path(folder)
        manifest = Manifest.load(folder)
        if split not in manifest.splits:
            raise DataError(f"{folder} has no split {split!r}: it has {', '.join(manifest.splits)}")
        _check_tokenizer_file(folder / TOKENIZER, manifest)
        starts, base = [np.empty(0, np.int64)], 0
        for shard in manifest.splits[split]:
            _check_tokens_file(folder / split / shard.tokens_name, shard, DTYPES[manifest.dtype])
            starts.append(base + _checked_starts(folder / split / shard.docs_name, shard))
            base += shard.tokens
            if verify:
                _check_sum(folder / split / shard.tokens_name, shard.tokens_sha256)
                _check_sum(folder / split / shard.docs_name, shard.docs_sha256)
        return cls(folder, split, manifest, np.concatenate(starts))

    def read(self, start: int, count: int) -> np.ndarray:
        """``int64[count]``: tokens ``start … start + count - 1`` of the split."""
        return self.read_blocks(np.array([start]), count)[0]

    def document_numbers(self, start: int, count: int) -> np.ndarray:
        """``int64[count]``: for each token of the range the running number of its document in the split."""
        return self.number_blocks(np.array([start]), count)[0]

    def read_blocks(self, starts: np.ndarray, count: int) -> np.ndarray:
        """``int64[len(starts), count]``: equals ``read`` of each start."""
        self._check_range(starts, count)
        found = np.empty((len(starts), count), self._dtype)
        for row, start in enumerate(starts.tolist()):
            self._fill(found[row], start)
        if found.size and found.max() >= self.vocab_size:
            self._refuse_foreign(found, starts)
        return found.astype(np.int64)

    def number_blocks(self, starts: np.ndarray, count: int) -> np.ndarray:
        """``int64[len(starts), count]``: equals ``document_numbers`` of each start."""
        self._check_range(starts, count)
        # Documents that begin inside a block: one step up there, and the numbers are running sums.
        first = np.searchsorted(self._document_starts, starts, "right")
        inside = np.searchsorted(self._document_starts, starts + count, "left") - first
        inside = np.maximum(inside, 0)
        row = np.repeat(np.arange(len(starts)), inside)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(inside) - inside, inside)
        steps = np.zeros((len(starts), count), np.int64)
        steps[row, self._document_starts[first[row] + nth] - starts[row]] = 1
        return (first - 1)[:, None] + np.cumsum(steps, 1)

    def tokenizer_files(self) -> dict[str, str]:
        """The files, by name, with which a model folder's tokenizer opens in transformers."""
        content = (self.folder / TOKENIZER).read_text(encoding="utf-8")
        end = Tokenizer.from_str(content).id_to_token(self.end_id)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
        return {TOKENIZER: content, "tokenizer_config.json": json.dumps(settings, indent=1)}

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

    def _fill(self, row: np.ndarray, start: int) -> None:
        """Puts tokens ``start …`` into ``row``, from as many shards as they lie in."""
        number = bisect_right(self._bounds, start) - 1
        filled = 0
        while filled < len(row):
            offset = start + filled - self._bounds[number]
            part = self._read_shard(self._shards[number], offset, len(row) - filled)
            row[filled : filled + len(part)] = part
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

    def _refuse_foreign(self, found: np.ndarray, starts: np.ndarray) -> None:
        row, place = (int(where[0]) for where in np.nonzero(found >= self.vocab_size))
        number = bisect_right(self._bounds, starts[row] + place) - 1
        raise DataError(
            f"{self.folder / self.split / self._shards[number].tokens_name}: token id {found[row, place]} at offset "
            f"{starts[row] + place - self._bounds[number]} lies outside the vocabulary of {self.vocab_size}: "
            "the shard is corrupt, prepare the data again"
        )


def _check_tokenizer_file(path: Path, manifest: Manifest) -> None:
    try:
        found = hash_of_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: missing or not valid JSON ({error})") from None
    if found != manifest.tokenizer_hash:
        raise DataError(
            f"{path} has hash {found[:12]}, the data was made with {manifest.tokenizer_hash[:12]}: "
            "put the right tokenizer back or prepare the data again"
        )


def _check_tokens_file(path: Path, shard: Shard, dtype: np.dtype) -> None:
    wanted = shard.tokens * dtype.itemsize
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        raise DataError(f"{path} is missing: prepare the data again")
    if found != wanted:
        raise DataError(
            f"{path}: {found} bytes, {shard.tokens} tokens of {dtype.name} are {wanted}: damaged or foreign"
        )


def _checked_starts(path: Path, shard: Shard) -> np.ndarray:
    """The ``start`` column, once the table is known to cut exactly the shard's tokens into documents."""
    try:
        table = pq.read_table(path, columns=["start", "length"])
        if pq.read_schema(path).remove_metadata() != DOCS:
            raise DataError(f"{path}: columns {pq.read_schema(path).names}, needed {DOCS.names} of their types")
    except FileNotFoundError:
        raise DataError(f"{path} is missing: prepare the data again") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: truncated or not a Parquet file ({error})") from None
    start, length = (table.column(name).to_numpy() for name in ("start", "length"))
    if len(start) != shard.documents or length.sum() != shard.tokens:
        raise DataError(
            f"{path}: {len(start)} documents of {length.sum()} tokens, "
            f"the manifest says {shard.documents} of {shard.tokens}: the files do not belong together"
        )
    if (length < 1).any() or (start != np.cumsum(length) - length).any():
        raise DataError(f"{path}: documents do not follow one another: damaged or foreign")
    return start


def _check_sum(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise DataError(f"{path}: checksum {found[:12]}, the manifest says {wanted[:12]}: damaged")
