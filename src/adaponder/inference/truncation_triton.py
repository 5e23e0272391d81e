"""The threshold of truncation from sorted logits: one program per row, which ends where the kept tokens do."""

# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.fused import on_device_of

_BLOCK = 2048


def least_kept(logits: Tensor, lanes: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    """Equals :func:`adaponder.inference.truncation.least_kept` but for the last digits of sums."""
    rows, vocabulary = logits.shape
    values = logits.sort(dim=-1, descending=True).values
    least = torch.empty(rows, 1, dtype=logits.dtype, device=logits.device)
    if rows:
        with on_device_of(logits):
            _least_kernel[(rows,)](
                values,
                lanes,
                numbers,
                top_k,
                least,
                vocabulary,
                values.stride(0),
                numbers.stride(0),
                top_k.stride(0),
                BLOCK=_BLOCK,
                num_warps=8,
            )
    return least


@triton.jit
def _least_kernel(
    values, lanes, numbers, top_k, least, vocabulary, stride, numbers_stride, top_k_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    values += row * stride
    heat = tl.load(numbers + lane * numbers_stride)
    heat = tl.where(heat > 0, heat, 1.0)
    top_p = tl.load(numbers + lane * numbers_stride + 1)
    log_min_p = tl.load(numbers + lane * numbers_stride + 2)
    best = tl.load(values).to(tl.float64)
    smallest = tl.load(values + tl.load(top_k + lane * top_k_stride) - 1).to(tl.float64)
    offsets = tl.arange(0, BLOCK)
    mass = tl.zeros((), tl.float64) + float("inf")
    if top_p < 1.0:
        mass = tl.zeros((), tl.float64)
        start, head = 0, best
        while (start < vocabulary) & (head >= smallest):
            value = tl.load(values + start + offsets, mask=start + offsets < vocabulary, other=float("-inf"))
            value = value.to(tl.float64)
            mass += tl.sum(tl.where(value >= smallest, tl.exp((value - best) / heat), 0.0), 0)
            start += BLOCK
            head = tl.load(values + start, mask=start < vocabulary, other=float("-inf")).to(tl.float64)
        mass *= top_p
    kept, more = 0, 1
    start, before = 0, tl.zeros((), tl.float64)
    while (start < vocabulary) & (more > 0):
        inside = start + offsets < vocabulary
        value = tl.load(values + start + offsets, mask=inside, other=float("-inf")).to(tl.float64)
        scaled = (value - best) / heat
        stays = inside & (value >= smallest) & (scaled >= log_min_p)
        if top_p < 1.0:
            weight = tl.where(value >= smallest, tl.exp(scaled), 0.0)
            stays = stays & (before + tl.cumsum(weight, 0) - weight < mass)
            before += tl.sum(weight, 0)
        count = tl.sum(stays.to(tl.int32), 0)
        kept += count
        more = (count == BLOCK).to(tl.int32)
        start += BLOCK
    tl.store(least + row, tl.load(values + tl.maximum(kept, 1) - 1))
