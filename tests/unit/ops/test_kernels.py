"""Checks that the kernels compile, which Triton's interpreter does not check."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
COMPILER = Path(__file__).parents[2] / "kernel_compiler.py"


@pytest.mark.compiler
def test_every_launch_of_a_kernel_compiles_for_a_gpu(interpreted):
    result = subprocess.run([sys.executable, "-O", str(COMPILER)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
