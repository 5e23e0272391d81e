"""The journal of a preparation (``progress.json``): what is done, and with which arguments it was begun."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adaponder.checkpoints.manifest import sealed
from adaponder.data.manifest import (
    FORMAT,
    JOURNAL,
    MANIFEST,
    SPLITS,
    DataError,
    Manifest,
    Shard,
    shard_from,
    unsealed,
)
from adaponder.data.shards import Shards
from adaponder.data.verify import sums_of, verify_sums
from adaponder.data.writer import leftovers
from adaponder.errors import InputError
from adaponder.files import lock, write_whole


@dataclass
class Journal:
    """What is done: per split the complete shards, and the number of the first document not in one."""

    fingerprint: dict[str, Any]
    tokenizer_hash: str | None = None
    end_token: str | None = None
    shards: dict[str, list[Shard]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))

    def save(self, out: Path) -> None:
        write_whole(out / JOURNAL, sealed(asdict(self) | {"format": FORMAT}).encode(), DataError)

    @classmethod
    def load(cls, out: Path) -> Journal:
        try:
            content = unsealed(out / JOURNAL)
            del content["format"]
            content["shards"] = {split: [shard_from(shard) for shard in content["shards"][split]] for split in SPLITS}
            return cls(**content)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{out / JOURNAL}: damaged ({error}); delete {out} and prepare again") from None


@contextlib.contextmanager
def owned(out: Path) -> Iterator[None]:
    """Only one preparation writes to a folder; the lock goes with the process, however that ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    try:
        _lock(descriptor, out)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, out: Path) -> None:
    try:
        alone = lock(descriptor)
    except OSError:
        # Neither Windows nor every network file system can lock a folder; there the user must not start two.
        return
    if not alone:
        raise InputError(f"--out {out}: another preparation is writing there")


def claimed(out: Path, fingerprint: dict[str, Any]) -> Journal:
    """The journal to go on from, in a folder that is new or was begun with the same arguments."""
    journal = Journal.load(out) if (out / JOURNAL).is_file() else None
    if journal is None and any(path.name != JOURNAL + ".tmp" for path in out.iterdir()):
        raise InputError(f"--out {out} is not empty and was not made by adaponder prepare: name another folder")
    if journal is None or journal.end_token is None:
        # Nothing was made yet: after a mistyped tokenizer the same folder may be used.
        journal = Journal(fingerprint)
        journal.save(out)
    _require_same(out, journal.fingerprint, fingerprint)
    _require_shards(out, journal)
    try:
        for path in leftovers(out):
            path.unlink()
        for split in SPLITS:
            (out / split).mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    return journal


def _require_shards(out: Path, journal: Journal) -> None:
    """Raises unless what is done is as it was written: nothing goes on from a damaged shard."""
    sums = {path: sha for split in SPLITS for path, sha in sums_of(out / split, journal.shards[split]).items()}
    try:
        verify_sums(out, sums)
    except DataError as error:
        raise DataError(f"{error}; delete {out} and prepare again") from None


def finished(out: Path, fingerprint: dict[str, Any]) -> Manifest | None:
    """The manifest of a folder that was prepared with the same arguments and is whole; ``None`` if there is work."""
    if not (out / MANIFEST).is_file():
        return None
    manifest = Manifest.load(out)
    _require_same(out, manifest.fingerprint, fingerprint)
    for split in manifest.splits:
        Shards.open(out, split)
    (out / JOURNAL).unlink(missing_ok=True)
    return manifest


def _require_same(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to mix two preparations, naming each argument that differs."""
    old, new = json.loads(json.dumps(before)), json.loads(json.dumps(now))
    changed = [
        f"{name} was {_short(old.get(name))}, is {_short(new.get(name))}"
        for name in dict.fromkeys([*new, *old])
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise InputError(f"--out {out} was begun with other arguments: {'; '.join(changed)}; delete it or name another")


def _short(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return ", ".join(
            f"{part['input']} ({part['files']} files, {part['bytes']} bytes, {part['contents'][:8]})" for part in value
        )
    return str(value)[:100]
