"""Parses device names and dtypes, and builds the autocast context of a run.

torch is imported inside functions, so that the command line can list dtypes without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaponder.errors import InputError

if TYPE_CHECKING:
    import torch

# Values of --dtype; auto: the precision that the weights were saved in, but at least float32 on a CPU.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# Values of --weights: int8 and fp8 quantise the layers' linear maps to one byte per weight; bfloat16 and float16
# convert the whole model.
WEIGHTS = ("int8", "fp8", "bfloat16", "float16")


def as_device(name: str) -> torch.device:
    """Returns the torch device ``name``; raises if the name is unknown or this machine lacks that CUDA device."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name}: unknown device; use cpu, cuda, cuda:1, mps, …") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; see adaponder doctor"
        )
    return device


def as_dtype(name: str) -> str | torch.dtype:
    """Returns the torch dtype ``name``; ``auto`` stays a string, which makes Hugging Face load the saved dtype."""
    import torch

    if name not in DTYPES:
        raise InputError(f"--dtype {name} must be one of {', '.join(DTYPES)}")
    return name if name == "auto" else getattr(torch, name)


def hardware_name(device: torch.device | str) -> str:
    """Returns a device's name for results and records: the GPU's model name, else ``cpu``, ``mps``, …"""
    import torch

    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def product_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of matrix products with ``train.dtype=dtype``; on a CPU, float32 instead of bfloat16."""
    import torch

    if dtype == "bfloat16" and device.type == "cpu":
        return torch.float32
    return getattr(torch, dtype)


def autocast(dtype: str, device: torch.device) -> torch.autocast:
    """Returns the autocast context of a run with ``train.dtype=dtype``; enabled for bfloat16 except on a CPU."""
    import torch

    low = product_dtype(dtype, device) == torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=low)
