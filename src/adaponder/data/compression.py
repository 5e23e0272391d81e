"""Files opened for reading, compressed (.gz, .xz, .bz2, .zst) or not; one that is damaged or cut off is an error."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from adaponder.data.manifest import DataError
from adaponder.errors import AdaPonderError, InputError
from adaponder.files import open_plain

COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)
# What zstandard decompresses at once is bounded by what it is given: a block of 4 bytes may stand for 128 KiB.
_ZSTD_STEP = 2**12


class Opened(NamedTuple):
    """``raw``: the file itself, whose position tells how far reading is; ``stream``: its content, decompressed."""

    raw: IO[bytes]
    stream: IO[bytes]


def compression_of(path: Path) -> str:
    """The last suffix of a compressed file, in lower case; empty for one that is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def inner_suffix(path: Path) -> str:
    """The suffix of what a file holds, in lower case: ``.jsonl`` of ``part.jsonl`` as of ``part.JSONL.gz``."""
    return without_compression(path).suffix.lower()


def without_compression(path: Path) -> Path:
    """The path without the suffix of its compression: ``part.jsonl`` of ``part.jsonl.gz``."""
    return path.with_suffix("") if compression_of(path) else path


@contextlib.contextmanager
def decompressed(path: Path, error: type[AdaPonderError] = DataError) -> Iterator[Opened]:
    """An ordinary file opened for reading, decompressed; what is damaged is named, also where its end is missing."""
    with open_plain(path, error) as raw:
        try:
            yield Opened(raw, _stream(path, raw))
        except _DAMAGE as problem:
            what = f"damaged or not a whole {compression_of(path)} file" if compression_of(path) else "cannot be read"
            raise error(f"{path}: {what} ({problem})") from None


def _stream(path: Path, raw: IO[bytes]) -> Any:
    match compression_of(path):
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".zst":
            return io.BufferedReader(_Zstd(path, raw), 2**17)
        case _:
            return raw


class _Zstd(io.RawIOBase):
    """Frames of zstandard one after another. Its own reader takes a file that was cut off for a shorter one."""

    def __init__(self, path: Path, raw: IO[bytes]):
        try:
            import zstandard
        except ImportError:
            raise InputError(f"{path}: .zst needs zstandard: pip install zstandard") from None
        self._frame, self._damage = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._raw, self._decoder, self._ready = raw, None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._next_input()
            if not compressed:
                return 0
            self._decoder = self._decoder or self._frame()
            try:
                self._ready = self._decoder.decompress(compressed)
            except self._damage as problem:
                raise OSError(str(problem)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _next_input(self) -> bytes:
        """More compressed bytes for the frame at hand, or those of the next one; none at the end of the last."""
        rest = b""
        if self._decoder is not None and self._decoder.eof:
            rest, self._decoder = self._decoder.unused_data, None
        compressed = rest or self._raw.read(_ZSTD_STEP)
        if not compressed and self._decoder is not None:
            raise EOFError("its end is missing")
        return compressed
