"""How each kind of file is read: as documents one after another, with an error that names the place of a bad one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from adaponder.data.manifest import DataError
from adaponder.data.megatron import megatron
from adaponder.data.packing import inner_suffix, unpacked, without_packing
from adaponder.errors import InputError
from adaponder.files import open_plain

# A document is held in memory several times over while it is encoded; a longer one is not one that a model reads.
LONGEST = 2**30
_HEAD = 8192
# Rows of a table that are unpacked together, unless one alone is larger.
_BATCH_BYTES = 2**24


class Document(NamedTuple):
    text: str
    source: str


class Pretokenised(NamedTuple):
    """A document that is tokens already; ``origin`` says where it came from."""

    tokens: np.ndarray
    source: str
    origin: str


@dataclass
class Tally:
    """What was read so far (``read``: bytes of input files), and what was left out or mended."""

    read: int = 0
    hidden: int = 0
    special: int = 0
    binary: int = 0
    invalid_utf8: int = 0
    empty: int = 0

    def skipped(self) -> dict[str, int]:
        return {kind: count for kind, count in vars(self).items() if kind != "read"}


class Leaf(NamedTuple):
    """One file (or hub dataset) of an input: ``name`` is its place within the input, ``reader`` how it is read.

    ``files`` are those it is read from, none for a hub dataset, and ``stamps`` says of each when it was changed last.
    """

    given: str
    name: str
    path: Path
    size: int
    reader: Callable[[Leaf, Tally], Iterator[Document | Pretokenised]]
    files: tuple[Path, ...] = ()
    stamps: tuple[tuple[int, ...], ...] = ()


def _decoded(data: bytes, tally: Tally) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        tally.invalid_utf8 += 1
        return data.decode(errors="replace")


def mended(record: Document | Pretokenised, tally: Tally) -> Document | Pretokenised:
    """``record`` with U+FFFD for what no UTF-8 can hold: JSON may spell half a surrogate pair, a file name any byte."""
    sound = {name: _sound(value) for name, value in record._asdict().items() if isinstance(value, str)}
    if all(getattr(record, name) is value for name, value in sound.items()):
        return record
    tally.invalid_utf8 += 1
    return record._replace(**sound)


def _sound(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def text(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    with unpacked(leaf.path) as opened:
        content = _rest(opened.stream, leaf.path)
    yield Document(_decoded(content, tally), inner_suffix(leaf.path)[1:] or "text")


def stdlib_text(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    yield from (document._replace(source="stdlib") for document in text(leaf, tally))


def text_unless_binary(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    with unpacked(leaf.path) as opened:
        head = opened.stream.read(_HEAD)
    # Text in an old encoding has some bytes that are not UTF-8; pictures and programs have mostly such.
    if b"\0" in head or 3 * head.decode(errors="replace").count("\ufffd") > len(head):
        tally.binary += 1
        return
    yield from text(leaf, tally)


def _rest(stream: IO[bytes], path: Path) -> bytes:
    content = stream.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise DataError(_too_long(str(path)))
    return content


def _too_long(where: str) -> str:
    return (
        f"{where}: longer than {LONGEST:,} bytes, the most that is taken as one document: cut it into documents, "
        'one {"text": …} per line of a .jsonl'
    )


def jsonl(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    default, start, number = without_packing(leaf.path).stem, tally.read, 0
    with unpacked(leaf.path) as opened:
        while line := opened.stream.readline(LONGEST + 1):
            number += 1
            where = f"{leaf.path}, line {number}"
            if len(line) > LONGEST:
                raise DataError(_too_long(where))
            tally.read = start + opened.raw.tell()
            record = None if line.isspace() else _record(_decoded(line, tally), default, where)
            del line  # a long one need not be held while its document is worked on
            if record is not None:
                yield record


def _record(line: str, default: str, where: str) -> Document:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise DataError(f'{where}: a record must be an object with a string "text"')
    source = found.get("source", default)
    if not isinstance(source, str):
        raise DataError(f'{where}: "source" must be a string')
    return Document(found["text"], source)


def parquet(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    start = tally.read
    try:
        with pq.ParquetFile(leaf.path) as file:
            columns = _columns(file.schema_arrow.names, leaf.path)
            rows, size = 0, sum(_group_bytes(file.metadata, columns))
            together = max(1, min(256, _BATCH_BYTES * file.metadata.num_rows // max(1, size)))
            for batch in file.iter_batches(batch_size=together, columns=columns):
                yield from _rows(batch, leaf.path, rows, tally)
                rows += batch.num_rows
                tally.read = start + leaf.size * rows // file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{leaf.path}: damaged or not a Parquet file ({error})") from None


def _group_bytes(about: Any, columns: list[str]) -> Iterator[int]:
    """Unpacked bytes of each chunk of the columns that are read."""
    for group in range(about.num_row_groups):
        for column in range(about.num_columns):
            chunk = about.row_group(group).column(column)
            if chunk.path_in_schema in columns:
                yield chunk.total_uncompressed_size


def arrow(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    """A data file of ``datasets.save_to_disk``: Arrow's stream format, for which ``datasets`` is not needed."""
    start, rows = tally.read, 0
    try:
        with open_plain(leaf.path, DataError) as raw, pa.ipc.open_stream(raw) as stream:
            columns = _columns(stream.schema.names, leaf.path)
            for batch in stream:
                together = max(1, min(256, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
                for first in range(0, batch.num_rows, together):
                    yield from _rows(batch.select(columns).slice(first, together), leaf.path, rows + first, tally)
                rows += batch.num_rows
                tally.read = start + raw.tell()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{leaf.path}: damaged or not an Arrow file ({error})") from None


def _columns(names: Iterable[str], where: Path) -> list[str]:
    found = [name for name in ("text", "source") if name in names]
    if "text" not in found:
        raise DataError(f"{where}: no column text, it has {', '.join(names)}")
    return found


def _rows(batch: pa.RecordBatch, where: Path, first: int, tally: Tally) -> Iterator[Document]:
    """Read as bytes: Arrow's strings are UTF-8 by promise only."""
    texts = _strings(batch.column("text"), "text", where)
    sources = _strings(batch.column("source"), "source", where) if "source" in batch.schema.names else None
    for row, text in enumerate(texts):
        if text is None:
            raise DataError(f"{where}, row {first + row}: text is null")
        if len(text) > LONGEST:
            raise DataError(_too_long(f"{where}, row {first + row}"))
        source = where.stem if sources is None else _decoded(sources[row] or b"", tally) or where.stem
        yield Document(_decoded(text, tally), source)


def _strings(column: pa.Array, name: str, where: Path) -> list[bytes | None]:
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise DataError(f"{where}: column {name} is {column.type}, strings are needed")
    return column.cast(pa.binary() if pa.types.is_string(column.type) else pa.large_binary()).to_pylist()


def hub(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    """``hf:NAME[:CONFIG][:SPLIT]`` through the ``datasets`` library; the split is train unless named."""
    name, _, _ = parse_hub(leaf.given)
    rows = _load(leaf.given)
    _columns(rows.column_names, leaf.path)
    for number, row in enumerate(rows):
        if not isinstance(row["text"], str):
            raise DataError(f"{leaf.given}, row {number}: text is not a string")
        yield Document(row["text"], str(row.get("source") or name))


def hub_version(leaf: Leaf) -> str:
    """What the ``datasets`` library calls this state of the data: another one has another name."""
    return str(getattr(_load(leaf.given), "_fingerprint", ""))


def _load(given: str) -> Any:
    try:
        import datasets  # an extra
    except ImportError:
        raise InputError(f"{given} needs the datasets library: pip install datasets") from None
    name, config, split = parse_hub(given)
    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise InputError(f"{given}: could not be loaded ({error})") from error


def parse_hub(given: str) -> tuple[str, str | None, str]:
    """(name, config, split) of ``hf:NAME[:CONFIG][:SPLIT]``; a single word after the name that is a split is one."""
    name, *rest = given.removeprefix("hf:").split(":")
    if not name or len(rest) > 2:
        raise InputError(f"input {given}: hf:NAME, hf:NAME:CONFIG, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    if len(rest) == 1 and rest[0].partition("[")[0] in ("train", "validation", "test"):
        rest = ["", *rest]
    config, split = (*rest, "", "")[:2]
    return name, config or None, split or "train"


def megatron_documents(leaf: Leaf, tally: Tally) -> Iterator[Pretokenised]:
    start, read = tally.read, 0
    for number, tokens in enumerate(megatron(leaf.path)):
        yield Pretokenised(tokens, leaf.path.stem, f"{leaf.path.with_suffix('.bin')}, document {number}")
        read += tokens.nbytes
        tally.read = start + read
