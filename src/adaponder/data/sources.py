"""Inputs become documents in an order that depends on names and contents alone, and nothing is dropped uncounted.

What happens to the odd ones: invalid UTF-8 and lone surrogates become U+FFFD (counted per document); an empty document
is left out (counted); one of a single character or token is kept; NUL is a character like any other in a file that was
named and in records, while in a folder a file with NUL near its start is binary and left out (counted), as are hidden
ones; a line may have any length.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from adaponder.data import formats
from adaponder.data.formats import Document, Leaf, Pretokenised, Tally, megatron
from adaponder.data.manifest import DataError
from adaponder.errors import InputError

STDLIB = "stdlib"
HUB = "hf:"
# Tests, vendored or abandoned parts, and files that differ from one machine to the next.
_STDLIB_WITHOUT = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "lib2to3", "distutils", "turtledemo", "ensurepip"),
}

__all__ = ["Document", "Leaf", "Pretokenised", "Tally", "describe", "documents", "find", "megatron", "read"]


def documents(inputs: Sequence[str], *, tally: Tally | None = None) -> Iterator[Document]:
    """The documents of ``inputs``, in order; an input is a file, a folder, ``stdlib`` or ``hf:NAME[:CONFIG][:SPLIT]``.

    ``.jsonl[.gz|.xz|.zst]`` and ``.parquet`` hold records with ``text`` and perhaps ``source``; any other file is one
    document. A folder is walked in sorted order; one that ``datasets`` saved is read as that dataset.
    """
    tally = tally or Tally()
    for record in read(find(inputs, tally), tally):
        if isinstance(record, Pretokenised):
            raise InputError(f"{record.origin}: holds tokens, not text")
        yield record


def read(leaves: Iterable[Leaf], tally: Tally) -> Iterator[Document | Pretokenised]:
    """What the leaves hold, texts valid Unicode and not empty."""
    before = tally.read
    for leaf in leaves:
        for record in leaf.reader(leaf, tally):
            if len(record[0]):
                yield formats.mended(record, tally) if isinstance(record, Document) else record
            else:
                tally.empty += 1
        before += leaf.size
        tally.read = before


def find(inputs: Sequence[str], tally: Tally) -> list[Leaf]:
    """The files behind ``inputs`` in the order in which they are read."""
    leaves = []
    for given in inputs:
        path = Path(given)
        if given == STDLIB:
            leaves += _stdlib()
        elif given.startswith(HUB):
            leaves.append(Leaf(given, given, path, 0, formats.hub))
        elif path.is_dir():
            leaves += _folder(given, path, tally)
        elif path.is_file():
            leaves += _file(given, path.name, path, text=formats.text)
        elif path.with_name(path.name + ".idx").is_file():
            leaves += _file(given, path.name, path.with_name(path.name + ".idx"), text=formats.text)
        else:
            raise InputError(f"input {given}: no such file or folder (nor {STDLIB}, nor {HUB}NAME)")
    return leaves


def describe(leaves: Sequence[Leaf]) -> list[dict[str, Any]]:
    """For each input its number of files, their bytes, and a hash of their names and sizes."""
    found: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        found.setdefault(leaf.given, []).append(leaf)
    return [
        {
            "input": given,
            "files": len(part),
            "bytes": sum(leaf.size for leaf in part),
            "names_and_sizes": hashlib.sha256(json.dumps([(x.name, x.size) for x in part]).encode()).hexdigest(),
        }
        for given, part in found.items()
    ]


def stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _stdlib() -> Iterator[Leaf]:
    root = stdlib_root()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _STDLIB_WITHOUT)
        for path in (Path(folder, name) for name in sorted(files)):
            if path.suffix == ".py" and not path.name.startswith("_sysconfigdata") and path.is_file():
                yield Leaf(STDLIB, path.relative_to(root).as_posix(), path, path.stat().st_size, formats.stdlib_text)


def _folder(given: str, folder: Path, tally: Tally) -> Iterator[Leaf]:
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        yield from _saved_dataset(given, folder)
        return
    for root, folders, files in os.walk(folder):
        tally.hidden += sum(name.startswith(".") for name in (*folders, *files))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(root, name)
            # Pipes and sockets would wait for ever.
            if not name.startswith(".") and path.is_file():
                yield from _file(given, path.relative_to(folder).as_posix(), path, text=formats.text_unless_binary)


def _file(given: str, name: str, path: Path, *, text: Callable[..., Iterator[Document]]) -> Iterator[Leaf]:
    size = path.stat().st_size
    if formats.without_packing(path).suffix == ".jsonl":
        yield Leaf(given, name, path, size, formats.jsonl)
    elif path.suffix == ".parquet":
        yield Leaf(given, name, path, size, formats.parquet)
    elif path.suffix == ".idx" and path.with_suffix(".bin").is_file():
        yield Leaf(given, name, path, path.with_suffix(".bin").stat().st_size, formats.megatron_documents)
    elif path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        # Named by itself it stands for the pair; in a folder the pair is found by its .idx.
        if text is formats.text:
            yield Leaf(given, name, path, size, formats.megatron_documents)
    else:
        yield Leaf(given, name, path, size, text)


def _saved_dataset(given: str, folder: Path) -> Iterator[Leaf]:
    """The train split, or the only one, of a folder that ``datasets.save_to_disk`` wrote."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        if "train" not in splits and len(splits) != 1:
            raise InputError(f"input {given}: splits {', '.join(splits)}; name the folder of one: {given}/SPLIT")
        folder = folder / ("train" if "train" in splits else splits[0])
    for entry in _json(folder / "state.json").get("_data_files", []):
        path = folder / Path(entry["filename"]).name
        if not path.is_file():
            raise DataError(f"{path} is missing, state.json names it")
        yield Leaf(given, path.name, path, path.stat().st_size, formats.arrow)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: missing or not valid JSON ({error})") from None
