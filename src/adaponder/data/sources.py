"""Inputs become documents in an order that depends on names and contents alone, and nothing is dropped uncounted.

What happens to the odd ones: invalid UTF-8 and lone surrogates become U+FFFD (counted per document); an empty document
is left out (counted); one of a single character or token is kept; NUL is a character like any other in a file that was
named and in records, while in a folder a file with NUL near its start is binary and left out (counted), as are hidden
ones, pipes, devices and links that lead to folders or nowhere; what cannot be read is an error; a document may have
:data:`adaponder.data.formats.LONGEST` bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from adaponder.data import formats
from adaponder.data.formats import Document, Leaf, Pretokenised, Tally
from adaponder.data.manifest import DataError
from adaponder.data.megatron import megatron
from adaponder.data.packing import inner_suffix, packing_of
from adaponder.errors import InputError
from adaponder.files import read_json, sha256_of_each

STDLIB = "stdlib"
HUB = "hf:"
# Tests, vendored or abandoned parts, and files that differ from one machine to the next.
_STDLIB_WITHOUT = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "lib2to3", "distutils", "turtledemo", "ensurepip"),
}
# Files of files, and tables that are read as such but not from inside a packed file.
_ARCHIVES = {".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar", ".lz4", ".arrow"}
_UNPACKED_ONLY = {".parquet", ".idx", ".bin"}

__all__ = ["Document", "Leaf", "Pretokenised", "Tally", "describe", "documents", "find", "megatron", "read"]


def documents(inputs: Sequence[str], *, tally: Tally | None = None) -> Iterator[Document]:
    """The documents of ``inputs``, in order; an input is a file, a folder, ``stdlib`` or ``hf:NAME[:CONFIG][:SPLIT]``.

    ``.jsonl`` and ``.parquet`` hold records with ``text`` and perhaps ``source``; any other file is one document. Text
    and records may be packed (``.gz``, ``.xz``, ``.bz2``, ``.zst``). A folder is walked in sorted order; one that
    ``datasets`` saved is read as that dataset.
    """
    tally = tally or Tally()
    for record in read(find(inputs, tally), tally):
        if isinstance(record, Pretokenised):
            raise InputError(f"{record.origin}: holds tokens, not text")
        yield record


def read(leaves: Iterable[Leaf], tally: Tally) -> Iterator[Document | Pretokenised]:
    """What the leaves hold, texts valid Unicode and not empty; a file that changes on the way is an error."""
    before = tally.read
    for leaf in leaves:
        for record in leaf.reader(leaf, tally):
            if len(record[0]):
                yield formats.mended(record, tally)
            else:
                tally.empty += 1
        if tuple(map(_stamp, leaf.files)) != leaf.stamps:
            raise DataError(f"{leaf.path} changed while it was read: start again when nobody writes to it")
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
        elif (kind := _kind(given)) == "folder":
            leaves += _folder(given, path, tally)
        elif kind == "file":
            leaves += _named_file(given, path)
        elif kind == "special":
            raise InputError(f"input {given}: a pipe or device, which cannot be read twice; write it to a file first")
        elif _kind(given + ".idx") == "file":
            leaves += _file(given, path.name, path.with_name(path.name + ".idx"), text=formats.text)
        else:
            raise InputError(f"input {given}: no such file or folder (nor {STDLIB}, nor {HUB}NAME)")
    return leaves


def describe(leaves: Sequence[Leaf], advance: Callable[[int], None] = lambda _: None) -> list[dict[str, Any]]:
    """For each input its number of files, their bytes, and a hash of their names and of every byte in them.

    ``advance`` is told of bytes as they are hashed, by any thread.
    """
    files = [path for leaf in leaves for path in leaf.files]
    sums = dict(zip(files, sha256_of_each(files, DataError, advance=advance), strict=True))
    found: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        found.setdefault(leaf.given, []).append(leaf)
    return [
        {
            "input": given,
            "files": len(part),
            "bytes": sum(leaf.size for leaf in part),
            "contents": hashlib.sha256(json.dumps([_contents(leaf, sums) for leaf in part]).encode()).hexdigest(),
        }
        for given, part in found.items()
    ]


def _contents(leaf: Leaf, sums: dict[Path, str]) -> list[str]:
    return [leaf.name, *(sums[path] for path in leaf.files)] if leaf.files else [leaf.name, formats.hub_version(leaf)]


def stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _stdlib() -> Iterator[Leaf]:
    root = stdlib_root()
    for folder, folders, files in os.walk(root, onerror=_refuse_unreadable):
        folders[:] = sorted(set(folders) - _STDLIB_WITHOUT)
        for path in (Path(folder, name) for name in sorted(files)):
            if path.suffix == ".py" and not path.name.startswith("_sysconfigdata") and _kind(path) == "file":
                yield _leaf(STDLIB, path.relative_to(root).as_posix(), path, formats.stdlib_text)


def _folder(given: str, folder: Path, tally: Tally) -> Iterator[Leaf]:
    if any(_kind(folder / name) == "file" for name in ("dataset_dict.json", "state.json")):
        yield from _saved_dataset(given, folder)
        return
    for root, folders, files in os.walk(folder, onerror=_refuse_unreadable):
        tally.hidden += sum(name.startswith(".") for name in (*folders, *files))
        shown = sorted(name for name in folders if not name.startswith("."))
        # A link may lead back up, and then there is no end.
        folders[:] = [name for name in shown if not Path(root, name).is_symlink()]
        tally.special += len(shown) - len(folders)
        for path in (Path(root, name) for name in sorted(files) if not name.startswith(".")):
            if _kind(path) == "file":
                yield from _file(given, path.relative_to(folder).as_posix(), path, text=formats.text_unless_binary)
            else:
                tally.special += 1


def _kind(path: Path | str) -> str:
    """``file``, ``folder``, ``special`` (a pipe, socket or device), or nothing where there is no such thing."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: a NUL in the name
        return ""
    except OSError as error:
        if error.errno == errno.ELOOP:
            return ""
        _refuse_unreadable(error)
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise InputError(
        f"{error.filename} cannot be read: {error.strerror}; make it readable, or leave it out of the inputs"
    ) from None


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        about = os.stat(path)
    except OSError as error:
        _refuse_unreadable(error)
    return about.st_mtime_ns, about.st_size, about.st_ino


def _leaf(given: str, name: str, path: Path, reader: Callable[..., Iterator[Any]], *files: Path) -> Leaf:
    """A leaf that is read from ``files``, or from ``path`` alone; its size is that of the last of them."""
    files = files or (path,)
    stamps = tuple(map(_stamp, files))
    return Leaf(given, name, path, stamps[-1][1], reader, files, stamps)


def _named_file(given: str, path: Path) -> Iterator[Leaf]:
    """A file that was named by itself: text whatever it holds, but not a container that would be read as garbage."""
    inner = inner_suffix(path)
    if inner in _ARCHIVES or (packing_of(path) and inner in _UNPACKED_ONLY):
        raise InputError(
            f"input {given}: {path.name} is no text but a container: unpack it (of a saved dataset, name the folder)"
        )
    yield from _file(given, path.name, path, text=formats.text)


def _file(given: str, name: str, path: Path, *, text: Callable[..., Iterator[Document]]) -> Iterator[Leaf]:
    suffix = path.suffix.lower()
    index, data = path.with_suffix(".idx"), path.with_suffix(".bin")
    if inner_suffix(path) == ".jsonl":
        yield _leaf(given, name, path, formats.jsonl)
    elif suffix == ".parquet":
        yield _leaf(given, name, path, formats.parquet)
    elif path == index and _kind(data) == "file":
        yield _leaf(given, name, path, formats.megatron_documents, index, data)
    elif path == data and _kind(index) == "file":
        # Named by itself it stands for the pair; in a folder the pair is found by its .idx.
        if text is formats.text:
            yield _leaf(given, name, path, formats.megatron_documents, index, data)
    else:
        yield _leaf(given, name, path, text)


def _saved_dataset(given: str, folder: Path) -> Iterator[Leaf]:
    """The train split, or the only one, of a folder that ``datasets.save_to_disk`` wrote."""
    if _kind(folder / "dataset_dict.json") == "file":
        splits = _names(folder / "dataset_dict.json", "splits")
        if "train" not in splits and len(splits) != 1:
            raise InputError(f"input {given}: splits {', '.join(splits)}; name the folder of one: {given}/SPLIT")
        folder = folder / ("train" if "train" in splits else splits[0])
    for name in _names(folder / "state.json", "_data_files", "filename"):
        path = folder / name
        if _kind(path) != "file":
            raise DataError(f"{path} is missing, state.json names it")
        yield _leaf(given, name, path, formats.arrow)


def _names(path: Path, key: str, inner: str | None = None) -> list[str]:
    """The names within the folder that a JSON file lists under ``key`` (``inner``: each in an object, under that)."""
    listed = read_json(path, DataError).get(key, [])
    try:
        names = [entry[inner] if inner else entry for entry in listed]
        # Nothing outside the folder is reached.
        return [Path(name).name for name in names]
    except (TypeError, KeyError, ValueError):
        raise DataError(f"{path}: {key} must list names") from None
