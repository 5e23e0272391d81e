"""Contains what the kernels of several operations share: dependent launches and walks over the vocabulary."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.dispatch import on_device_of

# Elements of tokens x vocabulary held at once, backward twice: 2^29 bf16 values are 1 GiB.
CHUNK_ELEMENTS = 1 << 29
BLOCK = 8192
WARPS = 16


def launch_options(like: Tensor) -> dict[str, Any]:
    """Returns a launch's options for programmatic dependent launch: it starts while the kernel before it still runs.

    Such a kernel calls :func:`allow_next` at its start, loads what no kernel of the pass writes (weights), and calls
    :func:`wait_for_previous` before it reads or writes anything else. The wait ends when the kernel before has ended
    and its writes are visible. A kernel that never waits would let the one after it run too early.
    """
    return _options(like.device.index or 0) if like.is_cuda else {"DEPENDENT": False}


@lru_cache
def _options(device: int) -> dict[str, Any]:
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"DEPENDENT": True, "launch_pdl": True} if able else {"DEPENDENT": False}


@triton.jit
def allow_next(DEPENDENT: tl.constexpr):
    """Lets the kernel after this one start."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Returns when the kernel before this one has ended."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def finite(level):
    """Returns the level to take exponents from: 0 where all logits so far are minus infinity."""
    return tl.where(level == -float("inf"), 0.0, level)


def launch_rows(kernel, logits: Tensor, *arguments) -> None:
    """Runs ``kernel(logits, *arguments, vocabulary, stride, BLOCK)`` for each row of ``logits [n, vocabulary]``."""
    rows, vocabulary = logits.shape
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        with on_device_of(logits):
            kernel[(rows,)](logits, *arguments, vocabulary, logits.stride(0), BLOCK=block, num_warps=WARPS)


@triton.jit
def normaliser(row, column, vocabulary, BLOCK: tl.constexpr):
    """Returns a row's maximum and the sum of exponentials below it, which is rescaled when the maximum moves."""
    top, total = -float("inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        level = finite(higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(z - level), 0)
        top = higher
    return top, total
