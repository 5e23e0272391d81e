"""Programmatic dependent launch: a kernel that starts, and reads its weights, while the one before it still runs.

A kernel launched with :func:`launch_options` calls ``allow_next`` at its start, loads what no kernel of the pass
writes (weights), and calls ``wait_for_previous`` before it reads or writes anything else. The wait ends when the kernel
before has ended and its writes are visible. A kernel that never waits would let the one after it run too early.

While it waits, memory is idle: ``bring`` lets the weights of a later kernel be on their way to the cache by then.
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


# Bytes that one thread asks for at once.
PIECE = tl.constexpr(128)


@triton.jit
def bring(weight, pieces, DEPENDENT: tl.constexpr):  # noqa: N803
    """Asks for so many pieces from ``weight`` on; the programs along the first axis share the asking."""
    if DEPENDENT:
        # None where the row is not the first.
        share = tl.where(tl.program_id(1) == 0, tl.cdiv(pieces, tl.num_programs(0)), 0)
        first = tl.program_id(0) * share
        last = tl.minimum(first + share, pieces)
        numbers: tl.constexpr = 8 * PIECE // weight.dtype.element_ty.primitive_bitwidth
        for start in range(first, last, 128):
            piece = start + tl.arange(0, 128)
            tl.inline_asm_elementwise(
                "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
                "=r,l,r",
                [weight + piece.to(tl.int64) * numbers, (piece < last).to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
