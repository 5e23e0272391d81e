"""What a measurement was made on: without it, a figure is a rumour."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adaponder.bench.timing import copy_rate, matmul_rate
from adaponder.version import __version__


def conditions(device: torch.device, *, commit: str | None) -> dict[str, Any]:
    """Hardware with its measured ceilings, versions, commit and date."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or _commit(),
        "hardware": {"device": name, "matmul_flops": matmul_rate(device), "copy_bytes": copy_rate(device)},
        "versions": {"adaponder": __version__, "python": platform.python_version()}
        | {package: _version(package) for package in ("torch", "transformers", "triton")},
    }


def checkout() -> Path:
    """The folder that holds ``benchmarks/``: the plain versions live there, outside the package."""
    return Path(__file__).parents[3]


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True, cwd=checkout()
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
