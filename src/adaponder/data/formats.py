"""How each kind of file is read: as documents one after another, with an error that names the place of a bad one."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from adaponder.data.manifest import DataError
from adaponder.errors import InputError

_HEAD = 8192
_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


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
    binary: int = 0
    invalid_utf8: int = 0
    empty: int = 0

    def skipped(self) -> dict[str, int]:
        return {kind: count for kind, count in vars(self).items() if kind != "read"}


class Leaf(NamedTuple):
    """One file (or hub dataset) of an input: ``name`` is its place within the input, ``reader`` how it is read."""

    given: str
    name: str
    path: Path
    size: int
    reader: Callable[[Leaf, Tally], Iterator[Document | Pretokenised]]


def _decoded(data: bytes, tally: Tally) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        tally.invalid_utf8 += 1
        return data.decode(errors="replace")


def mended(document: Document, tally: Tally) -> Document:
    """JSON may spell half a surrogate pair, which no UTF-8 can hold."""
    try:
        document.text.encode()
    except UnicodeEncodeError:
        tally.invalid_utf8 += 1
        text = document.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return document._replace(text=text)
    return document


def text(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    yield Document(_decoded(leaf.path.read_bytes(), tally), leaf.path.suffix[1:] or "text")


def stdlib_text(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    yield Document(_decoded(leaf.path.read_bytes(), tally), "stdlib")


def text_unless_binary(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    with leaf.path.open("rb") as file:
        head = file.read(_HEAD)
    # Text in an old encoding has some bytes that are not UTF-8; compressed data has mostly such.
    if b"\0" in head or 3 * head.decode(errors="replace").count("\ufffd") > len(head):
        tally.binary += 1
        return
    yield from text(leaf, tally)


def without_packing(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (".gz", ".xz", ".zst") else path


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # pyright: ignore[reportReturnType]  # it reads as any binary file does
    if path.suffix == ".xz":
        return lzma.LZMAFile(raw)
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise InputError(f"{path}: .zst needs zstandard: pip install zstandard") from None
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    return raw


def jsonl(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    default, start, number = without_packing(leaf.path).stem, tally.read, 0
    with leaf.path.open("rb") as raw:
        try:
            for number, line in enumerate(_unpacked(leaf.path, raw), 1):
                tally.read = start + raw.tell()
                if not line.isspace():
                    yield _record(_decoded(line, tally), default, f"{leaf.path}, line {number}")
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{leaf.path}: damaged after line {number} ({error})") from None
        except Exception as error:
            # zstandard's own error can only be named where zstandard is installed.
            if type(error).__name__ != "ZstdError":
                raise
            raise DataError(f"{leaf.path}: damaged after line {number} ({error})") from None


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
            rows = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from _rows(batch, leaf.path, rows, tally)
                rows += batch.num_rows
                tally.read = start + leaf.size * rows // file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{leaf.path}: damaged or not a Parquet file ({error})") from None


def arrow(leaf: Leaf, tally: Tally) -> Iterator[Document]:
    """A data file of ``datasets.save_to_disk``: Arrow's stream format, for which ``datasets`` is not needed."""
    start, rows = tally.read, 0
    try:
        with leaf.path.open("rb") as raw, pa.ipc.open_stream(raw) as stream:
            columns = _columns(stream.schema.names, leaf.path)
            for batch in stream:
                yield from _rows(batch.select(columns), leaf.path, rows, tally)
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
    try:
        import datasets  # an extra
    except ImportError:
        raise InputError(f"{leaf.given} needs the datasets library: pip install datasets") from None
    name, config, split = parse_hub(leaf.given)
    try:
        rows: Any = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise InputError(f"{leaf.given}: could not be loaded ({error})") from error
    _columns(rows.column_names, leaf.path)
    for number, row in enumerate(rows):
        if not isinstance(row["text"], str):
            raise DataError(f"{leaf.given}, row {number}: text is not a string")
        yield Document(row["text"], str(row.get("source") or name))


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
    raw = index.read_bytes()
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
