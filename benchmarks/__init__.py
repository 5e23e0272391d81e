"""Measures speed and memory: ``python -m benchmarks train|prefill|decode|serve|ops`` from a checkout."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def child_environment(*paths: Path) -> dict[str, str]:
    """Returns the environment of a child process that imports from this checkout, or from other ``paths``."""
    roots = [str(path) for path in paths or (ROOT, ROOT / "src")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*roots, os.environ.get("PYTHONPATH")]))}


def stop(*processes: subprocess.Popen[bytes], patience: float) -> None:
    """Ends processes with SIGTERM, and those that still run after ``patience`` seconds with SIGKILL."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
