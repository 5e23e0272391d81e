"""Measures speed and memory: ``python -m benchmarks train|prefill|decode|serve|ops`` from a checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def child_environment(*paths: Path) -> dict[str, str]:
    """Returns the environment of a child process that imports from this checkout, or from other ``paths``."""
    own = paths or (ROOT, ROOT / "src")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, own), os.environ.get("PYTHONPATH")]))}
