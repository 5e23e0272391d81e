"""No figure of an operation that is wrong: its tests run first, and a failure ends the measurement."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from adaponder.bench.record import checkout, device_name, versions
from adaponder.errors import EvaluationError, InputError

_TESTED = ("kernels", "vocab_expectation", "linear_cross_entropy", "gelu", "rotary", "joined")
TESTS = tuple(f"tests/unit/test_{name}.py" for name in _TESTED)
TAIL = 30


def require_tests(device: torch.device) -> bool:
    """Raises with the tail of what pytest said unless every test of the operations passes on this device.

    False if they need not run: they have passed on such a device before, and no source and no test has changed since.
    """
    root = checkout()
    if missing := [test for test in TESTS if not (root / test).is_file()]:
        raise InputError(f"{missing[0]} is not there: bench runs from a checkout; --trust measures untested operations")
    proof = root / "build" / f"tested-{_digest(root, device)}"
    if proof.is_file():
        return False
    arguments = [sys.executable, "-m", "pytest", "-q", *TESTS]
    # Kernels are compiled or interpreted, never both in one process.
    where = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if device.type == "cuda":
        arguments, where = [*arguments, "-m", "gpu or not gpu"], {}
    code, said = run_tests(arguments, where)
    if code != 0:
        tail = "\n".join(said.rstrip().splitlines()[-TAIL:])
        raise EvaluationError(f"{tail}\nthe operations' tests fail (above): nothing is measured")
    proof.parent.mkdir(exist_ok=True)
    proof.write_text(said)
    return True


def _digest(root: Path, device: torch.device) -> str:
    """Of what decides how the tests end: every source and test by content, versions, device, the kernels' switch."""
    switch = os.environ.get("ADAPONDER_KERNELS", "")
    seen = hashlib.sha256(f"{versions()} {device_name(device)} {switch}".encode())
    for path in sorted([*(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py"), root / "pyproject.toml"]):
        seen.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return seen.hexdigest()[:16]


def run_tests(arguments: list[str], where: dict[str, str]) -> tuple[int, str]:
    """(exit code, what it said) of a command in the checkout, with the checkout's own sources."""
    root = checkout()
    paths = [str(root / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)} | where
    done = subprocess.run(
        arguments, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout
