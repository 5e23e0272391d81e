"""Reads the fields of records: lines of a .jsonl, rows of a table; each comes with words that say where it stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adaponder.data import formats
from adaponder.data.formats import Counts, InputPart
from adaponder.data.manifest import DataError
from adaponder.errors import InputError
from adaponder.files import open_plain

_ROWS = 256


def records(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[tuple[dict[str, Any], str]]:
    """(fields, place) of every record of a ``.jsonl``, ``.parquet``, ``.arrow`` or hub dataset; each has all ``names``.

    A record's ``source`` is read too where it has one.
    """
    if part.reader not in _READERS:
        raise InputError(
            f"input {part.argument}: {part.name} holds no records; --chat reads .jsonl, .parquet, saved datasets and "
            "hf:NAME"
        )
    for fields, place in _READERS[part.reader](part, names, counts):
        if missing := [name for name in names if name not in fields]:
            raise DataError(f"{place}: no field {missing[0]!r}, it has {', '.join(map(str, fields))}")
        yield fields, place


def _jsonl(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[tuple[dict[str, Any], str]]:
    for line, place in formats.lines(part, counts):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise DataError(f"{place}: a record must be an object")
        yield fields, place


def _parquet(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[tuple[dict[str, Any], str]]:
    start = counts.read
    try:
        with pq.ParquetFile(part.path) as file:
            rows, columns = 0, _wanted(file.schema_arrow.names, names)
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
                yield from _numbered(batch, part, rows)
                rows += batch.num_rows
                counts.read = start + part.size * rows // file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{part.path}: damaged or not a Parquet file ({error})") from None


def _arrow(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[tuple[dict[str, Any], str]]:
    start, rows = counts.read, 0
    try:
        with open_plain(part.path, DataError) as raw, pa.ipc.open_stream(raw) as stream:
            columns = _wanted(stream.schema.names, names)
            for batch in stream:
                yield from _numbered(batch.select(columns), part, rows)
                rows += batch.num_rows
                counts.read = start + raw.tell()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{part.path}: damaged or not an Arrow file ({error})") from None


def _hub(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[tuple[dict[str, Any], str]]:
    for number, row in enumerate(formats.load_hub(part.argument)):
        yield row, f"{part.argument}, row {number}"


def _wanted(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns to read; where one of ``names`` is missing, all, so that an error can list them."""
    return [name for name in (*names, "source") if name in columns] if set(names) <= set(columns) else list(columns)


def _numbered(batch: pa.RecordBatch, part: InputPart, first: int) -> Iterator[tuple[dict[str, Any], str]]:
    for row, fields in enumerate(batch.to_pylist()):
        yield fields, f"{part.path}, row {first + row}"


_READERS: dict[Callable[..., Any], Callable[..., Iterator[tuple[dict[str, Any], str]]]] = {
    formats.jsonl: _jsonl,
    formats.parquet: _parquet,
    formats.arrow: _arrow,
    formats.hub: _hub,
}
