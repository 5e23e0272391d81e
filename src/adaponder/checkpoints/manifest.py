"""Writes checkpoint folders with a ``manifest.json`` of sizes and checksums, and verifies them.

Verifying reads each listed file once, in several threads: a second or two per gigabyte.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from adaponder.errors import CheckpointError
from adaponder.files import parse_json, read_bytes, read_json, replace_file, replacing_folder, sha256_of_each

MANIFEST, FORMAT = "manifest.json", 2
# Not listed in the manifest: profiles are added and replaced later, and have their own checksum.
_UNLISTED = {MANIFEST, "profiles.json"}
# The format of earlier versions, which has no checksum of the manifest itself.
_OLDER = 1


def write_manifest(folder: Path, names: Iterable[str] | None = None, **facts: Any) -> None:
    """Writes the manifest of the files ``names`` (``None``: all but hidden files) with ``facts`` as further entries."""
    if names is None:
        names = [path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    listed = sorted(set(names) - _UNLISTED)
    sums = sha256_of_each([folder / name for name in listed])
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": checksum}
        for name, checksum in zip(listed, sums, strict=True)
    }
    replace_file(folder / MANIFEST, sealed({"format": FORMAT, **facts, "files": files}).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest, whose ``files`` maps names to sizes and SHA-256; raises if it is invalid or was edited."""
    path = folder / MANIFEST
    raw = read_bytes(path)
    content = parse_json(raw, path)
    older = content.get("format") == _OLDER and "checksum" not in content
    files: Any = content.get("files")
    complete = (older or content.get("format") == FORMAT) and isinstance(files, dict)
    if not complete or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise CheckpointError(f"{path} is not a manifest of a whole checkpoint; {_cure(folder)}")
    unsealed = {key: value for key, value in content.items() if key != "checksum"}
    if not older and raw != sealed(unsealed).encode():
        raise CheckpointError(f"{path}: checksum differs from what was written; {_cure(folder)}")
    return content


def verify_files(
    folder: Path,
    *,
    only: Collection[str] | None = None,
    skip: str | None = None,
    may_be_missing: Collection[str] = (),
) -> None:
    """Raises unless each listed file has the manifest's size and checksum; does nothing without a manifest.

    ``only``: names of files to verify; ``skip``: suffix of files to leave out; ``may_be_missing``: names of listed
    files that need not exist.
    """
    if not os.path.lexists(folder / MANIFEST) or not read_json(folder / MANIFEST).keys() & {"format", "files"}:
        return  # no manifest, or one of another program
    listed = {
        name: written
        for name, written in read_manifest(folder)["files"].items()
        if (only is None or name in only) and (skip is None or not name.endswith(skip))
    }
    present = [name for name in listed if os.path.lexists(folder / name)]
    if missing := [name for name in listed if name not in present and name not in may_be_missing]:
        raise CheckpointError(f"{folder / missing[0]} is missing; {_cure(folder)}")
    for name in present:
        path, size = folder / name, listed[name]["bytes"]
        if path.is_file() and path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {size} were written; {_cure(folder)}")
    for name, checksum in zip(present, sha256_of_each([folder / name for name in present]), strict=True):
        if checksum != listed[name]["sha256"]:
            raise CheckpointError(f"{folder / name}: checksum differs from what was written; {_cure(folder)}")


def _cure(folder: Path) -> str:
    return f"copy the checkpoint again, or if the change is intended, adaponder doctor {folder} --seal"


def _is_entry(name: str, entry: Any) -> bool:
    return (
        Path(name).name == name
        and isinstance(entry, dict)
        and set(entry) == {"bytes", "sha256"}
        and isinstance(entry["bytes"], int)
        and isinstance(entry["sha256"], str)
    )


@contextmanager
def saving(folder: Path, *, intact: str, partial: Path | None = None, overwrite: bool = False) -> Iterator[Path]:
    """Context manager that saves a weights folder atomically.

    Yields ``partial``, by default a folder beside ``folder``, which replaces ``folder`` when the block ends. If saving
    fails, the error message ends with ``intact``, which should tell the user what was not changed.
    """
    partial = partial or folder.with_name(f"{folder.name}.partial")
    try:
        with replacing_folder(folder, partial, overwrite=overwrite):
            yield partial
            share_weights(partial)
    except (OSError, SafetensorError) as error:  # SafetensorError: the disk is full
        raise CheckpointError(f"{folder} could not be saved: {error}; {intact}") from error


def share_weights(folder: Path) -> None:
    """Gives the weights in ``folder`` the permissions of its config file.

    safetensors 0.8 writes files that only their owner may read, regardless of the umask.
    """
    configs = [path for name in ("config.json", "adapter_config.json") if (path := folder / name).exists()]
    for path in folder.glob("*.safetensors") if configs else ():
        # Only if needed: some file systems refuse to change modes.
        if path.stat().st_mode != configs[0].stat().st_mode:
            shutil.copymode(configs[0], path)


def sealed(content: dict[str, Any]) -> str:
    """Returns ``content`` as JSON with a last entry ``checksum``, the checksum of the other entries."""
    return json.dumps(content | {"checksum": _checksum(content)}, indent=1) + "\n"


def is_sealed(content: dict[str, Any]) -> bool:
    """Returns whether ``content["checksum"]`` is the checksum of the other entries, as :func:`sealed` computes it."""
    return content.get("checksum") == _checksum({key: value for key, value in content.items() if key != "checksum"})


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
