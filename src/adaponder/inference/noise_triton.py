"""Draws without a tensor of noise: each program hashes and compares a part of one row's vocabulary."""

# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.inference.noise import GOLDEN, ROUNDS
from adaponder.ops.fused import on_device_of

_BLOCK = 1024
# Programs that all rows together should have, where the vocabulary allows.
_PROGRAMS = 512


def draw(logits: Tensor, best: Tensor, temperature: Tensor, key: Tensor, position: Tensor) -> Tensor:
    """Equals :func:`adaponder.inference.noise.draw` but for the last digits of logarithms."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    blocks = triton.cdiv(vocabulary, _BLOCK)
    steps = triton.cdiv(blocks, max(1, _PROGRAMS // rows))
    parts = triton.cdiv(blocks, steps)
    scores = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    winners = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    (shift0, factor0), (shift1, factor1), (shift2, _) = ROUNDS
    with on_device_of(logits):
        _draw_kernel[(rows, parts)](
            logits,
            best,
            temperature,
            key,
            position,
            scores,
            winners,
            vocabulary,
            logits.stride(0),
            temperature.stride(0),
            key.stride(0),
            steps,
            GOLDEN=GOLDEN,
            SHIFT0=shift0,
            FACTOR0=factor0,
            SHIFT1=shift1,
            FACTOR1=factor1,
            SHIFT2=shift2,
            BLOCK=_BLOCK,
        )
        _win_kernel[(rows,)](scores, winners, tokens, parts, vocabulary, PARTS=triton.next_power_of_2(parts))
    return tokens


@triton.jit
def _draw_kernel(
    logits,
    best,
    temperature,
    key,
    position,
    scores,
    winners,
    vocabulary,
    logits_stride,
    temperature_stride,
    key_stride,
    steps,
    GOLDEN: tl.constexpr,
    SHIFT0: tl.constexpr,
    FACTOR0: tl.constexpr,
    SHIFT1: tl.constexpr,
    FACTOR1: tl.constexpr,
    SHIFT2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row * temperature_stride)
    top = tl.load(best + row).to(tl.float64)
    golden = tl.full((), GOLDEN, tl.uint64)
    start = tl.load(key + row * key_stride).to(tl.uint64) + (tl.load(position + row).to(tl.uint64) << 32) * golden
    offsets = tl.arange(0, BLOCK)
    leader = tl.full((BLOCK,), float("-inf"), tl.float64)
    token = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        place = (part * steps + step) * BLOCK + offsets
        inside = place < vocabulary
        logit = tl.load(logits + row * logits_stride + place, mask=inside, other=float("-inf")).to(tl.float64)
        score = logit
        if heat > 0:
            bits = start + place.to(tl.uint64) * golden
            bits = (bits ^ (bits >> SHIFT0)) * tl.full((), FACTOR0, tl.uint64)
            bits = (bits ^ (bits >> SHIFT1)) * tl.full((), FACTOR1, tl.uint64)
            bits = bits ^ (bits >> SHIFT2)
            uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
            score = (logit - top) / heat - tl.log(-tl.log(uniform))
        better = score > leader
        leader = tl.where(better, score, leader)
        token = tl.where(better, place, token)
    winner = tl.max(leader, 0)
    # Of equals, the smallest id.
    first = tl.min(tl.where(leader == winner, token, vocabulary), 0)
    tl.store(scores + row * tl.num_programs(1) + part, winner)
    tl.store(winners + row * tl.num_programs(1) + part, first)


@triton.jit
def _win_kernel(scores, winners, tokens, parts, vocabulary, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, PARTS)
    inside = offsets < parts
    score = tl.load(scores + row * parts + offsets, mask=inside, other=float("-inf"))
    token = tl.load(winners + row * parts + offsets, mask=inside, other=vocabulary)
    first = tl.min(tl.where(score == tl.max(score, 0), token, vocabulary), 0)
    tl.store(tokens + row, first.to(tl.int64))
