"""Chooses between the PyTorch version of an operation and its Triton kernels.

An operation is a folder: ``torch.py`` is the reference and supports every case, device and precision; ``triton.py`` has
kernels with the same signatures; ``__init__.py`` chooses between them, mostly by :func:`dispatch`. The environment
variable ``ADAPONDER_KERNELS=0`` disables all kernels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Not float32, where the torch version is more exact if one token is nearly certain.
_FUSED_DTYPES = (torch.bfloat16, torch.float16)


def dispatch(plain: Callable[P, T], when: Callable[..., bool]) -> Callable[P, T]:
    """Returns an operation that calls ``plain`` or, if ``when`` is true, the function of that name in ``triton.py``.

    ``when`` receives the operation's arguments. ``triton.py`` is imported on first use.
    """
    kernels = plain.__module__.removesuffix("torch") + "triton"

    @functools.wraps(plain)
    def operation(*args: P.args, **kwargs: P.kwargs) -> T:
        if when(*args, **kwargs):
            return getattr(importlib.import_module(kernels), plain.__name__)(*args, **kwargs)
        return plain(*args, **kwargs)

    return operation


def has_kernels(like: Tensor, *_: object, **__: object) -> bool:
    """Returns whether Triton kernels may run: Triton is installed, ``like`` on CUDA, ``ADAPONDER_KERNELS`` is not 0."""
    return HAS_TRITON and like.is_cuda and os.environ.get("ADAPONDER_KERNELS") != "0"


def runs_fused(like: Tensor, *_: object, **__: object) -> bool:
    """Returns whether an operation with matrix products runs its Triton kernels: on CUDA, in bf16 or fp16.

    False under ``torch.compile``, which traces and fuses the torch version.
    """
    return not torch.compiler.is_compiling() and has_half_kernels(like)


def has_half_kernels(like: Tensor) -> bool:
    """Returns whether Triton kernels may run (:func:`has_kernels`) and products with ``like`` are in bf16 or fp16."""
    return has_kernels(like) and compute_dtype(like) in _FUSED_DTYPES


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """Context manager that makes the tensor's device current, because Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def compute_dtype(like: Tensor) -> torch.dtype:
    """Returns the precision of a matrix product with ``like``: autocast's if enabled, else the dtype of ``like``.

    An operation calls this in forward and reuses the result in backward, where autocast is off.
    """
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
