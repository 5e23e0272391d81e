"""Records of measurements: every published number names the record it comes from."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adaponder.bench.timing import copy_rate, matmul_rate
from adaponder.errors import InputError
from adaponder.recipes import Recipe
from adaponder.version import __version__

# Paths whose changes since the commit make it ``-dirty``.
_MEASURED = ("src", "benchmarks/plain.py")
# Words of a recipe's or a device's name that file names leave out.
_COMMON = {"paper", "cpu", "adaponder", "nvidia", "geforce", "amd", "instinct"}


def conditions(device: torch.device, *, commit: str) -> dict[str, Any]:
    """Hardware with its measured rates, versions, commit and date."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "hardware": {
            "device": device_name(device),
            "matmul_flops": matmul_rate(device),
            "copy_bytes": copy_rate(device),
        },
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    own = {"adaponder": __version__, "python": platform.python_version()}
    return own | {package: _version(package) for package in ("torch", "transformers", "triton")}


def about(recipe: Recipe, overrides: Sequence[str]) -> dict[str, Any]:
    """A record's ``recipe``: its name, hash and overrides."""
    return {"name": recipe.name, "hash": recipe.fingerprint, "set": list(overrides)}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def checkout() -> Path:
    """The repository's root, which holds ``benchmarks/`` and ``tests/``."""
    return Path(__file__).parents[3]


def record_path(kind: str, device: torch.device, recipe: Recipe | None = None) -> Path:
    """The path of a record, such as ``benchmarks/records/train-70m-h200.json``."""
    folder = checkout() / "benchmarks" / "records"
    if not folder.parent.is_dir():
        raise InputError("--record: records are kept in a checkout's benchmarks/records; use --no-record and --json")
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    words = [kind, *_words("" if recipe is None else recipe.name), *(_words(hardware) if hardware else [device.type])]
    return folder / ("-".join(words) + ".json")


def commit_of(stated: str | None, *, needed: bool) -> str:
    """``stated``, or the checkout's commit, with ``-dirty`` if the sources differ from it."""
    if stated is not None:
        return stated
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None or head.returncode != 0:
        if needed:
            raise InputError("--commit: there is no git here to ask; say which commit is measured, or --no-record")
        return "unknown"
    changed = _git("diff", "--quiet", "HEAD", "--", *_MEASURED)
    return head.stdout.strip() + ("" if changed is not None and changed.returncode == 0 else "-dirty")


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word and word not in _COMMON]


def _git(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=checkout())
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
