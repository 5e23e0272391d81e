"""Reads untrusted files as plain data within size limits, and writes files atomically.

A refused file raises a one-line error. A file appears under its final name only when it is completely written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from filelock import lock_descriptor

from adaponder.errors import AdaPonderError, CheckpointError, InputError

# Larger files are not read into memory; the largest tokenizer.json on the hub has about 40 MB.
JSON_BYTES = 2**28
# Deeper than any config, table or manifest, but far from a stack overflow.
JSON_DEPTH = 64
# Counts and ids have at most 20 digits. Python refuses to print integers of more than 4,300.
JSON_DIGITS = 40
# A recipe has about 60 lines.
YAML_BYTES = 2**20
YAML_DEPTH = 16
_BLOCK = 2**20


@contextlib.contextmanager
def _reading(path: Path, error: type[AdaPonderError]) -> Iterator[None]:
    """Context manager that turns an :class:`OSError` into an ``error`` that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise error(f"{path} is missing") from None
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from None


def open_plain(path: Path, error: type[AdaPonderError] = CheckpointError) -> BinaryIO:
    """Opens an ordinary file for reading; refuses folders, pipes, sockets and devices without blocking."""
    with _reading(path, error):
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"{path} is not an ordinary file: a folder, pipe, socket or device is not read")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, error: type[AdaPonderError] = CheckpointError, *, limit: int = JSON_BYTES) -> bytes:
    """Returns the content of an ordinary file of at most ``limit`` bytes."""
    with open_plain(path, error) as file, _reading(path, error):
        content = file.read(limit + 1)
    if len(content) > limit:
        raise error(f"{path} has more than {limit:,} bytes, the most that is read of such a file")
    return content


def read_text(path: Path, error: type[AdaPonderError] = CheckpointError, *, limit: int = JSON_BYTES) -> str:
    """Returns the text of a UTF-8 file of at most ``limit`` bytes."""
    try:
        return read_bytes(path, error, limit=limit).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not text in UTF-8: {problem.reason} at byte {problem.start:,}") from None


def read_json(path: Path, error: type[AdaPonderError] = CheckpointError) -> dict[str, Any]:
    """Returns the object in a JSON file, parsed by :func:`parse_json`."""
    return parse_json(read_bytes(path, error), path, error)


def parse_json(content: bytes, where: Path | str, error: type[AdaPonderError] = CheckpointError) -> dict[str, Any]:
    """Parses a JSON object; refuses nesting beyond JSON_DEPTH and integers of more than JSON_DIGITS digits.

    Errors begin with ``where``, the name of the source.
    """
    try:
        loaded = json.loads(content.decode("utf-8"), parse_int=_whole)
    except RecursionError:
        raise error(f"{where}: nested too deeply for a JSON file of its kind") from None
    except ValueError as problem:  # includes JSONDecodeError and UnicodeDecodeError
        raise error(f"{where} is not valid JSON: {problem}") from None
    if not isinstance(loaded, dict):
        raise error(f"{where} must hold an object, not {type(loaded).__name__}")
    if _deeper_than(loaded, JSON_DEPTH):
        raise error(f"{where}: nested too deeply for a JSON file of its kind")
    return loaded


class _PlainYaml(yaml.SafeLoader):
    """Reads YAML as plain data; refuses aliases (a few can exhaust memory), duplicate keys and deep nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias (*{self.peek_event().anchor}): write out what it stands for")
        if self.depth == YAML_DEPTH:
            raise yaml.YAMLError(f"nested more than {YAML_DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        names = Counter(key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode))
        if repeated := [name for name, count in names.items() if count > 1]:
            raise yaml.YAMLError(f"{repeated[0]} is given twice")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > JSON_DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value):,} digits")
        return super().construct_yaml_int(node)


_PlainYaml.add_constructor("tag:yaml.org,2002:int", _PlainYaml.construct_yaml_int)


def parse_yaml(text: str, where: str, error: type[AdaPonderError]) -> Any:
    """Parses YAML; refuses aliases, duplicate keys, nesting beyond YAML_DEPTH and integers beyond JSON_DIGITS digits.

    Errors begin with ``where``, the name of the source.
    """
    try:
        return yaml.load(text, Loader=_PlainYaml)
    except RecursionError:
        raise error(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as problem:
        # Besides its own errors, PyYAML raises those of Python's conversions (`2001-99-99`, `!!bool x`).
        raise error(f"{where} is not valid YAML: {' '.join(str(problem).split())}") from None


def read_yaml(path: Path, error: type[AdaPonderError]) -> Any:
    """Returns the content of a YAML file, parsed by :func:`parse_yaml`."""
    return parse_yaml(read_text(path, error, limit=YAML_BYTES), str(path), error)


_NEVER = threading.Event()


def sha256_of(
    path: Path,
    error: type[AdaPonderError] = CheckpointError,
    *,
    ended: threading.Event = _NEVER,
    count: Callable[[int], None] = lambda size: None,
) -> str:
    """Returns the SHA-256 of a file as hex; stops early, with a meaningless result, once ``ended`` is set.

    ``count`` is called with the number of bytes of each block.
    """
    digest = hashlib.sha256()
    with open_plain(path, error) as file, _reading(path, error):
        while not ended.is_set() and (block := file.read(_BLOCK)):
            digest.update(block)
            count(len(block))
    return digest.hexdigest()


def sha256_of_each(
    paths: Sequence[Path],
    error: type[AdaPonderError] = CheckpointError,
    *,
    progress: Callable[[int], None] = lambda read: None,
) -> list[str]:
    """Returns the SHA-256 of each file, computed in threads that stop early on Ctrl-C.

    ``progress`` is called in these threads, one at a time, with the number of bytes read so far.
    """
    ended, counting, read = threading.Event(), threading.Lock(), 0

    def count(size: int) -> None:
        nonlocal read
        with counting:
            read += size
            progress(read)

    # Hashing and reading release the GIL, so the threads run in parallel.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            return list(pool.map(lambda path: sha256_of(path, error, ended=ended, count=count), paths))
        finally:
            ended.set()


def checksums_wanted() -> bool:
    """Returns whether to verify checksums of data and weights: true unless ``ADAPONDER_VERIFY=0``."""
    setting = os.environ.get("ADAPONDER_VERIFY", "1")
    if setting not in ("0", "1"):
        raise InputError(f"ADAPONDER_VERIFY={setting} must be 1 (the default: verify checksums) or 0 (skip them)")
    return setting == "1"


def write_whole(path: Path, content: bytes, error: type[AdaPonderError] = AdaPonderError) -> None:
    """Replaces the content of ``path`` atomically: even after a power cut, the file has the old or the new content.

    If writing fails, raises ``error``, which names the file and the cure.
    """
    try:
        replace_file(path, content)
    except OSError as problem:
        raise error(
            f"{path} could not be written: {problem.strerror or problem}; what was finished before is intact: "
            "make room and run the same command again, it continues"
        ) from problem


def replace_file(path: Path, content: bytes) -> None:
    """Replaces the content of ``path`` atomically, like :func:`write_whole`, but raises :class:`OSError`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path; the file written there replaces ``path`` when the block ends.

    If the block or the disk fails, or the process is killed, ``path`` is unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
        _flush_names(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(folder: Path, partial: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Context manager that yields ``partial``, a new folder that replaces ``folder`` when the block ends.

    Raises if ``folder`` is not empty, unless ``overwrite`` is set. If the block or the disk fails, ``partial`` is
    removed and ``folder`` is unchanged.
    """
    replaced = partial.with_name(f"{partial.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            flush(path)
        flush(partial)
        try:
            if overwrite and folder.exists():
                folder.rename(replaced)
            partial.rename(folder)  # replaces an empty folder; raises if it holds anything
        except BaseException:
            if replaced.exists():
                replaced.rename(folder)
            raise
        _flush_names(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Locks an open file or folder; without ``wait``, returns ``False`` if another process holds the lock.

    The lock ends when the descriptor is closed, at the latest when the process ends. Raises :class:`OSError` if the
    file system does not support locks.
    """
    return lock_descriptor(descriptor, blocking=wait)


def flush(path: Path) -> None:
    """Flushes a file's content, or a folder's directory entries (after a rename), to disk with fsync."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_names(folder: Path) -> None:
    # Makes a rename durable across a power cut; systems on which folders cannot be opened do not need it.
    with contextlib.suppress(PermissionError):
        flush(folder)


def _whole(digits: str) -> int:
    if len(digits) > JSON_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _deeper_than(value: dict[str, Any] | list[Any], limit: int) -> bool:
    """Returns whether objects and lists are nested more than ``limit`` deep."""
    items = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_deeper_than(item, limit - 1) for item in items if isinstance(item, (dict, list)))
