"""Chooses between the torch version of an operation and its Triton kernels.

An operation is a folder: ``torch.py`` is the reference (every case, device and precision), ``triton.py`` holds kernels
with the same signatures, ``__init__.py`` joins both by :func:`dispatch`. ``ADAPONDER_KERNELS=0`` turns all kernels off.
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
# In float32 the torch version is closer to the truth where one token is nearly certain: its sums cancel better.
_FUSED_DTYPES = (torch.bfloat16, torch.float16)


def dispatch(plain: Callable[P, T], kernels: str, when: Callable[..., bool]) -> Callable[P, T]:
    """Returns ``plain`` that is computed by the function of the same name in module ``kernels`` where ``when`` holds.

    ``when`` gets the operation's arguments; the module is imported at the first such call.
    """

    @functools.wraps(plain)
    def operation(*args: P.args, **kwargs: P.kwargs) -> T:
        if when(*args, **kwargs):
            return getattr(importlib.import_module(kernels), plain.__name__)(*args, **kwargs)
        return plain(*args, **kwargs)

    return operation


def has_kernels(like: Tensor, *_: object, **__: object) -> bool:
    """Returns whether Triton kernels may run on the device of ``like``: on CUDA, unless ``ADAPONDER_KERNELS=0``."""
    return HAS_TRITON and like.is_cuda and os.environ.get("ADAPONDER_KERNELS") != "0"


def runs_fused(like: Tensor, *_: object, **__: object) -> bool:
    """Returns whether an operation on products runs its kernels: where products are computed in bf16 or fp16.

    Under ``torch.compile`` the torch version is traced, and the compiler fuses it.
    """
    return not torch.compiler.is_compiling() and has_kernels(like) and compute_dtype(like) in _FUSED_DTYPES


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """Makes the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def compute_dtype(like: Tensor) -> torch.dtype:
    """Returns the precision in which autocast would compute a product of ``like``.

    Autocast is off inside a custom Function's backward, so an operation chooses its precision once, for both.
    """
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
