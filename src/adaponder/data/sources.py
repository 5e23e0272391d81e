"""Finds and reads the input documents, in an order that depends on names and contents alone.

Invalid UTF-8 and lone surrogates become U+FFFD. Empty documents are skipped; in folders, so are hidden files, pipes,
devices, broken links, links to folders, and binary files (whose first bytes contain NUL or much invalid UTF-8).
``Counts`` counts all of these. A binary file that the user names is an error, and so is a file that cannot be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from adaponder.data import puzzles, readers
from adaponder.data.manifest import DataError
from adaponder.data.readers import Counts, Document, InputPart
from adaponder.errors import InputError
from adaponder.files import read_json, sha256_of_each

STDLIB = "stdlib"
HUB = "hf:"
# Folders left out: tests, vendored or abandoned packages, and folders that differ between machines.
_STDLIB_WITHOUT = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "lib2to3", "distutils", "turtledemo", "ensurepip"),
}
# Archives, and formats that cannot be read from inside a compressed file.
_ARCHIVES = {".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar", ".lz4", ".arrow"}
_UNCOMPRESSED_ONLY = {".parquet", ".idx", ".bin"}


def documents(inputs: Sequence[str], *, counts: Counts | None = None) -> Iterator[Document]:
    """Yields the documents of ``inputs`` in order; raises for an input that holds tokens instead of text.

    An input is a file, a folder, ``stdlib``, ``hf:NAME[:CONFIG][:SPLIT]``, or a puzzle (:mod:`adaponder.data.puzzles`).
    ``.jsonl`` and ``.parquet`` hold records with ``text`` and optionally ``source``; any other file is one document.
    Text and records may be compressed (``.gz``, ``.xz``, ``.bz2``, ``.zst``). A folder is walked in sorted order; a
    folder that ``datasets`` saved is read as a dataset.
    """
    counts = counts or Counts()
    for document in read(find(inputs, counts), counts):
        if document.tokens is not None:
            raise InputError(f"{document.origin}: holds tokens, not text")
        yield document


def read(parts: Iterable[InputPart], counts: Counts) -> Iterator[Document]:
    """Yields the non-empty documents of ``parts`` as valid Unicode; raises if a file changes while it is read."""
    before = counts.read
    for part in parts:
        for document in part.reader(part, counts):
            if not len(document.content):
                counts.empty += 1
                continue
            counts.documents += 1
            yield readers.repaired(document, counts)
        if tuple(map(_stamp, part.files)) != part.stamps:
            raise DataError(f"{part.path} changed while it was read: start again when it no longer changes")
        before += part.size
        counts.read = before


def find(inputs: Sequence[str], counts: Counts) -> list[InputPart]:
    """Returns the parts of ``inputs`` (files, hub datasets, puzzles) in reading order."""
    parts = []
    try:
        for argument in inputs:
            parts += _parts(argument, Path(argument), counts)
    except OSError as error:
        _refuse_unreadable(error)
    return parts


def _parts(argument: str, path: Path, counts: Counts) -> Iterable[InputPart]:
    """Returns the parts of one input."""
    if argument == STDLIB:
        return _stdlib()
    if puzzles.is_generated(argument):
        puzzles.settings_of(argument)  # raises for wrong settings before anything is read
        return [InputPart(argument, argument, path, 0, readers.puzzle)]
    if argument.startswith(HUB):
        return [InputPart(argument, argument, path, 0, readers.record_documents, records=readers.hub)]
    if path.is_dir():
        return _folder(argument, path, counts)
    if path.is_file():
        return _file(argument, path.name, path, named=True)
    if path.exists():
        raise InputError(
            f"input {argument} is a pipe or device, which cannot be read twice: write its content to a file first"
        )
    if (index := Path(f"{argument}.idx")).is_file():
        return _file(argument, path.name, index, named=True)
    raise InputError(f"input {argument}: no such file or folder (nor {STDLIB}, a puzzle or {HUB}NAME)")


def describe(
    parts: Sequence[InputPart], progress: Callable[[int, int], None] = lambda read, total: None
) -> list[dict[str, Any]]:
    """Returns for each input its number of files, their bytes, and a hash of their names and contents.

    ``progress`` is called with the number of bytes hashed so far and the total number.
    """
    files = [path for part in parts for path in part.files]
    total = sum(size for part in parts for _, size, _ in part.stamps)
    checksums = sha256_of_each(files, DataError, progress=lambda read: progress(read, total))
    sums = dict(zip(files, checksums, strict=True))
    by_argument: dict[str, list[InputPart]] = {}
    for part in parts:
        by_argument.setdefault(part.argument, []).append(part)
    return [
        {
            "input": argument,
            "files": len(parts),
            "bytes": sum(part.size for part in parts),
            "contents": hashlib.sha256(json.dumps([_contents(part, sums) for part in parts]).encode()).hexdigest(),
        }
        for argument, parts in by_argument.items()
    ]


def _contents(part: InputPart, sums: dict[Path, str]) -> list[str]:
    """Returns strings that identify a part: its name, and checksums, puzzle settings or the hub's fingerprint."""
    if part.files:
        return [part.name, *(sums[path] for path in part.files)]
    if part.reader is readers.puzzle:
        return [part.name, puzzles.version(part.argument)]
    return [part.name, str(getattr(readers.load_hub(part.argument), "_fingerprint", ""))]


def stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _stdlib() -> Iterator[InputPart]:
    root = stdlib_root()
    for folder, folders, files in os.walk(root, onerror=_refuse_unreadable):
        folders[:] = sorted(set(folders) - _STDLIB_WITHOUT)
        for path in (Path(folder, name) for name in sorted(files)):
            if path.suffix == ".py" and not path.name.startswith("_sysconfigdata") and path.is_file():
                yield _part(STDLIB, path.relative_to(root).as_posix(), path, readers.text)


def _folder(argument: str, folder: Path, counts: Counts) -> Iterator[InputPart]:
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        yield from _saved_dataset(argument, folder)
        return
    for root, folders, files in os.walk(folder, onerror=_refuse_unreadable):
        counts.hidden += sum(name.startswith(".") for name in (*folders, *files))
        shown = sorted(name for name in folders if not name.startswith("."))
        # Links to folders are not followed: one may lead back up.
        folders[:] = [name for name in shown if not Path(root, name).is_symlink()]
        counts.special += len(shown) - len(folders)
        for path in (Path(root, name) for name in sorted(files) if not name.startswith(".")):
            if path.is_file():
                yield from _file(argument, path.relative_to(folder).as_posix(), path, named=False)
            else:
                counts.special += 1


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise InputError(
        f"{error.filename} cannot be read: {error.strerror}; make it readable, or remove it from the inputs"
    ) from None


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError as error:
        _refuse_unreadable(error)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _part(argument: str, name: str, path: Path, reader: Callable[..., Iterator[Any]], *files: Path) -> InputPart:
    """Returns a part that is read from ``files``, or from ``path`` if none is given; its size is that of the last file.

    ``reader`` yields documents, or records if it is ``readers.jsonl`` or ``readers.table``.
    """
    files = files or (path,)
    stamps = tuple(map(_stamp, files))
    records = reader if reader in (readers.jsonl, readers.table) else None
    reader = readers.record_documents if records else reader
    return InputPart(argument, name, path, stamps[-1][1], reader, files, stamps, records)


def _file(argument: str, name: str, path: Path, *, named: bool) -> Iterator[InputPart]:
    """Yields the part of one file; raises for an archive or a binary file that the user ``named``.

    Yields nothing for the .bin of a Megatron pair in a folder, because the .idx yields the pair.
    """
    suffix, inner = path.suffix.lower(), readers.inner_suffix(path)
    index, data = path.with_suffix(".idx"), path.with_suffix(".bin")
    if path in (index, data) and index.is_file() and data.is_file():
        if named or path == index:  # in a folder the pair is found by its .idx
            yield _part(argument, name, path, readers.megatron, index, data)
    elif inner == ".jsonl":
        yield _part(argument, name, path, readers.jsonl)
    elif suffix == ".parquet":
        yield _part(argument, name, path, readers.table)
    elif not named:
        yield _part(argument, name, path, readers.text_unless_binary)
    elif inner in _ARCHIVES or (readers.compression_of(path) and inner in _UNCOMPRESSED_ONLY):
        raise InputError(
            f"input {argument}: {path.name} is an archive, not text: unpack it (for a saved dataset, name its folder)"
        )
    elif readers.looks_binary(path):
        raise InputError(
            f"input {argument} looks binary, not like UTF-8 text: remove it, or convert it to UTF-8 first (from "
            "UTF-16: iconv -f UTF-16 -t UTF-8)"
        )
    else:
        yield _part(argument, name, path, readers.text)


def _saved_dataset(argument: str, folder: Path) -> Iterator[InputPart]:
    """Yields the files of the train split, or of the only split, of a folder that ``datasets.save_to_disk`` wrote."""
    splits_file = folder / "dataset_dict.json"
    if splits_file.is_file():
        splits = _names(splits_file, read_json(splits_file, DataError).get("splits"))
        if "train" not in splits and len(splits) != 1:
            raise InputError(f"input {argument}: name a split as {argument}/SPLIT, one of {', '.join(splits)}")
        folder = folder / ("train" if "train" in splits else splits[0])
    state = folder / "state.json"
    entries = read_json(state, DataError).get("_data_files")
    entries = entries if isinstance(entries, list) else []
    for name in _names(state, [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing, but state.json lists it")
        yield _part(argument, name, folder / name, readers.table)


def _names(path: Path, listed: Any) -> list[str]:
    """Returns ``listed``, the names in the file ``path``; raises if there are none.

    Folders are removed from the names, so that no file outside the folder of ``path`` is read.
    """
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise DataError(f"{path} must list at least one name")
    return [Path(name).name for name in listed]
