"""Reads documents that Megatron tokenised: a pair of .bin and .idx files, checked to agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from adaponder.data.manifest import DataError
from adaponder.files import open_plain

_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def megatron(path: Path) -> Iterator[np.ndarray]:
    """The documents of a Megatron ``MMapIndexedDataset`` as they were tokenised; ``path`` is its .idx, .bin or stem."""
    stem = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
    index, data = stem.with_name(stem.name + ".idx"), stem.with_name(stem.name + ".bin")
    dtype, sizes, bounds = _megatron_index(index, data)
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    tokens = np.memmap(data, dtype, "r") if len(sizes) and ends[-1] else np.empty(0, dtype)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield np.array(tokens[starts[first] : ends[last - 1]] if last > first else tokens[:0])


def _megatron_index(index: Path, data: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """(token type, tokens per sequence, bounds of documents in sequences), once index and data are known to agree."""
    for path in (index, data):
        if not path.is_file():
            raise DataError(f"{path} is missing: Megatron data is a pair of .bin and .idx")
    with open_plain(index, DataError) as file:
        raw = file.read()
    if raw[:9] != _MAGIC or len(raw) < 34 or int.from_bytes(raw[9:17], "little") != 1:
        raise DataError(f"{index}: not a Megatron MMapIndexedDataset index of version 1")
    if raw[17] not in _MEGATRON:
        raise DataError(f"{index}: type code {raw[17]}, tokens must be integers")
    dtype = np.dtype(_MEGATRON[raw[17]])
    sequences, documents = (int.from_bytes(raw[at : at + 8], "little") for at in (18, 26))
    if len(raw) < 34 + 12 * sequences + 8 * documents:
        raise DataError(f"{index}: truncated: {sequences} sequences and {documents} bounds of documents do not fit")
    sizes = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences)
    ends = np.cumsum(sizes, dtype=np.int64)
    if (sizes < 0).any() or (pointers != (ends - sizes) * dtype.itemsize).any():
        raise DataError(f"{index}: sequences do not follow one another")
    if (np.diff(bounds) < 0).any() or (documents and (bounds[0] != 0 or bounds[-1] != sequences)):
        raise DataError(f"{index}: documents do not follow one another")
    wanted = (int(ends[-1]) if sequences else 0) * dtype.itemsize
    if data.stat().st_size != wanted:
        raise DataError(f"{data}: {data.stat().st_size} bytes, {wanted // dtype.itemsize} of {dtype.name} are {wanted}")
    return dtype, sizes, bounds
