"""Picks tokens without storing the noise, and computes the truncation threshold from sorted logits.

To pick, each program adds noise to one part of a row's logits and finds their maximum. To truncate, one program per row
scans the sorted logits up to the first block with a token that is not kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.dispatch import on_device_of
from adaponder.ops.next_token.torch import GOLDEN, ROUNDS, Picked

BLOCK, SORTED_BLOCK = 1024, 2048
# Target number of programs for all rows together; fewer if the vocabulary has fewer blocks.
PROGRAMS = 512


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
    """Samples each row's next token, like ``pick`` in torch.py, except that logarithms may round differently."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if not rows:
        return Picked(token, bad)
    blocks = triton.cdiv(vocabulary, BLOCK)
    steps = triton.cdiv(blocks, max(1, PROGRAMS // rows))
    parts = triton.cdiv(blocks, steps)
    scores = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    winners = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    (shift0, factor0), (shift1, factor1), (shift2, _) = ROUNDS
    with on_device_of(logits):
        _part_kernel[(rows, parts)](
            logits, lanes, position, temperature, key, logits if least is None else least, scores, winners,
            vocabulary, logits.stride(0), temperature.stride(0), key.stride(0),
            0 if least is None else least.stride(0), steps,
            SAMPLED=sampled, TRUNCATED=least is not None, GOLDEN=GOLDEN,
            SHIFT0=shift0, FACTOR0=factor0, SHIFT1=shift1, FACTOR1=factor1, SHIFT2=shift2, BLOCK=BLOCK,
        )  # fmt: skip
        _row_kernel[(rows,)](scores, winners, token, bad, parts, vocabulary, PARTS=triton.next_power_of_2(parts))
    return Picked(token, bad)


@triton.jit
def _part_kernel(
    logits, lanes, position, temperature, key, least, scores, winners,
    vocabulary, logits_stride, temperature_stride, key_stride, least_stride, steps,
    SAMPLED: tl.constexpr, TRUNCATED: tl.constexpr, GOLDEN: tl.constexpr,
    SHIFT0: tl.constexpr, FACTOR0: tl.constexpr, SHIFT1: tl.constexpr, FACTOR1: tl.constexpr, SHIFT2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the highest noisy logit and its token in a part of the vocabulary; NaN if a logit is NaN or ``inf``."""
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
        if SAMPLED:  # noqa: SIM102 (a constexpr condition stays separate)
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
    # Ties go to the smallest id.
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
    # Ties go to the smallest id; if no score equals the best, any valid id will do: the row is bad.
    first = tl.min(tl.where((score == best) & inside, token, vocabulary), 0)
    tl.store(tokens + row, tl.minimum(first, vocabulary - 1).to(tl.int64))
    tl.store(bad + row, (wrong > 0) | (best == float("-inf")))


def least_kept(logits: Tensor, lanes: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    """Returns the smallest logit of each row that top-k, top-p and min-p keep, ``[n, 1]``.

    Equals ``least_kept`` in torch.py, except that sums of probabilities may round differently.
    """
    rows, vocabulary = logits.shape
    values = logits.sort(dim=-1, descending=True).values
    least = torch.empty(rows, 1, dtype=logits.dtype, device=logits.device)
    if rows:
        with on_device_of(logits):
            _least_kernel[(rows,)](
                values, lanes, numbers, top_k, least, vocabulary, values.stride(0), numbers.stride(0), top_k.stride(0),
                BLOCK=SORTED_BLOCK, num_warps=8,
            )  # fmt: skip
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
    num_kept, more = 0, 1
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
        num_kept += count
        more = (count == BLOCK).to(tl.int32)
        start += BLOCK
    tl.store(least + row, tl.load(values + tl.maximum(num_kept, 1) - 1))
