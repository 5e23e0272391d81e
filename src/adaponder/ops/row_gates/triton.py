"""Computes the gates of few rows, reading for each row only the weights of its own gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.dispatch import on_device_of
from adaponder.ops.kernels import allow_next, launch_options, wait_for_previous
from adaponder.ops.row_gates.torch import FEW, StackedGates, counter_on
from adaponder.ops.row_gates.torch import stacked_gates as plain
from adaponder.ops.row_linear.kernels import activate, row_tile, weight_tile

# Inner features and warps per program.
FEATURES, WARPS = 4, 4


def stacked_gates(stacked: StackedGates, hidden: Tensor, iteration: Tensor, *, counter: Tensor | None = None) -> Tensor:
    """Returns each row's gate logit, by the gate of its iteration, like ``stacked_gates`` in torch.py."""
    inner = stacked.inner
    rows, inputs = hidden.shape
    if rows > FEW or inner is None or hidden.stride(-1) != 1 or inner.dtype != hidden.dtype:
        return plain(stacked, hidden, iteration)
    gates, width, _ = inner.shape
    blocks = triton.cdiv(width, FEATURES)
    logits = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    if rows:
        parts = torch.empty(rows, blocks, dtype=torch.float32, device=hidden.device)
        done = counter_on(hidden.device) if counter is None else counter
        with on_device_of(hidden):
            _gate_kernel[(blocks, rows)](
                hidden, iteration, inner, stacked.inner_bias, stacked.out, stacked.out_bias, parts, done, logits,
                gates - 1, width, hidden.stride(0),
                INPUTS=inputs, BLOCK=triton.next_power_of_2(inputs), FEATURES=FEATURES,
                PARTS=triton.next_power_of_2(blocks), num_warps=WARPS, **launch_options(hidden),
            )  # fmt: skip
    return logits


@triton.jit
def _gate_kernel(
    hidden, iteration, inner, inner_bias, out, out_bias, parts, done, logits, last, width, stride,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, FEATURES: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    allow_next(DEPENDENT)
    block, row = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(0)
    feature = block * FEATURES + tl.arange(0, FEATURES)
    wait_for_previous(DEPENDENT)
    gate = tl.minimum(tl.load(iteration + row), last).to(tl.int64)
    weight = weight_tile(inner + gate * width * INPUTS, block * FEATURES, width, INPUTS, BLOCK, FEATURES)
    values = row_tile(hidden + row * stride, INPUTS, BLOCK).to(tl.float32)
    at, inside = gate * width + feature, feature < width
    between = tl.sum(weight.to(tl.float32) * values, 1)
    between += tl.load(inner_bias + at, mask=inside, other=0.0).to(tl.float32)
    between = activate(between, 1) * tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(parts + row * blocks + block, tl.sum(between, 0))
    tl.debug_barrier()
    if tl.atomic_add(done + row, 1, sem="acq_rel") == blocks - 1:
        number = tl.arange(0, PARTS)
        block_sums = tl.load(parts + row * blocks + number, mask=number < blocks, other=0.0, cache_modifier=".cg")
        tl.store(logits + row, tl.sum(block_sums, 0) + tl.load(out_bias + gate).to(tl.float32))
        tl.store(done + row, 0)
