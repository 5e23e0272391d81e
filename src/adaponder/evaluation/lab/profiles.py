"""Profiles: policies calibrated for a budget, stored by name beside the weights, and refused for any other weights.

``profiles.json`` lies outside the checkpoint's manifest and carries its own checksum, so a truncated or edited file is
refused. It is written under another name and renamed, so it is never half written.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adaponder.checkpoints.manifest import is_sealed, sealed
from adaponder.errors import AdaPonderError, CheckpointError, InputError
from adaponder.files import lock, read_json, replace_file
from adaponder.policies import Policy, parse_policy

FILE, FORMAT = "profiles.json", 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Weights up to this size are hashed whole; of larger ones so many evenly spaced blocks, which any training step moves.
_WHOLE, _BLOCKS, _BLOCK = 1 << 26, 64, 1 << 18


def load_profile(folder: str | Path, name: str, *, option: str = "--profile") -> Policy:
    """The policy of profile ``name`` of the model in ``folder``, which ``adaponder calibrate`` stored there.

    ``option`` is what errors name.
    """
    folder = Path(folder)
    profiles = stored(folder)
    if name not in profiles:
        cure = f"there are {', '.join(profiles)}" if profiles else "there are none"
        raise InputError(f"{option} {name}: {folder} has no such profile, {cure}; adaponder calibrate makes them")
    try:
        return parse_policy(profiles[name]["policy"])
    except (KeyError, TypeError, AttributeError, AdaPonderError) as error:
        raise CheckpointError(f"{folder / FILE}: profile {name} has no policy that can be read ({error})") from None


def stored(folder: Path) -> dict[str, dict[str, Any]]:
    """Profiles of the model in ``folder`` by name, the smallest budget first.

    Raises if the file was changed or belongs to other weights.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        return {}
    content = read_json(path)
    cure = f"remove {path.name} and calibrate again"
    profiles = content.get("profiles")
    if content.get("format") != FORMAT or not isinstance(profiles, dict):
        raise CheckpointError(f"{path}: not profiles of format {FORMAT}; {cure}")
    if not is_sealed(content):
        raise CheckpointError(f"{path}: its checksum differs, so it was damaged or edited by hand; {cure}")
    if content.get("weights") != identity(folder):
        raise CheckpointError(f"{path}: its profiles were calibrated for other weights or another config; {cure}")
    return dict(sorted(profiles.items(), key=_by_budget))


def _by_budget(named: tuple[str, Any]) -> tuple[float, str]:
    """What profiles are sorted by: the budget, and the name among equal ones."""
    name, profile = named
    budget = profile.get("budget") if isinstance(profile, dict) else None
    return (budget if isinstance(budget, (int, float)) else math.inf), name


def store(folder: Path, name: str, profile: dict[str, Any]) -> Path:
    """Adds or replaces one profile; ``profile["policy"]`` is a line that :func:`parse_policy` reads."""
    check_name(name)
    parse_policy(profile["policy"])
    path = folder / FILE
    with _alone_in(folder):
        profiles = stored(folder) | {name: profile}
        content: dict[str, Any] = {"format": FORMAT, "weights": identity(folder), "profiles": profiles}
        try:
            replace_file(path, sealed(content).encode())
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error}; earlier profiles are untouched") from error
    return path


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other process adds a profile: of two that do at once, neither is lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every network file system can lock a folder
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InputError(f"--name {name!r}: letters, digits, dots, dashes and underscores, at most 64 of them")


def identity(folder: Path) -> str:
    """A hash of the config and the weights in ``folder``; of large weights, of blocks spread over each file."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        if path.name == "optimizer.safetensors":
            continue  # a step folder's moments are not part of the model
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        for block in _blocks(path, size):
            digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= _WHOLE:
            while block := file.read(_BLOCK):
                yield block
            return
        for index in range(_BLOCKS):
            file.seek(index * (size - _BLOCK) // (_BLOCKS - 1))
            yield file.read(_BLOCK)
