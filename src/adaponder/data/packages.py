"""The source code of installed packages under permissive licences, as a corpus that anyone can build again.

    python -m adaponder.data.packages --out data/python        # corpus.jsonl, packages.json
    adaponder prepare data/python/corpus.jsonl --tokenizer train-bpe:4096 --out data/sample

It is the standard library and each installed package whose metadata names only Apache, BSD, MIT or PSF licences (for
compiled parts that it bundles also Boost, zlib and CC0). ``packages.json`` lists every package with its version, its
licence and what was taken of it, and every package that was left out with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from adaponder.data.formats import Counts
from adaponder.data.sources import STDLIB, find
from adaponder.errors import InputError
from adaponder.files import replace_file
from adaponder.terminal import console, table

CORPUS, PACKAGES = "corpus.jsonl", "packages.json"

# Licences of Python source that is taken, by their SPDX names.
SOURCE_LICENCES = frozenset(
    {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "MIT", "PSF-2.0", "Python-2.0", "BSD", "PSF"}
)
# Permissive licences of compiled parts; a package may have them beside one of the above, not alone.
BESIDE = frozenset({"Apache-2.0 WITH LLVM-exception", "BSL-1.0", "Zlib", "CC0-1.0"})
# What packages write where an SPDX name could stand; anything else in that place is unclear.
_WORDS = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
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
# Tests, other people's code under other licences, and this package itself.
_LEFT_OUT = {
    *("test", "tests", "testing", "_test", "_testing", "test_data", "testdata", "conftest", "__pycache__"),
    *("_vendor", "vendor", "_vendored", "vendored", "vendored_packages", "third_party"),
    *("externals", "extern", "_extern", "node_modules"),
}
_SELF = "adaponder"
_COPYLEFT = re.compile(r"\b[AL]?GPL|(General|Mozilla|Eclipse) Public Licen|\bMPL[ -]?[12v]|Creative Commons|\bCC[ -]BY")
_GENERATED = re.compile(r"auto(matically)?[- ]?generated|generated (by|from)|do not edit", re.IGNORECASE)
_SHORTEST, _LONGEST, _LONGEST_LINE = 200, 400_000, 400
# A line of this many characters says something; of a near copy most have been seen.
_TELLING, _SEEN_SHARE = 20, 0.6


@dataclass
class Package:
    """One package of the corpus: what it is, and how many of its files and bytes were taken."""

    name: str
    version: str
    licence: str
    files: int = 0
    bytes: int = 0


@dataclass
class Corpus:
    """What a corpus is made of; ``skipped`` counts files by why they were left out, ``contents`` hashes every text."""

    packages: list[Package] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    contents: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "python": platform.python_version(),
            "files": sum(package.files for package in self.packages),
            "bytes": sum(package.bytes for package in self.packages),
            "contents": self.contents,
            "skipped": dict(sorted(self.skipped.items())),
            "packages": [asdict(package) for package in self.packages],
            "left_out": self.left_out,
        }


# --- licences -------------------------------------------------------------------------------------------------------


def licence_of(metadata: Any) -> str:
    """The licence that a package's metadata names, as SPDX writes it; empty where it is unclear.

    That is ``License-Expression``, else classifiers and the field ``License``, if that is a name and not a text; where
    they name several licences, all of them count.
    """
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers: list[str] = [
        text.rpartition("::")[2].strip()
        for text in metadata.get_all("Classifier") or []
        if text.startswith("License ::") and not text.endswith("OSI Approved")
    ]
    named: list[str] = [_WORDS.get(text.lower(), text) for text in classifiers]
    stated = str(metadata.get("License") or "").strip()
    known = _WORDS.get(stated.lower())
    if known and not any(_family(known) == _family(each) for each in named):
        named.append(known)
    elif stated and not known and len(stated) < 60 and (not named or _COPYLEFT.search(stated)):
        named.append(stated)
    return " AND ".join(dict.fromkeys(named))


def _family(licence: str) -> str:
    return licence.partition("-")[0]


def is_permissive(licence: str) -> bool:
    """Whether an SPDX expression lets its Python source be taken: each part of AND must, one part of OR is enough."""
    choices = re.split(r"\s+OR\s+", licence.strip())
    for choice in choices:
        parts = re.split(r"\s+AND\s+", choice.strip("() "))
        if all(part in SOURCE_LICENCES | BESIDE for part in parts) and SOURCE_LICENCES & set(parts):
            return True
    return False


# --- files ----------------------------------------------------------------------------------------------------------


def why_not(path: PurePosixPath, text: str) -> str:
    """Why a source file is left out, in a word or two; empty if it is taken."""
    lines = text.splitlines()
    if _LEFT_OUT & set(path.parts) or re.match(r"test_|conftest", path.name) or path.stem.endswith("_test"):
        return "tests and vendored code"
    if not _SHORTEST <= len(text) <= _LONGEST:
        return "too short or too long"
    if _COPYLEFT.search(text):
        return "names another licence"
    if any(map(_GENERATED.search, lines[:20])):
        return "generated"
    if max(map(len, lines)) > _LONGEST_LINE or _table_share(lines) > 0.5:
        return "data, not code"
    return ""


def _table_share(lines: Sequence[str]) -> float:
    """The share of lines that hold nothing but literals: tables of names and numbers."""
    filled = [line.strip() for line in lines if line.strip()]
    literal = re.compile(r"""^[\[({]*\s*(['"(\[{]|-?\d|0x)[^=]*[,\])}]+$""")
    return sum(bool(literal.match(line)) for line in filled) / max(1, len(filled))


class SeenLines:
    """Knows the telling lines of every text that was taken, to tell a near copy from something else."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def is_copy(self, text: str) -> bool:
        """Whether most telling lines of ``text`` were seen before; if not, they are from here on."""
        telling = {line.strip() for line in text.splitlines() if len(line.strip()) >= _TELLING}
        hashes = {int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest()) for line in telling}
        if not hashes or len(hashes & self.seen) > _SEEN_SHARE * len(hashes):
            return True
        self.seen |= hashes
        return False


# --- the corpus -----------------------------------------------------------------------------------------------------


def installed() -> Iterator[tuple[Package, list[tuple[PurePosixPath, Path]]]]:
    """The standard library, then every installed package by name, each with its Python files by path."""
    library = [(PurePosixPath(part.name), part.path) for part in find([STDLIB], Counts())]
    yield Package("Python standard library", platform.python_version(), "PSF-2.0"), library
    found = {each.metadata["Name"].lower(): each for each in importlib.metadata.distributions()}
    for name in sorted(found.keys() - {_SELF}):
        each = found[name]
        files = sorted(
            PurePosixPath(file) for file in each.files or [] if file.suffix == ".py" and ".." not in file.parts
        )
        paths = [(file, Path(str(each.locate_file(file)))) for file in files]
        yield Package(each.metadata["Name"], each.version, licence_of(each.metadata)), paths


def collect(
    packages: Callable[[], Iterator[tuple[Package, list[tuple[PurePosixPath, Path]]]]] = installed,
) -> tuple[Corpus, list[dict[str, str]]]:
    """What the corpus is made of, and its documents: each ``text`` with its ``source``, the package's name."""
    corpus, documents, seen, digest = Corpus(), [], SeenLines(), hashlib.sha256()
    for package, files in packages():
        if not is_permissive(package.licence):
            corpus.left_out.append(
                {"name": package.name, "version": package.version, "licence": package.licence or "unclear"}
            )
            continue
        for name, path in files:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                corpus.skipped["not readable as UTF-8"] += 1
                continue
            if reason := why_not(name, text) or ("near copy" if seen.is_copy(text) else ""):
                corpus.skipped[reason] += 1
                continue
            package.files += 1
            package.bytes += len(text.encode())
            documents.append({"text": text, "source": package.name})
            digest.update(hashlib.sha256(text.encode()).digest())
        if package.files:
            corpus.packages.append(package)
    corpus.contents = digest.hexdigest()
    return corpus, documents


def write(out: Path, corpus: Corpus, documents: Sequence[dict[str, str]]) -> None:
    """Writes ``corpus.jsonl`` and ``packages.json`` into ``out``."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: a file is in the way; name a folder")
    out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    replace_file(out / CORPUS, lines.encode())
    replace_file(out / PACKAGES, (json.dumps(corpus.as_dict(), indent=1) + "\n").encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m adaponder.data.packages", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="corpus.jsonl and packages.json go here")
    out = parser.parse_args(arguments).out
    corpus, documents = collect()
    write(out, corpus, documents)
    largest = sorted(corpus.packages, key=lambda package: -package.bytes)
    rows = [(each.name, each.version, each.licence, f"{each.files:,}", f"{each.bytes:,}") for each in largest]
    console.print(table(f"{out}: {len(documents):,} files", ("package", "version", "licence", "files", "bytes"), rows))
    for reason, count in sorted(corpus.skipped.items()):
        console.print(f"left out, {reason}: {count:,} files")
    for each in corpus.left_out:
        console.print(f"left out: {each['name']} {each['version']} ({each['licence']})")


if __name__ == "__main__":
    main()
