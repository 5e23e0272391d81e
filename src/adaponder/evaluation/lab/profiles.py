"""Stores profiles beside the weights that they were calibrated for, and rejects them for any other weights.

``profiles.json`` is not in the checkpoint's manifest, so it contains its own checksum: a truncated or edited file is
rejected. It is written to a temporary file that is then renamed, so it is never half written.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from adaponder.checkpoints.manifest import is_sealed, sealed
from adaponder.errors import CheckpointError, InputError
from adaponder.files import lock, read_json, replace_file
from adaponder.policies import Policy, parse_policy
from adaponder.policies.choice import profile_policy

FILE, FORMAT = "profiles.json", 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Files up to _WHOLE bytes are hashed whole; of larger ones, _BLOCKS evenly spaced blocks: training changes all weights.
_WHOLE, _BLOCKS, _BLOCK = 1 << 26, 64, 1 << 18


def load_profile(folder: str | Path, name: str) -> Policy:
    """Returns the policy of the profile ``name`` that ``adaponder calibrate`` stored in ``folder``."""
    return profile_policy(stored(Path(folder)), name, "--profile")


def stored(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns a model's profiles by name, the smallest budget first; empty if there is no ``profiles.json``.

    Raises if the file is damaged or was made for other weights.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        return {}
    content = read_json(path)
    cure = f"remove {path.name} and calibrate again"
    profiles: Any = content.get("profiles")
    readable = isinstance(profiles, dict) and all(map(_is_profile, profiles.values()))
    if content.get("format") != FORMAT or not readable:
        raise CheckpointError(f"{path} does not hold profiles of format {FORMAT}; {cure}")
    if not is_sealed(content):
        raise CheckpointError(f"{path}: checksum mismatch, the file was damaged or edited by hand; {cure}")
    if content.get("weights") != identity(folder):
        raise CheckpointError(f"{path}: its profiles were calibrated for other weights or another config; {cure}")
    return dict(sorted(profiles.items(), key=lambda item: (item[1].get("budget", math.inf), item[0])))


def _is_profile(profile: Any) -> bool:
    """Returns whether ``profile`` has values of the types that ``store`` writes."""
    if not isinstance(profile, dict) or not isinstance(profile.get("policy"), str):
        return False
    return isinstance(profile.get("budget", 0), (int, float))


def store(folder: Path, name: str, profile: dict[str, Any]) -> Path:
    """Adds or replaces one profile, whose ``policy`` is text for :func:`parse_policy`; returns the file's path."""
    check_name(name)
    parse_policy(profile["policy"])
    path = folder / FILE
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every network file system can lock a folder
            lock(descriptor, wait=True)  # two processes may add profiles at the same time
        profiles = stored(folder) | {name: profile}
        content: dict[str, Any] = {"format": FORMAT, "weights": identity(folder), "profiles": profiles}
        replace_file(path, sealed(content).encode())
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}; earlier profiles are untouched") from error
    finally:
        os.close(descriptor)
    return path


def check_name(name: str) -> None:
    """Raises unless ``name`` is a letter or digit and at most 63 more letters, digits, dots, dashes or underscores."""
    if not _NAME.fullmatch(name):
        raise InputError(f"--name {name!r} must be at most 64 letters, digits, dots, dashes and underscores")


def identity(folder: Path) -> str:
    """Returns a hash of the config and weights in ``folder``; of large files, only evenly spaced blocks are hashed."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        if path.name == "optimizer.safetensors":
            continue  # the optimizer's state in a step folder is not part of the model
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        if size <= _WHOLE:
            digest.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            for index in range(_BLOCKS):
                file.seek(index * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
