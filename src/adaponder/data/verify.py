"""Checks that tokens, document tables and tokenizer are, byte for byte, those that the manifest lists.

The cost: each file is read once per start and hashed by several threads, about 1.2 GB per second and core.
``ADAPONDER_VERIFY=0`` leaves checksums of tokens and tables out, for data whose reading takes too long; sizes, types
and counts are checked all the same.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.filesize import decimal

from adaponder.data.manifest import CHAT_TEMPLATE, DOCS, MASKED_DOCS, DataError, Manifest, Shard
from adaponder.data.tokenizers import hash_of_content
from adaponder.errors import InputError
from adaponder.files import checksums_wanted, open_plain, parse_json, read_bytes, sha256_of_each
from adaponder.terminal import errors

# From this size on a start waits noticeably, and is told why.
_LARGE = 2**33


def check_tokenizer(path: Path, manifest: Manifest) -> None:
    """Raises unless ``tokenizer.json`` is, byte for byte, the one that made the data; always, for it is small."""
    raw = read_bytes(path, DataError)
    tokenizer_hash = hash_of_content(parse_json(raw, path, DataError))
    if tokenizer_hash != manifest.tokenizer_hash:
        raise DataError(
            f"{path} has hash {tokenizer_hash[:12]}, the data was made with {manifest.tokenizer_hash[:12]}: "
            "put the right tokenizer back or prepare the data again"
        )
    if hashlib.sha256(raw).hexdigest() != manifest.tokenizer_sha256:
        raise DataError(f"{path}: its checksum differs, so it was damaged or edited by hand: prepare the data again")


def check_size(path: Path, shard: Shard, dtype: np.dtype) -> None:
    """Raises unless the file has as many bytes as the shard's tokens take."""
    wanted, size = shard.tokens * dtype.itemsize, size_of(path)
    if size != wanted:
        raise DataError(f"{path}: {size} bytes, {shard.tokens} tokens of {dtype.name} are {wanted}: damaged or foreign")


def check_template(folder: Path, manifest: Manifest) -> None:
    """Raises unless the folder's chat template is, byte for byte, the one that wrote its conversations."""
    if manifest.template_sha256 is None:
        return
    raw = read_bytes(folder / CHAT_TEMPLATE, DataError)
    if hashlib.sha256(raw).hexdigest() != manifest.template_sha256:
        raise DataError(f"{folder / CHAT_TEMPLATE}: its checksum differs, so it was edited: prepare the data again")


class DocumentTable(NamedTuple):
    """Where the documents of a shard begin, and of conversations which tokens are learned.

    Attributes:
        starts: ``int64[documents]``, the first token of each.
        learned: ``int64[parts, 2]``, first token and last + 1 of each part that is learned; ``None`` of other text.
    """

    starts: np.ndarray
    learned: np.ndarray | None


def document_table(path: Path, shard: Shard, *, masked: bool) -> DocumentTable:
    """The table of a shard's documents, once it is known to cut exactly the shard's tokens into documents."""
    schema = MASKED_DOCS if masked else DOCS
    try:
        with open_plain(path, DataError) as raw, pq.ParquetFile(raw) as file:
            if file.schema_arrow.remove_metadata() != schema:
                raise DataError(f"{path}: columns {file.schema_arrow.names}, needed {schema.names} of their types")
            table = file.read(columns=["start", "length", *(["learned"] if masked else [])])
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
    return DocumentTable(start, _learned(path, table, start, length) if masked else None)


def _learned(path: Path, table: pa.Table, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The learned parts of a shard, once they are known to follow one another within their documents."""
    column = table.column("learned").combine_chunks()
    counts = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten().to_numpy(zero_copy_only=False)
    if (counts % 2).any() or counts.sum() != len(values):
        raise DataError(f"{path}: learned must hold pairs of numbers: damaged or foreign")
    first, size = values.reshape(-1, 2).T
    owner = np.repeat(np.arange(len(counts)), counts // 2)
    parts = np.stack([start[owner] + first, start[owner] + first + size], 1)
    wrong = (first < 0) | (size < 1) | (first + size > length[owner])
    if wrong.any() or (parts[1:, 0] < parts[:-1, 1]).any():
        raise DataError(f"{path}: learned parts do not lie one after another within documents: damaged or foreign")
    return parts


def sums_of(folder: Path, shards: Iterable[Shard]) -> dict[Path, str]:
    """The SHA-256 that each file of ``shards`` in ``folder`` must have."""
    sums = {}
    for shard in shards:
        sums[folder / shard.tokens_name] = shard.tokens_sha256
        sums[folder / shard.docs_name] = shard.docs_sha256
    return sums


def size_of(path: Path) -> int:
    """Bytes of an ordinary file that can be opened."""
    with open_plain(path, DataError) as file:
        return os.fstat(file.fileno()).st_size


def verify_sums(folder: Path, sums: Mapping[Path, str], *, share: tuple[int, int] = (0, 1)) -> None:
    """Raises unless every file has its SHA-256; ``share=(n, N)``: process n of N hashes its part of the files.

    Where a user has said ``ADAPONDER_VERIFY=0``, nothing is read, and the first process says so.
    """
    number, processes = share
    if not 0 <= number < processes:
        raise InputError(f"share={share}: (number of this process, number of processes)")
    if not checksums_wanted():
        if number == 0:
            errors.print(f"{folder}: checksums are not verified (ADAPONDER_VERIFY=0)", soft_wrap=True)
        return
    files = list(sums)[number::processes]
    with_progress = _say_progress(folder, sum(map(size_of, files))) if number == 0 else None
    actual = sha256_of_each(files, DataError, advance=with_progress)
    wrong = [(path, sha) for path, sha in zip(files, actual, strict=True) if sha != sums[path]]
    if wrong:
        path, sha = wrong[0]
        more = f"; {len(wrong) - 1} more files likewise" if len(wrong) > 1 else ""
        raise DataError(
            f"{path}: checksum {sha[:12]}, the manifest says {sums[path][:12]}: damaged, prepare the data again{more}"
        )


def _say_progress(folder: Path, total: int) -> Callable[[int], None] | None:
    """Tells of a long wait: a line before it, and one each half minute with the share that is done."""
    if total < _LARGE:
        return None
    errors.print(
        f"{folder}: verifying checksums of {decimal(total)} (once per start; ADAPONDER_VERIFY=0 leaves it out)",
        soft_wrap=True,
    )
    lock, done, told = threading.Lock(), 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, told
        with lock:
            done += size
            if time.monotonic() - told > 30:
                told = time.monotonic()
                errors.print(f"{folder}: {done / total:.0%} verified", soft_wrap=True)

    return advance
