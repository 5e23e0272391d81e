"""Before a benchmark the operations' tests run on its device, and nothing is measured if one fails."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from adaponder.bench.record import checkout, device_name, versions
from adaponder.errors import EvaluationError, InputError

_TRAINING = ("kernels", "vocab_expectation", "linear_cross_entropy", "gelu", "rotary", "joined")
_DECODING = ("ledger_attention_triton", "row_linear", "row_vocabulary", "row_gates", "lane_books", "lane_windows")
_TESTED = (*_TRAINING, *_DECODING)
TESTS = tuple(f"tests/unit/ops/test_{name}.py" for name in _TESTED)
TAIL = 30


def require_tests(device: torch.device) -> bool:
    """Runs the operations' tests on this device; raises with the tail of pytest's output if one fails.

    Returns whether they ran: they need not if they have passed on such a device and nothing has changed since.
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
    code, output = run_tests(arguments, where)
    if code != 0:
        tail = "\n".join(output.rstrip().splitlines()[-TAIL:])
        raise EvaluationError(f"{tail}\nthe operations' tests fail (above): nothing is measured")
    proof.parent.mkdir(exist_ok=True)
    proof.write_text(output)
    return True


def _digest(root: Path, device: torch.device) -> str:
    """A hash of everything the tests' outcome depends on: sources, tests, versions, device, the kernels' switch."""
    switch = os.environ.get("ADAPONDER_KERNELS", "")
    digest = hashlib.sha256(f"{versions()} {device_name(device)} {switch}".encode())
    for path in sorted([*(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py"), root / "pyproject.toml"]):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def run_tests(arguments: list[str], where: dict[str, str]) -> tuple[int, str]:
    """(exit code, output) of a command in the checkout, with the checkout's own sources."""
    root = checkout()
    paths = [str(root / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)} | where
    done = subprocess.run(
        arguments, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout
