"""Random numbers that are a hash of (seed, sample, position, token id): the same in any batch, lane and run.

The generator is splitmix64 read at a counter: seed and sample make the stream's key, position and token id the counter.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.ops.fused import HAS_TRITON
from adaponder.policies import as_int64

# Rows whose noise exists at a time.
_ROWS = 64
_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# Each shift and the factor after it; the last has none.
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def stream_key(seed: int, sample: int) -> int:
    """The int64 that starts the random stream of one sample of a request."""
    return as_int64(_mixed(_mixed(seed & _MASK) + (sample + 1) * GOLDEN & _MASK))


def has_kernels(logits: Tensor) -> bool:
    """Whether tokens are chosen by Triton kernels: on CUDA, unless ``ADAPONDER_KERNELS=0`` says otherwise."""
    return logits.is_cuda and HAS_TRITON and os.environ.get("ADAPONDER_KERNELS") != "0"


class Picked(NamedTuple):
    """A token of each row, int64 ``[n]``; ``bad`` marks rows that have a logit of NaN or ``inf``, or only ``-inf``."""

    token: Tensor
    bad: Tensor


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
    """An exact draw from ``softmax(logits / temperature)``; at temperature 0 the first of the likeliest tokens.

    Args:
        logits: ``[n, V]``.
        lanes: int64 ``[n]``.
        position: int64 ``[n]``.
        temperature: float64 ``[lanes]``: 0, or not below 1e-5, so that quotients keep enough digits.
        key: int64 ``[lanes]``, from :func:`stream_key`.
        sampled: false where all these rows' temperatures are 0: noise is not computed.
        least: ``[n, 1]``, of the logits' type: tokens with smaller logits are left out; ``None`` leaves out none.
    """
    if has_kernels(logits):
        from adaponder.inference import noise_triton

        return noise_triton.pick(logits, lanes, position, temperature, key, sampled=sampled, least=least)
    best, token = logits.max(-1)
    if least is not None:
        logits = torch.where(logits >= least, logits, -math.inf)
    if sampled:
        parts = zip(*(rows.split(_ROWS) for rows in (logits, temperature[lanes], key[lanes], position)), strict=True)
        token = torch.cat([_drawn(*part) for part in parts])
    return Picked(token, ~(best.abs() < math.inf))  # NaN compares as false


def _drawn(logits: Tensor, temperature: Tensor, key: Tensor, position: Tensor) -> Tensor:
    wide, temperature = logits.double(), temperature[:, None]
    noisy = wide / temperature + gumbel(key, position, logits.shape[1])
    return torch.where(temperature > 0, noisy, wide).argmax(-1)


def gumbel(key: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise ``[n, vocabulary]`` in float64, of each row's stream key and position (int64 ``[n]``).

    ``argmax(logits + gumbel)`` is then an exact draw from ``softmax(logits)``. Equals ``-log(-log(u))`` of uniform
    numbers ``u`` with 52 bits, midpoints of their cells: neither 0 nor 1 occurs, and float64 holds each exactly, so
    that the largest noise, which lets a rare token win, is as exact as any.
    """
    token = torch.arange(vocabulary, device=key.device)
    # The counter position * 2**32 + token is unique, and an odd factor keeps it so modulo 2**64.
    bits = (key + (position << 32) * as_int64(GOLDEN))[:, None] + token * as_int64(GOLDEN)
    for shift, factor in ROUNDS:
        bits = bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))
        bits = bits * as_int64(factor) if factor != 1 else bits
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _mixed(x: int) -> int:
    """splitmix64's output function, over whole numbers modulo 2**64."""
    for shift, factor in ROUNDS:
        x = (x ^ (x >> shift)) * factor & _MASK
    return x
