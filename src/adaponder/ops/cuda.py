"""Compiles CUDA C++ at run time by NVRTC, which comes with PyTorch, and launches it through the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_…


class CompileError(RuntimeError):
    """Raised if NVRTC refuses the source or is not installed."""


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """Compiles CUDA C++ and returns the machine code; ``options`` name the architecture, as ``-arch=sm_90a``."""
    library, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    encoded = [option.encode() for option in options]
    array = (ctypes.c_char_p * len(encoded))(*encoded)
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        failed = library.nvrtcCompileProgram(program, len(encoded), array)
        if failed:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise CompileError(f"NVRTC error {failed}: {log.value.decode(errors='replace')}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


class Kernel:
    """A compiled kernel on one device; its launches are cooperative, so that blocks may wait for one another."""

    def __init__(self, code: bytes, name: str, device: torch.device, shared_bytes: int):
        self.device, self.shared_bytes = device, shared_bytes
        self._driver, self._module, self._function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the device's context current
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), code))
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
            limit = _MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(self._driver.cuFuncSetAttribute(self._function, limit, shared_bytes))

    def __call__(self, blocks: int, threads: int, arguments: Sequence[Tensor | int]) -> None:
        """Launches the kernel on the current stream; integers are passed as ``int``, tensors as pointers."""
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            shape = (blocks, 1, 1, threads, 1, 1, self.shared_bytes)
            packed = pack(arguments)
            self._check(self._driver.cuLaunchCooperativeKernel(self._function, *shape, stream, packed))

    def _check(self, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            raise RuntimeError(f"CUDA error {result}: {(text.value or b'unknown').decode()}")


def pack(arguments: Sequence[Tensor | int]) -> ctypes.Array[ctypes.c_void_p]:
    """Returns pointers to a kernel's arguments, which live as long as the result."""
    values = [
        ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else ctypes.c_int(argument)
        for argument in arguments
    ]
    packed = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    packed.values = values  # type: ignore[attr-defined]
    return packed


@lru_cache(maxsize=1)
def _nvrtc() -> ctypes.CDLL:
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    if torch.version.cuda is not None:
        names.insert(0, f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}")
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    packaged = sorted(str(path) for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*"))
    for name in names + packaged:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError("the library NVRTC was not found: install a CUDA build of PyTorch, which contains it")
