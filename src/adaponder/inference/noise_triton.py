"""Tokens picked without a tensor of noise: each program hashes and compares a part of one row's vocabulary."""

# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.inference.noise import GOLDEN, ROUNDS, Picked
from adaponder.ops.fused import on_device_of

_BLOCK = 1024
# Programs that all rows together should have, where the vocabulary allows.
_PROGRAMS = 512


def pick(
    logits: Tensor,
    lanes: Tensor,
    position: Tensor,
    temperature: Tensor,
    key: Tensor,
    *,
    sampled: bool = True,
    least: Tensor | None = None,
) -> Picked:
    """Equals :func:`adaponder.inference.noise.pick` but for the last digits of logarithms."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if not rows:
        return Picked(token, bad)
    blocks = triton.cdiv(vocabulary, _BLOCK)
    steps = triton.cdiv(blocks, max(1, _PROGRAMS // rows))
    parts = triton.cdiv(blocks, steps)
    scores = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    winners = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    (shift0, factor0), (shift1, factor1), (shift2, _) = ROUNDS
    with on_device_of(logits):
        _part_kernel[(rows, parts)](
            logits,
            lanes,
            position,
            temperature,
            key,
            logits if least is None else least,
            scores,
            winners,
            vocabulary,
            logits.stride(0),
            temperature.stride(0),
            key.stride(0),
            0 if least is None else least.stride(0),
            steps,
            SAMPLED=sampled,
            TRUNCATED=least is not None,
            GOLDEN=GOLDEN,
            SHIFT0=shift0,
            FACTOR0=factor0,
            SHIFT1=shift1,
            FACTOR1=factor1,
            SHIFT2=shift2,
            BLOCK=_BLOCK,
        )
        _row_kernel[(rows,)](scores, winners, token, bad, parts, vocabulary, PARTS=triton.next_power_of_2(parts))
    return Picked(token, bad)


@triton.jit
def _part_kernel(
    logits,
    lanes,
    position,
    temperature,
    key,
    least,
    scores,
    winners,
    vocabulary,
    logits_stride,
    temperature_stride,
    key_stride,
    least_stride,
    steps,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    GOLDEN: tl.constexpr,
    SHIFT0: tl.constexpr,
    FACTOR0: tl.constexpr,
    SHIFT1: tl.constexpr,
    FACTOR1: tl.constexpr,
    SHIFT2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of a part of the vocabulary and its score, which is NaN where a logit is NaN or infinite."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.load(lanes + row)
    heat = tl.load(temperature + lane * temperature_stride)
    golden = tl.full((), GOLDEN, tl.uint64)
    start = tl.load(key + lane * key_stride).to(tl.uint64) + (tl.load(position + row).to(tl.uint64) << 32) * golden
    offsets = tl.arange(0, BLOCK)
    leader = tl.full((BLOCK,), float("-inf"), tl.float64)
    token = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        place = (part * steps + step) * BLOCK + offsets
        inside = place < vocabulary
        logit = tl.load(logits + row * logits_stride + place, mask=inside, other=float("-inf")).to(tl.float64)
        wrong = tl.where(logit < float("inf"), wrong, 1)  # NaN compares as false
        if TRUNCATED:
            logit = tl.where(logit >= tl.load(least + row * least_stride).to(tl.float64), logit, float("-inf"))
        score = logit
        if SAMPLED:  # noqa: SIM102 (what is known when the kernel is compiled stands apart)
            if heat > 0:
                bits = start + place.to(tl.uint64) * golden
                bits = (bits ^ (bits >> SHIFT0)) * tl.full((), FACTOR0, tl.uint64)
                bits = (bits ^ (bits >> SHIFT1)) * tl.full((), FACTOR1, tl.uint64)
                bits = bits ^ (bits >> SHIFT2)
                uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
                score = logit / heat - tl.log(-tl.log(uniform))
        better = score > leader
        leader = tl.where(better, score, leader)
        token = tl.where(better, place, token)
    winner = tl.max(leader, 0)
    # Of equals, the smallest id.
    first = tl.min(tl.where(leader == winner, token, vocabulary), 0)
    winner = tl.where(tl.max(wrong, 0) > 0, float("nan"), winner)
    tl.store(scores + row * tl.num_programs(1) + part, winner)
    tl.store(winners + row * tl.num_programs(1) + part, first)


@triton.jit
def _row_kernel(scores, winners, tokens, bad, parts, vocabulary, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, PARTS)
    inside = offsets < parts
    score = tl.load(scores + row * parts + offsets, mask=inside, other=float("-inf"))
    token = tl.load(winners + row * parts + offsets, mask=inside, other=vocabulary)
    wrong = tl.max(tl.where(score < float("inf"), 0, 1), 0)
    best = tl.max(tl.where(score < float("inf"), score, float("-inf")), 0)
    # Of equals, the smallest id; of nothing, the first part's.
    first = tl.min(tl.where((score == best) & inside, token, vocabulary), 0)
    tl.store(tokens + row, tl.minimum(first, vocabulary - 1).to(tl.int64))
    tl.store(bad + row, (wrong > 0) | (best == float("-inf")))
