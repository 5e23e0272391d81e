"""Makes long work resumable: saves finished parts on disk, so that a rerun with the same settings continues."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from adaponder.errors import InputError
from adaponder.files import read_json, write_whole
from adaponder.terminal import console, errors
from adaponder.version import __version__

FOLDER = "unfinished"
_SETTINGS = "settings.json"
_FACTS = "facts"


class JournalPart(NamedTuple):
    """A finished part of a task: JSON values (``facts``), and arrays, both by name."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Journal:
    """Stores the finished parts of a task in a folder, one file per part, until :meth:`remove` deletes them.

    The constructor raises if the folder holds parts that were saved with other ``settings`` (JSON values).
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self.folder = folder
        self.settings = json.loads(json.dumps({**settings, "adaponder": __version__}))
        if not (folder / _SETTINGS).exists():
            return
        if changes := changed_settings(read_json(folder / _SETTINGS, InputError), self.settings):
            raise InputError(
                f"{folder} holds {len(self)} finished parts of another measurement ({'; '.join(changes)}): "
                "use the same settings to continue, name another --out, or delete that folder to start over"
            )

    def __len__(self) -> int:
        return len(list(self.folder.glob("*.npz")))

    def load(self, name: str) -> JournalPart | None:
        """Returns the part ``name``, or ``None`` if it has not been saved; raises if its file is damaged."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            with np.load(path) as archive:
                arrays = {key: archive[key] for key in archive.files}
            return JournalPart(json.loads(str(arrays.pop(_FACTS))), arrays)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is damaged ({error}): delete it to measure that part again") from None

    def save(self, name: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Writes a finished part atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / _SETTINGS).exists():
            write_whole(self.folder / _SETTINGS, json.dumps(self.settings, indent=2).encode())
        content = io.BytesIO()
        members = {_FACTS: np.array(json.dumps(facts)), **(arrays or {})}
        np.savez(content, **members)  # pyright: ignore[reportArgumentType]
        write_whole(self._path(name), content.getvalue())

    def remove(self) -> None:
        """Deletes the parts, and the folder unless it holds other files."""
        for path in [*self.folder.glob("*.npz"), self.folder / _SETTINGS]:
            path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _path(self, name: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.npz"


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], text_of: Callable[[Any], str] = str
) -> list[str]:
    """Returns ``NAME was X, is Y`` for each setting whose JSON value differs between ``before`` and ``now``."""
    old, new = json.loads(json.dumps(before)), json.loads(json.dumps(now))
    return [
        f"{name} was {text_of(old.get(name))[:100]}, is {text_of(new.get(name))[:100]}"
        for name in dict.fromkeys([*new, *old])
        if old.get(name) != new.get(name)
    ]


@contextmanager
def resuming(journal: Journal | None, part: str) -> Iterator[None]:
    """Context manager for work that saves finished parts in ``journal``; with ``None`` (no ``--out``) nothing is saved.

    Prints how many parts an earlier call finished and, when interrupted, how many are saved. ``part`` is the word for a
    part in these messages, such as ``row``.
    """
    if journal is not None and len(journal):
        console.print(Text(f"resuming: {_count(journal, part)} in {journal.folder}"))

    def sentence() -> str:
        if journal is None:
            return f"nothing was saved; with --out DIR, each finished {part} is"
        if not len(journal):
            return f"nothing was saved: no {part} was finished"
        return f"{_count(journal, part)} saved in {journal.folder}; run the same command again to continue"

    with on_interrupt(sentence):
        yield


@contextmanager
def on_interrupt(sentence: str | Callable[[], str]) -> Iterator[None]:
    """Context manager that prints ``sentence`` to standard error on Ctrl-C, and raises the interrupt again."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print(Text(f"\n{sentence if isinstance(sentence, str) else sentence()}"), soft_wrap=True)
        raise


def _count(journal: Journal, part: str) -> str:
    """Returns "1 finished row is" or "2 finished rows are"."""
    count = len(journal)
    return f"1 finished {part} is" if count == 1 else f"{count} finished {part}s are"
