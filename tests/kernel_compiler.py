"""Compiles the kernels for an H200 on a machine without a GPU: ``python -O tests/kernel_compiler.py [pytest options]``.

Triton's interpreter checks no types and runs kernels that do not compile. Here the tests in ``unit/ops`` run as on a
GPU, with its precisions and the blocks of real runs, but tensors stay on the CPU and a launch only compiles. Results
are not computed, so none is judged: ``-O`` removes the tests' assertions. A launch that does not compile, or needs more
shared memory than the GPU has, fails its test. A kernel that no test launches fails the run.
"""

import importlib
import os
import pkgutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # schemathesis does not load without assertions

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernel_support
from adaponder import ops

TESTS = Path(__file__).parent / "unit" / "ops"
# Left out: torch.compile, and a test that replaces tl.dot in the interpreter.
CHOICE = ["-m", "not every and not compiler", "-k", "not compile and not is_not_read", "-p", "no:cacheprovider"]
OUTPUT = ["-q", "--assert=plain", "--disable-warnings", "--tb=short", "--show-capture=no"]
# Fixtures that make blocks small and skip tests for the interpreter's sake.
INTERPRETED = ("_small_blocks", "_where_kernels_run")
CAPABILITY = (9, 0)
SHARED_BYTES = 227 * 1024


class PretendedGPU(TorchFunctionMode):
    """Makes the GPU's tensors on the CPU, and reports the GPU as the device of every tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func == Tensor.is_cuda.__get__:
            return True
        options = {name: _to_cpu(value) for name, value in (kwargs or {}).items()}
        if (wide := options.pop("out_dtype", None)) is not None:  # products with wider sums exist on a GPU only
            args = [x.to(wide) for x in args]
        return func(*map(_to_cpu, args), **options)


def _to_cpu(value: Any) -> Any:
    is_gpu = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_gpu else value


class LaunchCompiler:
    """A plugin of pytest that runs tests on the pretended GPU and collects the kernels that compiled."""

    def __init__(self):
        self.compiled: set[JITFunction] = set()
        self.run = JITFunction.run

    def launch(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Replaces ``JITFunction.run``: specialises and compiles a kernel for these arguments as a launch does."""
        if "DEPENDENT" in options:  # decode's fused body launches attention so, and otherwise it is the same kernel
            options |= {"DEPENDENT": True, "launch_pdl": True}
        try:
            binary: Any = self.run(kernel, *args, grid=grid, warmup=True, **options)
            if binary.metadata.shared > SHARED_BYTES:
                raise MemoryError(f"{binary.metadata.shared} bytes of shared memory; the GPU has {SHARED_BYTES}")
        except Exception as error:
            given = [x.dtype if isinstance(x, Tensor) else x for x in args]
            error.add_note(f"in the launch of {_name(kernel)} with {given}, {options}")
            raise
        self.compiled.add(kernel)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out cases on the CPU, those in float16, which compile as in bf16, and fixtures of the interpreter."""
        parameters = [getattr(getattr(item, "callspec", None), "params", {}) for item in items]
        pairs = zip(items, parameters, strict=True)
        items[:] = [
            item for item, given in pairs if given.get("device") != "cpu" and given.get("dtype") != torch.float16
        ]
        for item in items:
            item.fixturenames[:] = [name for name in item.fixturenames if name not in INTERPRETED]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        with PretendedGPU():
            return (yield)


def _name(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def kernels() -> set[JITFunction]:
    """Returns the package's Triton functions that no other Triton function calls."""
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    functions = {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
    called = {name for function in functions for name in function.fn.__code__.co_names}
    return {function for function in functions if function.fn.__name__ not in called}


def main() -> int:
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=SHARED_BYTES)
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.device = nullcontext
    current = {"target": GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32), "device": 0, "stream": 0}
    gpu: Any = SimpleNamespace(
        **{f"get_current_{key}": lambda *_, value=value: value for key, value in current.items()}
    )
    driver.set_active(gpu)
    torch.testing.assert_close = kernel_support.assert_close = lambda *_, **__: None
    kernel_support.error = lambda *_: 0.0
    kernel_support.precisions = lambda _: [torch.bfloat16]
    kernel_support.assert_no_worse = lambda make, ours, plain, dtype: kernel_support.differentiate(
        ours, make(dtype=dtype, seed=0)
    )
    plugin = LaunchCompiler()
    JITFunction.run = lambda kernel, *args, **options: plugin.launch(kernel, *args, **options)
    tests = [str(path) for path in sorted(TESTS.glob("test_*.py")) if "import triton" in path.read_text()]
    status = pytest.main([*CHOICE, *OUTPUT, *tests, *sys.argv[1:]], [plugin])
    missing = sorted(map(_name, kernels() - plugin.compiled))
    print(f"{len(plugin.compiled)} kernels compiled; launched by no test: {', '.join(missing) or 'none'}")
    return int(status) or bool(missing)


if __name__ == "__main__":
    sys.exit(main())
