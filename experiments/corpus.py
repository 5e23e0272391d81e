"""Builds the open corpus: Python source of the wheels in ``corpus.lock``, read without installing anything.

    python -m experiments corpus --out data/open        # downloads, checks every sha256, writes corpus-NN.jsonl.xz
    adaponder prepare data/open --tokenizer train-bpe:16384 --out data/open-16384

``corpus.lock`` is a requirements file for pip with one pure-Python wheel per line: name, version, sha256, and in a
comment its licence and file name. A comment at the top has the expected number of documents and hash of all texts.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from adaponder.errors import InputError
from adaponder.files import replace_file, sha256_of
from adaponder.terminal import console

LOCK = Path(__file__).with_name("corpus.lock")
# Bytes of JSON per file, about 10 MB compressed.
_SHARD = 60_000_000

# SPDX names of the licences under which Python source is taken.
SOURCE_LICENCES = frozenset(
    {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "MIT", "PSF-2.0", "Python-2.0", "BSD", "PSF"}
)
# Permissive licences of compiled parts, allowed only beside a licence in ``SOURCE_LICENCES``.
_BESIDE = frozenset({"Apache-2.0 WITH LLVM-exception", "BSL-1.0", "Zlib", "CC0-1.0"})
# Folders of tests, and of vendored code, whose licence may be another than the package's.
_LEFT_OUT = {
    *("test", "tests", "testing", "_test", "_testing", "test_data", "testdata", "conftest", "__pycache__"),
    *("_vendor", "vendor", "_vendored", "vendored", "vendored_packages", "third_party"),
    *("externals", "extern", "_extern", "node_modules"),
}
_COPYLEFT = re.compile(r"\b[AL]?GPL|(General|Mozilla|Eclipse) Public Licen|\bMPL[ -]?[12v]|Creative Commons|\bCC[ -]BY")
_GENERATED = re.compile(r"auto(matically)?[- ]?generated|generated (by|from)|do not edit", re.IGNORECASE)
_LITERAL = re.compile(r"""^[\[({]*\s*(['"(\[{]|-?\d|0x)[^=]*[,\])}]+$""")
_SHORTEST, _LONGEST, _LONGEST_LINE = 200, 400_000, 400
# Minimum characters of the lines by which texts are compared, and the share of such lines in earlier texts above which
# a text is a near copy.
_COMPARED, _SEEN_SHARE = 20, 0.6


class Wheel(NamedTuple):
    """A wheel: one line of the lock file."""

    name: str
    version: str
    sha256: str
    licence: str
    filename: str


# The fields of ``Wheel`` in a line of the lock file.
_LINE = re.compile(r"([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})  # (.+); (\S+)")
_TOTALS = re.compile(r"^# documents: (\d+), contents: ([0-9a-f]{64})$", re.MULTILINE)


def read_lock(path: Path = LOCK) -> tuple[list[Wheel], tuple[int, str]]:
    """Returns a lock file's wheels, and the number of documents and the hash of all texts that a build must give."""
    text, wheels = path.read_text(encoding="utf-8"), []
    for line in (line for line in text.splitlines() if line.strip() and not line.startswith("#")):
        if (match := _LINE.fullmatch(line)) is None:
            raise InputError(f"{path}: cannot read the line {line!r}")
        wheels.append(wheel := Wheel(*match.groups()))
        if not is_permissive(wheel.licence):
            raise InputError(f"{path}: {wheel.name} has licence {wheel.licence}, which is not a permissive one")
    if (totals := _TOTALS.search(text)) is None:
        raise InputError(f"{path}: no line says '# documents: N, contents: SHA256'")
    return wheels, (int(totals[1]), totals[2])


def download(lock: Path, wheels: Sequence[Wheel], folder: Path) -> None:
    """Downloads missing wheels into ``folder`` with pip from its configured index; checks the sha256 of all wheels."""
    if any(not (folder / wheel.filename).is_file() for wheel in wheels):
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        # For any Python and platform, so that every machine gets the same file.
        words += ["--python-version", "3.12", "--implementation", "py", "--abi", "none", "--platform", "any"]
        result = subprocess.run([*words, "--require-hashes", "-r", str(lock), "-d", str(folder)], check=False)
        if result.returncode:
            raise InputError(f"{lock}: pip could not download the wheels; see above")
    for wheel in wheels:
        path = folder / wheel.filename
        if not path.is_file():
            raise InputError(f"{path}: pip downloaded another file of {wheel.name} {wheel.version}")
        if (sha256 := sha256_of(path)) != wheel.sha256:
            raise InputError(f"{path}: its sha256 is {sha256}, the lock file has {wheel.sha256}; delete the file")


def is_permissive(licence: str) -> bool:
    """Returns whether an SPDX expression is permissive: at least one OR alternative has only permissive AND parts."""
    for choice in re.split(r"\s+OR\s+", licence.strip()):
        parts = re.split(r"\s+AND\s+", choice.strip("() "))
        if all(part in SOURCE_LICENCES | _BESIDE for part in parts) and SOURCE_LICENCES & set(parts):
            return True
    return False


def is_source(path: PurePosixPath, text: str) -> bool:
    """Returns whether a file is the package's own code: not tests, vendored, generated or copyleft code, or data."""
    lines = text.splitlines()
    if _LEFT_OUT & set(path.parts) or re.match(r"test_|conftest", path.name) or path.stem.endswith("_test"):
        return False
    if not _SHORTEST <= len(text) <= _LONGEST or _COPYLEFT.search(text) or any(map(_GENERATED.search, lines[:20])):
        return False
    filled = [line.strip() for line in lines if line.strip()]
    literals = sum(bool(_LITERAL.match(line)) for line in filled)
    return max(map(len, lines)) <= _LONGEST_LINE and literals <= 0.5 * len(filled)


def source_files(wheel: Path) -> list[tuple[PurePosixPath, bytes]]:
    """Returns (path, content) of the Python files in a wheel, sorted by path."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".py"))
        return [(PurePosixPath(name), archive.read(name)) for name in names]


def collect(packages: Iterable[tuple[str, Iterable[tuple[PurePosixPath, bytes]]]]) -> list[dict[str, str]]:
    """Returns a document for each source file that is not a near copy; ``packages`` yields (name, files).

    A text is a near copy if most of its long lines are in earlier texts.
    """
    documents, seen = [], set[int]()
    for package, (path, content) in ((package, file) for package, files in packages for file in files):
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) >= _COMPARED}
        hashes = {int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest()) for line in lines}
        if hashes and len(hashes & seen) <= _SEEN_SHARE * len(hashes) and is_source(path, text):
            seen |= hashes
            documents.append({"text": text, "source": package})
    return documents


def contents_of(documents: Sequence[dict[str, str]]) -> str:
    """Returns a hash of the texts of all documents in order."""
    digests = (hashlib.sha256(document["text"].encode()).digest() for document in documents)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def shards(documents: Sequence[dict[str, str]], size: int = _SHARD) -> list[bytes]:
    """Joins documents into JSON Lines shards of about ``size`` bytes each."""
    parts = [bytearray()]
    for document in documents:
        if len(parts[-1]) >= size:
            parts.append(bytearray())
        parts[-1] += (json.dumps(document, ensure_ascii=False) + "\n").encode()
    return [bytes(part) for part in parts if part]


def build(out: Path, *, lock: Path = LOCK, wheels: Path | None = None) -> None:
    """Downloads and checks the locked wheels, and writes ``corpus-NN.jsonl.xz`` into ``out``.

    Raises if the number of documents or the hash of the texts differs from the lock file.
    """
    (locked, (count, contents)), folder = read_lock(lock), wheels or out / "wheels"
    download(lock, locked, folder)
    documents = collect((wheel.name, source_files(folder / wheel.filename)) for wheel in locked)
    if (len(documents), contents_of(documents)) != (count, contents):
        raise InputError(
            f"{lock}: {len(documents)} documents with contents {contents_of(documents)[:16]}, "
            f"the lock file has {count} with {contents[:16]}: the builder has changed"
        )
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        for number, content in enumerate(pool.map(partial(lzma.compress, preset=9), shards(documents))):
            replace_file(out / f"corpus-{number:02}.jsonl.xz", content)
    size = sum(len(document["text"].encode()) for document in documents)
    console.print(f"{out}: {len(documents):,} documents, {size / 1e6:.1f} MB, contents {contents[:16]}")
