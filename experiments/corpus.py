"""Builds the open corpus: Python source of the wheels in ``corpus.lock``, read without installing anything.

    python -m experiments corpus --out data/open        # downloads, checks every sha256, writes corpus-NN.jsonl.xz
    adaponder prepare data/open --tokenizer train-bpe:16384 --out data/open-16384

``corpus.lock`` is a requirements file for pip with one pure-Python wheel per line: name, version, sha256, and as a
comment its licence. Its first lines hold the number of documents and the hash of all texts, which a build must reach.
"""

from __future__ import annotations

import email
import hashlib
import json
import lzma
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from adaponder.errors import InputError
from adaponder.files import replace_file, sha256_of
from adaponder.terminal import console

LOCK = Path(__file__).with_name("corpus.lock")
# Characters of JSON per file: compressed about 10 MB, so that each file can be carried by itself.
_SHARD = 60_000_000

# Licences of Python source that is taken, by their SPDX names.
SOURCE_LICENCES = frozenset(
    {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "MIT", "PSF-2.0", "Python-2.0", "BSD", "PSF"}
)
# Permissive licences of compiled parts; a package may have them beside one of the above, not alone.
_BESIDE = frozenset({"Apache-2.0 WITH LLVM-exception", "BSL-1.0", "Zlib", "CC0-1.0"})
# Spellings of licences outside SPDX.
_SPELLINGS = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD",
    "bsd license": "BSD",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "mit": "MIT",
    "mit license": "MIT",
    "the mit license (mit)": "MIT",
    "psf-2.0": "PSF-2.0",
    "psfl": "PSF",
    "python software foundation license": "PSF",
}
# Folders of tests and of vendored code, which has other licences.
_LEFT_OUT = {
    *("test", "tests", "testing", "_test", "_testing", "test_data", "testdata", "conftest", "__pycache__"),
    *("_vendor", "vendor", "_vendored", "vendored", "vendored_packages", "third_party"),
    *("externals", "extern", "_extern", "node_modules"),
}
_COPYLEFT = re.compile(r"\b[AL]?GPL|(General|Mozilla|Eclipse) Public Licen|\bMPL[ -]?[12v]|Creative Commons|\bCC[ -]BY")
_GENERATED = re.compile(r"auto(matically)?[- ]?generated|generated (by|from)|do not edit", re.IGNORECASE)
_LITERAL = re.compile(r"""^[\[({]*\s*(['"(\[{]|-?\d|0x)[^=]*[,\])}]+$""")
_SHORTEST, _LONGEST, _LONGEST_LINE = 200, 400_000, 400
# Lines of this many characters identify a text; a near copy shares more than this part of them with earlier texts.
_TELLING, _SEEN_SHARE = 20, 0.6


class Wheel(NamedTuple):
    """One line of the lock file."""

    name: str
    version: str
    sha256: str
    licence: str
    filename: str


@dataclass(frozen=True)
class Lock:
    """The lock file: its wheels in order, and what they must add up to (``None`` before the first build)."""

    wheels: Sequence[Wheel]
    documents: int | None
    contents: str | None


@dataclass
class Corpus:
    """The documents of all wheels, and why files were left out."""

    documents: list[dict[str, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def contents(self) -> str:
        """A hash of all texts in their order."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(hashlib.sha256(document["text"].encode()).digest())
        return digest.hexdigest()


# --- the lock file --------------------------------------------------------------------------------------------------

_LINE = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})  # (?P<licence>.+); (?P<filename>\S+)"
)
_TOTALS = re.compile(r"# documents: (\d+), contents: ([0-9a-f]{64})")


def read_lock(path: Path = LOCK) -> Lock:
    """Reads a lock file; every licence in it must be permissive."""
    wheels: list[Wheel] = []
    totals = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            totals = _TOTALS.fullmatch(line) or totals
        elif line.strip():
            match = _LINE.fullmatch(line)
            if match is None:
                raise InputError(f"{path}: cannot read the line {line!r}")
            wheels.append(Wheel(**match.groupdict()))
    for wheel in wheels:
        if not is_permissive(wheel.licence):
            raise InputError(f"{path}: {wheel.name} has licence {wheel.licence}, which is not a permissive one")
    return Lock(wheels, int(totals[1]) if totals else None, totals[2] if totals else None)


def write_lock(path: Path, wheels: Sequence[Wheel], corpus: Corpus) -> None:
    """Writes a lock file for these wheels and the corpus that they give."""
    lines = [
        "# Wheels of the open corpus (corpus.py); a requirements file of pip with hashes.",
        f"# documents: {len(corpus.documents)}, contents: {corpus.contents}",
    ]
    lines += [f"{w.name}=={w.version} --hash=sha256:{w.sha256}  # {w.licence}; {w.filename}" for w in wheels]
    replace_file(path, ("\n".join(lines) + "\n").encode())


def wheel_of(path: Path) -> Wheel:
    """Reads name, version and licence of a wheel from its metadata."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        metadata = email.message_from_bytes(archive.read(names[0]))
    return Wheel(metadata["Name"], metadata["Version"], sha256_of(path), licence_of(metadata), path.name)


def download(lock: Path, wheels: Sequence[Wheel], folder: Path) -> None:
    """Fetches the wheels that ``folder`` lacks with pip, from the index that pip is configured for, and checks all."""
    if any(not (folder / wheel.filename).is_file() for wheel in wheels):
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        # For any Python and platform, so that every machine gets the same file.
        words += ["--python-version", "3.12", "--implementation", "py", "--abi", "none", "--platform", "any"]
        ended = subprocess.run([*words, "--require-hashes", "-r", str(lock), "-d", str(folder)], check=False)
        if ended.returncode:
            raise InputError(f"{lock}: pip could not download the wheels; see above")
    for wheel in wheels:
        path = folder / wheel.filename
        if not path.is_file():
            raise InputError(f"{path}: pip downloaded another file of {wheel.name} {wheel.version}")
        if (sha256 := sha256_of(path)) != wheel.sha256:
            raise InputError(f"{path}: its sha256 is {sha256}, the lock file has {wheel.sha256}; delete the file")


# --- licences -------------------------------------------------------------------------------------------------------


def licence_of(metadata: Any) -> str:
    """Returns the licence that a package's metadata names, as an SPDX expression; empty where it is unclear.

    It is ``License-Expression``, else the classifiers and the field ``License``, unless that holds a licence's text;
    where they name several licences, all of them count.
    """
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers: list[str] = [
        text.rpartition("::")[2].strip()
        for text in metadata.get_all("Classifier") or []
        if text.startswith("License ::") and not text.endswith("OSI Approved")
    ]
    names: list[str] = [_SPELLINGS.get(text.lower(), text) for text in classifiers]
    stated = str(metadata.get("License") or "").strip()
    known = _SPELLINGS.get(stated.lower())
    if known and not any(_family(known) == _family(name) for name in names):
        names.append(known)
    elif stated and not known and len(stated) < 60 and (not names or _COPYLEFT.search(stated)):
        names.append(stated)
    return " AND ".join(dict.fromkeys(names))


def _family(licence: str) -> str:
    return licence.partition("-")[0]


def is_permissive(licence: str) -> bool:
    """Returns whether an SPDX expression permits taking Python source: all parts of an AND, or one part of an OR."""
    for choice in re.split(r"\s+OR\s+", licence.strip()):
        parts = re.split(r"\s+AND\s+", choice.strip("() "))
        if all(part in SOURCE_LICENCES | _BESIDE for part in parts) and SOURCE_LICENCES & set(parts):
            return True
    return False


# --- documents ------------------------------------------------------------------------------------------------------


def why_not(path: PurePosixPath, text: str) -> str:
    """Returns why a source file is left out, in a few words; empty if it is taken."""
    lines = text.splitlines()
    if _LEFT_OUT & set(path.parts) or re.match(r"test_|conftest", path.name) or path.stem.endswith("_test"):
        return "tests and vendored code"
    if not _SHORTEST <= len(text) <= _LONGEST:
        return "too short or too long"
    if _COPYLEFT.search(text):
        return "names another licence"
    if any(map(_GENERATED.search, lines[:20])):
        return "generated"
    filled = [line.strip() for line in lines if line.strip()]
    literals = sum(bool(_LITERAL.match(line)) for line in filled)
    if max(map(len, lines)) > _LONGEST_LINE or literals > 0.5 * len(filled):
        return "data, not code"
    return ""


class SeenLines:
    """Finds near copies by the long lines of all texts taken so far."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def is_copy(self, text: str) -> bool:
        """Returns whether most long lines of ``text`` were seen before; if not, adds them."""
        telling = {line.strip() for line in text.splitlines() if len(line.strip()) >= _TELLING}
        hashes = {int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest()) for line in telling}
        if not hashes or len(hashes & self.seen) > _SEEN_SHARE * len(hashes):
            return True
        self.seen |= hashes
        return False


def source_files(wheel: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yields the Python files of a wheel by path, in order of their names."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(name for name in archive.namelist() if name.endswith(".py")):
            yield PurePosixPath(name), archive.read(name)


def collect(packages: Iterable[tuple[str, Iterable[tuple[PurePosixPath, bytes]]]]) -> Corpus:
    """Builds the corpus of named packages: one document per source file that is taken, none of them a near copy."""
    corpus, seen = Corpus(), SeenLines()
    for package, files in packages:
        for path, content in files:
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                corpus.skipped["not UTF-8"] += 1
                continue
            if reason := why_not(path, text) or ("near copy" if seen.is_copy(text) else ""):
                corpus.skipped[reason] += 1
                continue
            corpus.documents.append({"text": text, "source": package})
    return corpus


def shards(documents: Sequence[dict[str, str]], size: int = _SHARD) -> list[bytes]:
    """Joins documents to JSON lines of about ``size`` bytes each."""
    parts, current, length = [], [], 0
    for document in documents:
        line = (json.dumps(document, ensure_ascii=False) + "\n").encode()
        current.append(line)
        length += len(line)
        if length >= size:
            parts.append(b"".join(current))
            current, length = [], 0
    return [*parts, b"".join(current)] if current else parts


def _compress(content: bytes) -> bytes:
    return lzma.compress(content, preset=9)


def build(out: Path, *, lock: Path = LOCK, wheels: Path | None = None) -> Corpus:
    """Downloads and checks the locked wheels, and writes ``corpus-NN.jsonl.xz`` into ``out``.

    Raises if the texts are not those of the lock file.
    """
    locked, folder = read_lock(lock), wheels or out / "wheels"
    download(lock, locked.wheels, folder)
    corpus = collect((wheel.name, source_files(folder / wheel.filename)) for wheel in locked.wheels)
    if locked.contents and (corpus.contents, len(corpus.documents)) != (locked.contents, locked.documents):
        raise InputError(
            f"{lock}: {len(corpus.documents)} documents with contents {corpus.contents[:16]}, "
            f"the lock file has {locked.documents} with {locked.contents[:16]}: the builder has changed"
        )
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        for number, content in enumerate(pool.map(_compress, shards(corpus.documents))):
            replace_file(out / f"corpus-{number:02}.jsonl.xz", content)
    size = sum(len(document["text"].encode()) for document in corpus.documents)
    console.print(f"{out}: {len(corpus.documents):,} documents, {size / 1e6:.1f} MB, contents {corpus.contents[:16]}")
    for reason, count in sorted(corpus.skipped.items()):
        console.print(f"left out, {reason}: {count:,} files")
    return corpus
