"""Reads and checks a prepared folder's ``manifest.json``, whose last entry is a checksum of the other entries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from adaponder.checkpoints.manifest import sealed
from adaponder.errors import AdaPonderError
from adaponder.files import parse_json, read_bytes

FORMAT = 2
MANIFEST = "manifest.json"
JOURNAL = "progress.json"
TOKENIZER, CHAT_TEMPLATE = "tokenizer.json", "chat_template.jinja"
SPLITS = ("train", "validation")
COUNTS = ("tokens", "documents", "utf8_bytes")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
DOCS = pa.schema(
    [
        ("start", pa.int64()),  # offset of the first token within the shard
        ("length", pa.int64()),  # tokens, including the end token
        ("source", pa.string()),
        ("utf8_bytes", pa.int64()),
        ("hash", pa.uint64()),  # first 8 bytes of the text's SHA-256, big-endian
    ]
)
# ``learned``: first token and length of each learned span within the document, as one flat list.
MASKED_DOCS = DOCS.append(pa.field("learned", pa.list_(pa.int64())))

# The largest valid count: larger than any corpus, and sums still fit into int64 offsets.
_LARGEST = 2**48


class DataError(AdaPonderError):
    """Raised for data that is truncated, mismatched, too small or invalid."""


def dtype_of(vocab_size: int) -> str:
    """Returns ``uint16`` if that holds every token id, else ``uint32``."""
    return "uint16" if vocab_size < 65536 else "uint32"


@dataclass(frozen=True)
class Shard:
    """One entry of the manifest: counts and checksums of ``tokens-NNNNN.bin`` and ``docs-NNNNN.parquet``."""

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
    "hidden": "hidden files and folders skipped",
    "special": "pipes, devices, broken links and links to folders skipped",
    "binary": "binary files skipped",
    "empty": "empty documents skipped",
    "invalid_utf8": "documents with invalid UTF-8, repaired with U+FFFD",
}


@dataclass(frozen=True)
class Manifest:
    """The content of a prepared folder.

    Attributes:
        tokenizer_hash: hash of the tokenizer's behaviour, see :func:`adaponder.data.tokenizers.hash_of_content`.
        tokenizer_sha256: SHA-256 of ``tokenizer.json``.
        fingerprint: the arguments and inputs that made the folder; a rerun with other arguments or inputs is refused.
        skipped: number of documents or files skipped or repaired, by kind.
        template_sha256: SHA-256 of ``chat_template.jinja``; ``None`` if the tokenizer has no template.
        begin_token: the token that begins a text (BOS); ``None`` if that is the end token.
    """

    dtype: str
    vocab_size: int
    end_id: int
    tokenizer_hash: str
    tokenizer_sha256: str
    splits: dict[str, tuple[Shard, ...]]
    fingerprint: dict[str, Any]
    skipped: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT
    template_sha256: str | None = None
    begin_token: str | None = None

    @property
    def puzzles(self) -> bool:
        """Returns whether the documents are puzzles and only their answers are learned."""
        return "answers" in self.fingerprint

    @property
    def masked(self) -> bool:
        """Returns whether only some tokens of each document are learned."""
        return is_masked(self.fingerprint)

    def total(self, split: str, what: str) -> int:
        """Returns the sum of ``tokens``, ``documents`` or ``utf8_bytes`` over the shards of a split."""
        return sum(getattr(shard, what) for shard in self.splits[split])

    def remarks(self) -> list[str]:
        """Returns sentences about documents that were skipped or repaired, and about an empty split."""
        remarks = [f"{SKIPPED[kind]}: {count:,}" for kind, count in self.skipped.items() if count]
        share = self.fingerprint["validation"]
        for split, chance, change in (("validation", share, "larger"), ("train", 1 - share, "smaller")):
            if chance and not self.total(split, "documents"):
                documents = sum(self.total(name, "documents") for name in SPLITS)
                remarks.append(
                    f"no document was assigned to {split}: each of {documents:,} had probability {chance:g}; "
                    f"add documents, or use a {change} --validation"
                )
        return remarks

    def as_dict(self) -> dict[str, Any]:
        splits = {
            name: {what: self.total(name, what) for what in COUNTS} | {"shards": [asdict(shard) for shard in shards]}
            for name, shards in self.splits.items()
        }
        return {name: value for name, value in asdict(self).items() if value is not None} | {"splits": splits}

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Reads and checks the manifest of a finished folder."""
        path = folder / MANIFEST
        if not os.path.lexists(path):
            if os.path.lexists(folder / JOURNAL):
                raise DataError(f"{folder} is prepared only in part: run the same adaponder prepare again to finish it")
            raise DataError(f"{path} is missing: not a folder made by adaponder prepare")
        content = unsealed(path)
        try:
            manifest = cls(splits=_splits(content.pop("splits")), **content)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not a valid manifest ({type(error).__name__}: {error})") from None
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        """Raises if a field has a value that ``prepare`` never writes."""
        share = self.fingerprint.get("validation") if isinstance(self.fingerprint, dict) else None
        counts = self.skipped if isinstance(self.skipped, dict) else {"": None}
        sized = _is_count(self.vocab_size) and self.vocab_size <= 2**32
        valid = {
            "vocab_size": sized,
            "dtype": sized and self.dtype == dtype_of(self.vocab_size),
            "end_id": sized and _is_count(self.end_id) and self.end_id < self.vocab_size,
            "tokenizer_hash": _is_sha256(self.tokenizer_hash),
            "tokenizer_sha256": _is_sha256(self.tokenizer_sha256),
            "template_sha256": self.template_sha256 is None or _is_sha256(self.template_sha256),
            "begin_token": isinstance(self.begin_token, str | None),
            "skipped": all(kind in SKIPPED and _is_count(count) for kind, count in counts.items()),
            "fingerprint": isinstance(share, (int, float)) and 0 <= share < 1,
        }
        for name, is_valid in valid.items():
            if not is_valid:
                raise DataError(f"{path}: {name} {str(getattr(self, name))[:40]} is not valid: prepare the data again")


def _splits(content: dict[str, Any]) -> dict[str, tuple[Shard, ...]]:
    """Parses the shards of each split; raises ``ValueError`` if totals or shard numbers are inconsistent."""
    if set(content) != set(SPLITS):
        raise ValueError(f"splits {', '.join(content)} must be {' and '.join(SPLITS)}")
    splits = {}
    for name in SPLITS:
        splits[name] = shards = tuple(shard_from(shard) for shard in content[name]["shards"])
        for what in COUNTS:
            if content[name][what] != sum(getattr(shard, what) for shard in shards):
                raise ValueError(f"{what} of the shards do not add up to {content[name][what]}")
        if [shard.number for shard in shards] != list(range(len(shards))):
            raise ValueError("shards are not numbered from 0")
    return splits


def shard_from(content: dict[str, Any]) -> Shard:
    """Parses a shard's entry in the manifest; raises ``ValueError`` for an invalid number or checksum."""
    shard = Shard(**content)
    for name, value in asdict(shard).items():
        if not (_is_sha256(value) if name.endswith("sha256") else _is_count(value)):
            raise ValueError(f"{name}={str(value)[:40]} of a shard is not valid")
    return shard


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def unsealed(path: Path) -> dict[str, Any]:
    """Reads a file that :func:`adaponder.checkpoints.manifest.sealed` made; raises if a byte of it was changed."""
    raw = read_bytes(path, DataError)
    content = parse_json(raw, path, DataError)
    if content.get("format") != FORMAT:
        number = str(content.get("format"))[:40]
        raise DataError(f"{path}: format {number}, this version reads {FORMAT}: delete {path.parent} and prepare again")
    content.pop("checksum", None)
    if raw != sealed(content).encode():
        raise DataError(
            f"{path}: its checksum differs, so it was damaged or edited by hand: delete {path.parent} and prepare again"
        )
    return content


def is_masked(fingerprint: Mapping[str, Any]) -> bool:
    """Returns whether only some tokens are learned, as in conversations and in puzzles with ``answers=1``."""
    return "chat" in fingerprint or "answers" in fingerprint
