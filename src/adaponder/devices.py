"""Device names, precisions and the rule of autocast.

torch is imported by the functions that need it: the command line lists precisions without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaponder.errors import InputError

if TYPE_CHECKING:
    import torch

# What --dtype takes; auto is the precision that weights were saved in, on a CPU at least float32.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# What --weights takes: quantised in the layers, or half precision throughout.
WEIGHTS = ("int8", "fp8", "bfloat16", "float16")


def as_device(name: str) -> torch.device:
    """Returns the device of that name; raises if this machine has none."""
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
    """Returns the precision of that name; ``auto`` stays a word, which Hugging Face's loaders take for "as saved"."""
    import torch

    if name not in DTYPES:
        raise InputError(f"--dtype {name} must be one of {', '.join(DTYPES)}")
    return name if name == "auto" else getattr(torch, name)


def hardware_name(device: torch.device | str) -> str:
    """Returns a device's name for results and records: a GPU's own, else ``cpu``, ``mps``, …"""
    import torch

    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def product_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the precision of products when ``train.dtype`` is ``dtype``: a CPU computes bfloat16 runs in float32."""
    import torch

    if dtype == "bfloat16" and device.type == "cpu":
        return torch.float32
    return getattr(torch, dtype)


def autocast(dtype: str, device: torch.device) -> torch.autocast:
    """Returns the autocast context of a forward when ``train.dtype`` is ``dtype``: bfloat16 except on a CPU."""
    import torch

    low = product_dtype(dtype, device) == torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=low)
