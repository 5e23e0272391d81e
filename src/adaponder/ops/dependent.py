"""Programmatic dependent launch: a kernel that starts, and reads its weights, while the one before it still runs.

A kernel launched with :func:`launch_options` calls ``allow_next`` at its start, loads what no kernel of the pass
writes (weights), and calls ``wait_for_previous`` before it reads or writes anything else. The wait ends when the kernel
before has ended and its writes are visible. A kernel that never waits would let the one after it run too early.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch_options(like: Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch: ``DEPENDENT`` for the kernel, ``launch_pdl`` for Triton where it is true."""
    return _options(like.device.index or 0) if like.is_cuda else {"DEPENDENT": False}


@lru_cache
def _options(device: int) -> dict[str, Any]:
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"DEPENDENT": True, "launch_pdl": True} if able else {"DEPENDENT": False}


@triton.jit
def allow_next(DEPENDENT: tl.constexpr):  # noqa: N803
    """The kernel after this one may start."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):  # noqa: N803
    """Returns when the kernel before this one has ended."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
