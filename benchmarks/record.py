"""Describes the conditions of a record: date, commit, hardware and versions."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from adaponder.errors import InputError
from adaponder.version import __version__
from benchmarks import ROOT

# Changes to these paths since the commit mark it ``-dirty``.
MEASURED = ("src", "benchmarks/plain.py")


def provenance(device: torch.device | str, *, commit: str) -> dict[str, Any]:
    """Returns the fields that every record begins with: date, commit, hardware and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "hardware": device_name(torch.device(device)),
        "versions": versions(),
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
    """Returns ``stated`` or, if it is ``None``, the checkout's commit, with ``-dirty`` if ``paths`` have changed."""
    if stated is not None:
        return stated
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        if required:
            raise InputError("--commit is needed where there is no git: name it, or use --no-record") from None
        return "unknown"
    return head + ("-dirty" if _git("diff", "--name-only", "HEAD", "--", *paths) else "")


def _git(*arguments: str) -> str:
    """Returns what a git command prints; raises if it fails."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
