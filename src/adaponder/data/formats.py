"""Readers, one per kind of file: each yields documents, and an error names the line or table row at fault."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from adaponder.data.compression import decompressed, inner_suffix, without_compression
from adaponder.data.manifest import DataError
from adaponder.data.megatron import megatron
from adaponder.errors import InputError
from adaponder.files import open_plain

# The most bytes of one document: it is held in memory several times over while it is encoded.
LONGEST = 2**30
_HEAD = 8192
# Rows of a table that are decompressed together, unless one alone is larger.
_BATCH_BYTES = 2**24


class Document(NamedTuple):
    text: str
    source: str


class Pretokenised(NamedTuple):
    """A document that is tokens already; ``origin`` says where it came from."""

    tokens: np.ndarray
    source: str
    origin: str


class Conversation(NamedTuple):
    """One conversation as text.

    Attributes:
        learned: (first, last + 1) of each part of ``text``, in characters, that the assistant wrote.
        origin: where it stands, for errors.
    """

    text: str
    source: str
    learned: tuple[tuple[int, int], ...]
    origin: str


AnyDocument = Document | Pretokenised | Conversation


@dataclass
class Counts:
    """Bytes of input files read so far (``read``), and how much was left out or mended, by kind."""

    read: int = 0
    hidden: int = 0
    special: int = 0
    binary: int = 0
    invalid_utf8: int = 0
    empty: int = 0

    def skipped(self) -> dict[str, int]:
        return {kind: count for kind, count in vars(self).items() if kind != "read"}


class InputPart(NamedTuple):
    """What is read at once of an input: a file, a pair of Megatron files, or a hub dataset.

    Attributes:
        argument: the input as the user named it.
        name: path within the input.
        reader: yields the documents.
        files: the files it is read from, none for a hub dataset.
        stamps: modification time, size and inode of each of ``files``.
    """

    argument: str
    name: str
    path: Path
    size: int
    reader: Callable[[InputPart, Counts], Iterator[AnyDocument]]
    files: tuple[Path, ...] = ()
    stamps: tuple[tuple[int, ...], ...] = ()


def _decoded(data: bytes, counts: Counts) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        counts.invalid_utf8 += 1
        return data.decode(errors="replace")


def mended(document: AnyDocument, counts: Counts) -> AnyDocument:
    """``document`` with U+FFFD for what is not valid Unicode: JSON may spell half a surrogate pair, a name any byte."""
    texts = {name: sound(value) for name, value in document._asdict().items() if isinstance(value, str)}
    if all(getattr(document, name) is value for name, value in texts.items()):
        return document
    counts.invalid_utf8 += 1
    return document._replace(**texts)


def sound(text: str) -> str:
    """``text`` itself where it is valid Unicode, else with U+FFFD for what is not."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def text(part: InputPart, counts: Counts) -> Iterator[Document]:
    with decompressed(part.path) as opened:
        content = _rest(opened.stream, part.path).removeprefix(BOM_UTF8)  # a mark of the encoding, no text
    yield Document(_decoded(content, counts), inner_suffix(part.path)[1:] or "text")


def stdlib_text(part: InputPart, counts: Counts) -> Iterator[Document]:
    yield from (document._replace(source="stdlib") for document in text(part, counts))


def text_unless_binary(part: InputPart, counts: Counts) -> Iterator[Document]:
    if looks_binary(part.path):
        counts.binary += 1
        return
    yield from text(part, counts)


def looks_binary(path: Path) -> bool:
    """Whether a file, decompressed, begins like a picture or a program and not like text."""
    with decompressed(path) as opened:
        head = opened.stream.read(_HEAD)
    # Text in an old encoding has some bytes that are not UTF-8; pictures and programs have mostly such.
    return b"\0" in head or 3 * head.decode(errors="replace").count("\ufffd") > len(head)


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


def jsonl(part: InputPart, counts: Counts) -> Iterator[Document]:
    default = without_compression(part.path).stem
    for line, where in lines(part, counts):
        document = _parse_line(line, default, where)
        del line  # a long one need not be held while its document is worked on
        yield document


def lines(part: InputPart, counts: Counts) -> Iterator[tuple[str, str]]:
    """(text, place) of every line of a .jsonl that is not blank; a mark of UTF-8 at its beginning is none of them."""
    start, number = counts.read, 0
    with decompressed(part.path) as opened:
        while line := opened.stream.readline(LONGEST + 1):
            number += 1
            line = line.removeprefix(BOM_UTF8) if number == 1 else line
            where = f"{part.path}, line {number}"
            if len(line) > LONGEST:
                raise DataError(_too_long(where))
            counts.read = start + opened.raw.tell()
            texts = [_decoded(line, counts)] if line and not line.isspace() else []
            del line
            if texts:
                yield texts.pop(), where  # nor held here


def _parse_line(line: str, default: str, where: str) -> Document:
    """The document of one line of a .jsonl; ``default`` is its source where the line names none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise DataError(f'{where}: a record must be an object with a string "text"')
    source = fields.get("source", default)
    if not isinstance(source, str):
        raise DataError(f'{where}: "source" must be a string')
    return Document(fields["text"], source)


def parquet(part: InputPart, counts: Counts) -> Iterator[Document]:
    start = counts.read
    try:
        with pq.ParquetFile(part.path) as file:
            columns = _columns(file.schema_arrow.names, part.path)
            rows, size = 0, sum(_group_bytes(file.metadata, columns))
            together = max(1, min(256, _BATCH_BYTES * file.metadata.num_rows // max(1, size)))
            for batch in file.iter_batches(batch_size=together, columns=columns):
                yield from _table_documents(batch, part.path, rows, counts)
                rows += batch.num_rows
                counts.read = start + part.size * rows // file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{part.path}: damaged or not a Parquet file ({error})") from None


def _group_bytes(about: Any, columns: list[str]) -> Iterator[int]:
    """Bytes of each chunk of the columns that are read, decompressed."""
    for group in range(about.num_row_groups):
        for column in range(about.num_columns):
            chunk = about.row_group(group).column(column)
            if chunk.path_in_schema in columns:
                yield chunk.total_uncompressed_size


def arrow(part: InputPart, counts: Counts) -> Iterator[Document]:
    """A data file of ``datasets.save_to_disk``: Arrow's stream format, for which ``datasets`` is not needed."""
    start, rows = counts.read, 0
    try:
        with open_plain(part.path, DataError) as raw, pa.ipc.open_stream(raw) as stream:
            columns = _columns(stream.schema.names, part.path)
            for batch in stream:
                together = max(1, min(256, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
                for first in range(0, batch.num_rows, together):
                    yield from _table_documents(
                        batch.select(columns).slice(first, together), part.path, rows + first, counts
                    )
                rows += batch.num_rows
                counts.read = start + raw.tell()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{part.path}: damaged or not an Arrow file ({error})") from None


def _columns(names: Iterable[str], where: Path) -> list[str]:
    columns = [name for name in ("text", "source") if name in names]
    if "text" not in columns:
        raise DataError(f"{where}: no column text, it has {', '.join(names)}")
    return columns


def _table_documents(batch: pa.RecordBatch, where: Path, first: int, counts: Counts) -> Iterator[Document]:
    """The documents of one piece of a table; texts are read as bytes, as Arrow does not make sure of UTF-8."""
    texts = _strings(batch.column("text"), "text", where)
    sources = _strings(batch.column("source"), "source", where) if "source" in batch.schema.names else None
    for row, text in enumerate(texts):
        if text is None:
            raise DataError(f"{where}, row {first + row}: text is null")
        if len(text) > LONGEST:
            raise DataError(_too_long(f"{where}, row {first + row}"))
        source = where.stem if sources is None else _decoded(sources[row] or b"", counts) or where.stem
        yield Document(_decoded(text, counts), source)


def _strings(column: pa.Array, name: str, where: Path) -> list[bytes | None]:
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise DataError(f"{where}: column {name} is {column.type}, strings are needed")
    return column.cast(pa.binary() if pa.types.is_string(column.type) else pa.large_binary()).to_pylist()


def hub(part: InputPart, counts: Counts) -> Iterator[Document]:
    """``hf:NAME[:CONFIG][:SPLIT]`` through the ``datasets`` library; the split is train unless named."""
    name, _, _ = parse_hub(part.argument)
    rows = load_hub(part.argument)
    _columns(rows.column_names, part.path)
    for number, row in enumerate(rows):
        if not isinstance(row["text"], str):
            raise DataError(f"{part.argument}, row {number}: text is not a string")
        yield Document(row["text"], str(row.get("source") or name))


def hub_version(part: InputPart) -> str:
    """What the ``datasets`` library calls this state of the data: another one has another name."""
    return str(getattr(load_hub(part.argument), "_fingerprint", ""))


def load_hub(argument: str) -> Any:
    """The rows of a hub dataset."""
    try:
        import datasets  # an extra
    except ImportError:
        raise InputError(f"{argument} needs the datasets library: pip install datasets") from None
    name, config, split = parse_hub(argument)
    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise InputError(f"{argument}: could not be loaded ({error})") from error


def parse_hub(argument: str) -> tuple[str, str | None, str]:
    """(name, config, split) of ``hf:NAME[:CONFIG][:SPLIT]``; a single word after the name that is a split is one."""
    name, *rest = argument.removeprefix("hf:").split(":")
    if not name or len(rest) > 2:
        raise InputError(f"input {argument}: hf:NAME, hf:NAME:CONFIG, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    if len(rest) == 1 and rest[0].partition("[")[0] in ("train", "validation", "test"):
        rest = ["", *rest]
    config, split = (*rest, "", "")[:2]
    return name, config or None, split or "train"


def megatron_documents(part: InputPart, counts: Counts) -> Iterator[Pretokenised]:
    start, read = counts.read, 0
    for number, tokens in enumerate(megatron(part.path)):
        yield Pretokenised(tokens, part.path.stem, f"{part.path.with_suffix('.bin')}, document {number}")
        read += tokens.nbytes
        counts.read = start + read
