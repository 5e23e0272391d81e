"""Helpers of the kernels: programmatic dependent launch, and loops over the vocabulary."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.dispatch import on_device_of

# Elements of tokens x vocabulary in memory at a time (twice as many in backward): 2^29 bf16 values are 1 GiB.
CHUNK_ELEMENTS = 1 << 29
BLOCK = 8192
WARPS = 16


def launch_options(like: Tensor) -> dict[str, Any]:
    """Returns the options of a programmatic dependent launch: a kernel starts while its predecessor still runs.

    Such a kernel calls :func:`allow_next` first, loads only weights, which no kernel writes, and then calls
    :func:`wait_for_previous` before any other read or write. The wait lasts until the predecessor has ended and its
    writes are visible. Every kernel must wait, otherwise its successor could start too early. GPUs before compute
    capability 9.0 get an ordinary launch.
    """
    return _options(like.device.index or 0) if like.is_cuda else {"DEPENDENT": False}


@lru_cache
def _options(device: int) -> dict[str, Any]:
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"DEPENDENT": True, "launch_pdl": True} if able else {"DEPENDENT": False}


@triton.jit
def allow_next(DEPENDENT: tl.constexpr):
    """Lets the next kernel on the stream start (programmatic dependent launch)."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits until the previous kernel on the stream has ended (programmatic dependent launch)."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def finite(maximum):
    """Replaces a maximum of minus infinity by 0, because ``exp(x - maximum)`` would be NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


def launch_rows(kernel, logits: Tensor, *arguments) -> None:
    """Runs ``kernel(logits, *arguments, vocabulary, stride, BLOCK)`` for each row of ``logits [n, vocabulary]``."""
    rows, vocabulary = logits.shape
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        with on_device_of(logits):
            kernel[(rows,)](logits, *arguments, vocabulary, logits.stride(0), BLOCK=block, num_warps=WARPS)


@triton.jit
def normaliser(row, column, vocabulary, BLOCK: tl.constexpr):
    """Returns the maximum of a row of logits ``z`` and the sum of ``exp(z - maximum)``, by an online softmax."""
    top, total = -float("inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        level = finite(higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(z - level), 0)
        top = higher
    return top, total
