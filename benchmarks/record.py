"""Writes records: every published number names the record it comes from, with hardware, versions, commit and date."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adaponder.errors import InputError
from adaponder.files import write_whole
from adaponder.version import __version__

ROOT = Path(__file__).resolve().parents[1]
# Changes to these paths since the commit mark it ``-dirty``.
MEASURED = ("src", "benchmarks/plain.py")


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes ``record`` as JSON, replacing the file at once, so that an interruption leaves a whole record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def provenance(device: torch.device | str, *, commit: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields that every record begins with: date, commit, hardware and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "hardware": device_name(torch.device(device)),
        "versions": versions(*packages),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Returns the versions of adaponder, Python, torch, transformers, triton and further ``packages``."""
    installed: dict[str, str | None] = {"adaponder": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton", *packages):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed


def device_name(device: torch.device) -> str:
    """Returns the GPU's name, or the CPU's architecture and thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def commit_of(stated: str | None, *, required: bool, paths: Sequence[str] = MEASURED) -> str:
    """Returns ``stated``, or the checkout's commit, with ``-dirty`` if ``paths`` differ from it."""
    if stated is not None:
        return stated
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None or head.returncode != 0:
        if required:
            raise InputError("--commit is needed where there is no git: name the measured commit, or use --no-record")
        return "unknown"
    changes = _git("diff", "--quiet", "HEAD", "--", *paths)
    return head.stdout.strip() + ("" if changes is not None and changes.returncode == 0 else "-dirty")


def _git(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return None
