"""When an operation runs its Triton kernels, and the one product that every chunked operation shares."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
# In float32 the torch version is closer to the truth where one token is nearly certain: its sums cancel better.
_FUSED_DTYPES = (torch.bfloat16, torch.float16)


def has_kernels(like: Tensor) -> bool:
    """Whether Triton kernels may run where ``like`` lies: on CUDA, unless ``ADAPONDER_KERNELS=0`` says otherwise."""
    return HAS_TRITON and like.is_cuda and os.environ.get("ADAPONDER_KERNELS") != "0"


def runs_fused(like: Tensor) -> bool:
    """Whether an operation on products runs its kernels: where products are computed in bf16 or fp16.

    Under ``torch.compile`` the torch version is traced, and the compiler fuses it.
    """
    return not torch.compiler.is_compiling() and has_kernels(like) and compute_dtype(like) in _FUSED_DTYPES


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def compute_dtype(like: Tensor) -> torch.dtype:
    """What autocast would compute a product of ``like`` in.

    Autocast is off inside a custom Function's backward, so an operation chooses its precision once, for both.
    """
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def rows_per_chunk(rows: int, vocabulary: int, elements: int) -> int:
    """Even chunks of at most about ``elements`` logits; whole tiles of 128 rows where there are that many."""
    most = max(1, elements // vocabulary)
    if rows <= most or most < 128:
        return most
    even = -(-rows // -(-rows // most))
    return min(most, -(-even // 128) * 128)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, the sum kept in ``total``'s own, wider precision from start to end on CUDA."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
