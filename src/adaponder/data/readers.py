"""Reads the documents of each kind of input. An error names the file, and the line or row that caused the error."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from adaponder.data import puzzles
from adaponder.data.manifest import DataError
from adaponder.errors import AdaPonderError, InputError
from adaponder.files import open_plain

# Maximum bytes of one document: several copies of a document are in memory while it is encoded.
LONGEST = 2**30
_HEAD = 8192
# Rows of a table that are in memory at a time.
_ROWS = 16
_DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": lambda raw: io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 2**17),
}
COMPRESSIONS = tuple(_DECOMPRESSORS)
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)


class Document(NamedTuple):
    """One document: its text, or the tokens of a file that was tokenized elsewhere.

    Attributes:
        learned: character range (first, last + 1) of each learned span of ``text``; ``None`` if all text is learned.
        origin: file and number of the line, row or document, for error messages.
    """

    text: str
    source: str
    tokens: np.ndarray | None = None
    learned: tuple[tuple[int, int], ...] | None = None
    origin: str = ""

    @property
    def content(self) -> str | np.ndarray:
        """Returns the text, or the tokens of a tokenized document."""
        return self.text if self.tokens is None else self.tokens


Record = tuple[dict[str, Any], str]  # fields by name, and for errors the file with the line or row


@dataclass
class Counts:
    """Bytes and documents read so far, and the number of documents skipped or repaired, by kind."""

    read: int = 0
    documents: int = 0
    hidden: int = 0
    special: int = 0
    binary: int = 0
    invalid_utf8: int = 0
    empty: int = 0

    def skipped(self) -> dict[str, int]:
        return {kind: count for kind, count in vars(self).items() if kind not in ("read", "documents")}


class InputPart(NamedTuple):
    """One part of an input: a file, a pair of Megatron files, a hub dataset or a puzzle.

    Attributes:
        argument: the input as the user named it.
        name: path of the part within the input.
        files: the files to read; empty for a hub dataset or a puzzle.
        stamps: (modification time, size, inode) of each of ``files``.
        records: function that yields the records of the part; ``None`` for a part without records, such as a text file.
    """

    argument: str
    name: str
    path: Path
    size: int
    reader: Callable[[InputPart, Counts], Iterator[Document]]
    files: tuple[Path, ...] = ()
    stamps: tuple[tuple[int, ...], ...] = ()
    records: Callable[[InputPart, Sequence[str], Counts], Iterator[Record]] | None = None


def compression_of(path: Path) -> str:
    """Returns the last suffix of a compressed file, in lower case; empty for a file that is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def without_compression(path: Path) -> Path:
    """Returns the path without a compression suffix: ``part.jsonl`` for ``part.jsonl.gz``."""
    return path.with_suffix("") if compression_of(path) else path


def inner_suffix(path: Path) -> str:
    """Returns the suffix of the content, in lower case: ``.jsonl`` for ``part.jsonl`` and for ``part.JSONL.gz``."""
    return without_compression(path).suffix.lower()


@contextlib.contextmanager
def decompressed(path: Path, error: type[AdaPonderError] = DataError) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Context manager that yields (raw file, decompressed stream); the raw file's position measures progress.

    A damaged or truncated file raises ``error``.
    """
    compression = compression_of(path)
    with open_plain(path, error) as raw:
        try:
            yield raw, _DECOMPRESSORS[compression](raw) if compression else raw
        except _DAMAGE as problem:
            fault = f"damaged or truncated {compression} file" if compression else "cannot be read"
            raise error(f"{path}: {fault} ({problem})") from None


def text(part: InputPart, counts: Counts) -> Iterator[Document]:
    """Yields a text file as one document, without the byte-order mark of UTF-8."""
    with decompressed(part.path) as (_, stream):
        content = stream.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise _too_long(str(part.path))
    source = "stdlib" if part.argument == "stdlib" else inner_suffix(part.path)[1:] or "text"
    yield Document(_decoded(content.removeprefix(BOM_UTF8), counts), source)


def text_unless_binary(part: InputPart, counts: Counts) -> Iterator[Document]:
    """Yields a text file as one document, or skips and counts a binary file."""
    if looks_binary(part.path):
        counts.binary += 1
        return
    yield from text(part, counts)


def looks_binary(path: Path) -> bool:
    """Returns whether a file, decompressed, begins like an image or a program rather than like text."""
    with decompressed(path) as (_, stream):
        head = stream.read(_HEAD)
    # Text in an old encoding has a few bytes that are not UTF-8; images and programs consist mostly of such bytes.
    return b"\0" in head or 3 * head.decode(errors="replace").count("\ufffd") > len(head)


def repaired(document: Document, counts: Counts) -> Document:
    """Replaces lone surrogates, which JSON and undecodable file names may hold, by U+FFFD; counts changed documents."""
    text, source = valid_unicode(document.text), valid_unicode(document.source)
    if text is document.text and source is document.source:
        return document
    counts.invalid_utf8 += 1
    return document._replace(text=text, source=source)


def valid_unicode(text: str) -> str:
    """Returns ``text`` itself if it is valid Unicode, else a copy with U+FFFD for lone surrogates."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _decoded(data: bytes, counts: Counts) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        counts.invalid_utf8 += 1
        return data.decode(errors="replace")


def _too_long(origin: str) -> DataError:
    return DataError(
        f"{origin}: longer than {LONGEST:,} bytes, the maximum of one document: split it into documents, "
        'one {"text": …} per line of a .jsonl'
    )


def record_documents(part: InputPart, counts: Counts) -> Iterator[Document]:
    """Yields a document for each record, from its fields ``text`` and optionally ``source``."""
    default = parse_hub(part.argument)[0] if part.records is hub else without_compression(part.path).stem
    for fields, origin in records(part, ("text",), counts):
        source = fields.get("source", default)
        if part.records is not jsonl:  # in a table the source may be null
            source = str(source or default)
        if not isinstance(fields["text"], str):
            raise DataError(f'{origin}: "text" must be a string')
        if not isinstance(source, str):
            raise DataError(f'{origin}: "source" must be a string')
        yield Document(fields["text"], source)


def records(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[Record]:
    """Yields each record with its file and line (or row); raises if a record lacks one of the fields ``names``."""
    if part.records is None:
        raise InputError(
            f"input {part.argument}: {part.name} holds no records; --chat reads .jsonl, .parquet, saved datasets and "
            "hf:NAME"
        )
    for fields, origin in part.records(part, names, counts):
        if missing := [name for name in names if name not in fields]:
            raise DataError(f"{origin}: no field {missing[0]!r}, it has {', '.join(map(str, fields))}")
        yield fields, origin


def jsonl(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[Record]:
    """Yields the objects of a .jsonl file, line by line. Blank lines and a byte-order mark are skipped."""
    start, number = counts.read, 0
    with decompressed(part.path) as (raw, stream):
        while line := stream.readline(LONGEST + 1):
            number += 1
            line = line.removeprefix(BOM_UTF8) if number == 1 else line
            origin = f"{part.path}, line {number}"
            if len(line) > LONGEST:
                raise _too_long(origin)
            counts.read = start + raw.tell()
            if not line or line.isspace():
                continue
            try:
                fields = json.loads(_decoded(line, counts))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{origin}: not JSON ({error})") from None
            if not isinstance(fields, dict):
                raise DataError(f"{origin}: a record must be an object")
            del line  # a long line need not stay in memory while its document is encoded
            yield fields, origin


def table(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[Record]:
    """Yields the rows of a .parquet file, or of a data file of ``datasets.save_to_disk`` (Arrow's stream format)."""
    start, row, is_parquet = counts.read, 0, part.path.suffix.lower() == ".parquet"
    try:
        with open_plain(part.path, DataError) as raw:
            opened: Any = pq.ParquetFile(raw) if is_parquet else pa.ipc.open_stream(raw)
            present = opened.schema_arrow.names if is_parquet else opened.schema.names
            columns = [name for name in dict.fromkeys((*names, "source")) if name in present]
            if missing := [name for name in names if name not in present]:
                raise DataError(f"{part.path}: no column {missing[0]!r}, it has {', '.join(present)}")
            for batch in opened.iter_batches(_ROWS, columns=columns) if is_parquet else _slices(opened, columns):
                for values in zip(*map(_values, batch.columns), strict=True):
                    origin = f"{part.path}, row {row}"
                    if any(isinstance(value, bytes) and len(value) > LONGEST for value in values):
                        raise _too_long(origin)
                    texts = (_decoded(value, counts) if isinstance(value, bytes) else value for value in values)
                    yield dict(zip(columns, texts, strict=True)), origin
                    row += 1
                counts.read = start + (part.size * row // opened.metadata.num_rows if is_parquet else raw.tell())
    except (OSError, pa.ArrowException) as error:
        kind = "a Parquet" if is_parquet else "an Arrow"
        raise DataError(f"{part.path}: damaged or not {kind} file ({error})") from None


def _slices(stream: Iterable[pa.RecordBatch], columns: list[str]) -> Iterator[pa.RecordBatch]:
    for batch in stream:
        yield from (batch.select(columns).slice(first, _ROWS) for first in range(0, batch.num_rows, _ROWS))


def _values(column: pa.Array) -> list[Any]:
    """Returns a column as Python values; strings become bytes, because Arrow does not check that they are UTF-8."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return column.to_pylist()


def hub(part: InputPart, names: Sequence[str], counts: Counts) -> Iterator[Record]:
    """Yields the rows of ``hf:NAME[:CONFIG][:SPLIT]``, loaded by ``datasets``; the default split is train."""
    for number, row in enumerate(load_hub(part.argument)):
        yield row, f"{part.argument}, row {number}"


def load_hub(argument: str) -> Any:
    """Loads a hub dataset; its ``_fingerprint`` identifies this version of the data."""
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
    """Returns (name, config, split) of ``hf:NAME[:CONFIG][:SPLIT]``; ``hf:NAME:test`` has a split and no config."""
    name, *rest = argument.removeprefix("hf:").split(":")
    if not name or len(rest) > 2:
        raise InputError(f"input {argument}: use hf:NAME, hf:NAME:CONFIG, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    if len(rest) == 1 and rest[0].partition("[")[0] in ("train", "validation", "test"):
        rest = ["", *rest]
    config, split = (*rest, "", "")[:2]
    return name, config or None, split or "train"


_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def megatron(part: InputPart, counts: Counts) -> Iterator[Document]:
    """Yields the documents of a Megatron ``MMapIndexedDataset``, a pair of .idx and .bin."""
    index, data = part.files
    dtype, starts, bounds = _megatron_index(index, data)
    tokens = np.memmap(data, dtype, "r") if starts[-1] else np.empty(0, dtype)
    for number, (first, last) in enumerate(pairwise(bounds.tolist())):
        document = np.array(tokens[starts[first] : starts[last]])
        counts.read += document.nbytes
        yield Document("", part.path.stem, tokens=document, origin=f"{data}, document {number}")


def _megatron_index(index: Path, data: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Returns (token type, starts, bounds); raises if the files disagree.

    Sequence i has the tokens ``starts[i] … starts[i + 1] - 1``, and document i has the sequences
    ``bounds[i] … bounds[i + 1] - 1``.
    """
    with open_plain(index, DataError) as file:
        raw = file.read()
    if raw[:9] != _MAGIC or len(raw) < 34 or int.from_bytes(raw[9:17], "little") != 1:
        raise DataError(f"{index}: not a Megatron MMapIndexedDataset index of version 1")
    if raw[17] not in _TOKEN_TYPES:
        raise DataError(f"{index}: type code {raw[17]}, tokens must be integers")
    dtype = np.dtype(_TOKEN_TYPES[raw[17]])
    sequences, documents = (int.from_bytes(raw[at : at + 8], "little") for at in (18, 26))
    if len(raw) < 34 + 12 * sequences + 8 * documents:
        raise DataError(f"{index}: truncated: too short for {sequences} sequences and {documents} document bounds")
    sizes = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences)
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if (sizes < 0).any() or (pointers != starts[:-1] * dtype.itemsize).any():
        raise DataError(f"{index}: sequences do not follow one another")
    if (np.diff(bounds) < 0).any() or (documents and (bounds[0] != 0 or bounds[-1] != sequences)):
        raise DataError(f"{index}: documents do not follow one another")
    tokens = int(starts[-1])
    if (size := data.stat().st_size) != tokens * dtype.itemsize:
        raise DataError(f"{data}: {size} bytes, but {tokens} tokens of {dtype.name} take {tokens * dtype.itemsize}")
    return dtype, starts, bounds


def puzzle(part: InputPart, counts: Counts) -> Iterator[Document]:
    """Yields the documents of a puzzle (see :mod:`adaponder.data.puzzles`) without counting bytes: no file is read."""
    name, settings = part.argument.partition(":")[0], puzzles.settings_of(part.argument)
    for words in puzzles.documents(settings):
        learned = None
        if settings.answers:
            starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
            learned = tuple(
                (starts[question.place], starts[question.place] + len(question.answer))
                for question in puzzles.questions(words)
            )
        yield Document(" ".join(words), name, learned=learned, origin=part.argument)
