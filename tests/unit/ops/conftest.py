"""Where kernels are tested: compiled on a GPU if there is one, else in Triton's interpreter."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from poison import poisoned  # noqa: F401

if find_spec("triton") is None:  # no Triton on this platform: tests that import kernels are left out
    tests = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [path.name for path in tests if "import triton" in path.read_text()]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One test of each kernel: one of its cases runs on the device before a benchmark (``-m kernel_check``).
CHECKS = {
    "test_the_kernels_are_no_worse_than_the_plain_version",
    "test_attention_of_scattered_rows_is_no_worse_than_the_reference",
    "test_the_kernels_equal_the_reference",
    "test_a_row_that_enters_is_written_and_reads_itself",
    "test_the_kernels_equal_the_plain_version",
    "test_the_kernel_equals_the_plain_version",
    "test_logits_equal_the_heads",
    "test_the_expectation_equals_the_plain_one",
    "test_kernels_keep_the_same_books",
    "test_kernels_move_windows_alike",
    "test_value_and_slope_are_no_worse_than_torchs_own",
    "test_the_rotation_equals_each_familys_own_bit_for_bit",
}


@pytest.fixture
def on_device():
    """Makes tensors on the device that kernels run on."""
    with torch.device(DEVICE):
        yield


@pytest.fixture(autouse=True)
def _where_kernels_run(request):
    """Skips interpreted cases where kernels are compiled."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    interpreted = params.get("device") == "cpu" or "interpreted" in request.fixturenames
    if interpreted and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU in this process, not interpreted")


@pytest.fixture
def interpreted():
    """Requested by tests whose kernels run on CPU tensors."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    chosen = Counter()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        check = getattr(item, "originalname", None), params.get("op")
        if check[0] in CHECKS and params.get("device", DEVICE) == DEVICE:
            chosen[check] += 1
            if chosen[check] == (6 if "op" in params else 2):  # the cases before have a single row or none
                item.add_marker("kernel_check")
