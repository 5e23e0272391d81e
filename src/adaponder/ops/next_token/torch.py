"""Picks the next token of each row: truncates by a logit threshold, then samples with Gumbel noise from a hash.

The noise depends only on seed, sample, position and token id, so it is the same in any batch, lane and run. The hash
is counter-based splitmix64, with a key from seed and sample and a counter from position and token id.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Rows processed at a time, which bounds the memory of noise and sorted logits.
_ROWS = 64
_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# Rounds of splitmix64: (shift, factor); no multiplication in the last.
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


class Picked(NamedTuple):
    """The token of each row, int64 ``[n]``; ``bad`` is true for rows with a NaN or ``inf`` logit, or only ``-inf``."""

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
    """Samples from ``softmax(logits / temperature)``; at temperature 0 takes the lowest id of the likeliest tokens.

    Args:
        logits: ``[n, V]``.
        lanes: int64 ``[n]``, the lane of each row.
        position: int64 ``[n]``, the position of each row in its sequence; hashed into the noise.
        temperature: float64 ``[lanes]``: 0, or at least 1e-5, so that quotients keep enough digits.
        key: int64 ``[lanes]``, from :func:`stream_key`.
        sampled: false skips the noise, which is allowed only if the temperature of all these rows is 0.
        least: ``[n, 1]`` in the logits' dtype: tokens with smaller logits are excluded; ``None``: no truncation.
    """
    best, token = logits.max(-1)
    if least is not None:
        logits = torch.where(logits >= least, logits, -math.inf)
    if sampled:
        chunks = zip(*(rows.split(_ROWS) for rows in (logits, temperature[lanes], key[lanes], position)), strict=True)
        token = torch.cat([_drawn(*chunk) for chunk in chunks])
    return Picked(token, ~(best.abs() < math.inf))  # NaN compares as false


def _drawn(logits: Tensor, temperature: Tensor, key: Tensor, position: Tensor) -> Tensor:
    wide, temperature = logits.double(), temperature[:, None]
    noisy = wide / temperature + gumbel(key, position, logits.shape[1])
    return torch.where(temperature > 0, noisy, wide).argmax(-1)


def least_kept(logits: Tensor, lanes: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    """Returns the smallest logit that truncation keeps in each row, ``[n, 1]``; the likeliest token is always kept.

    A token is kept if three conditions hold: its logit is at least the k-th largest; the probabilities of likelier
    tokens (normalised over the top k) sum to less than top-p; its probability is at least min-p times the largest.

    Args:
        logits: ``[n, V]``.
        lanes: int64 ``[n]``, the lane of each row.
        numbers: float64 ``[lanes, 3]``: temperature (0 counts as 1), top-p and the logarithm of min-p.
        top_k: int64 ``[lanes]``, from 1 to V.
    """
    chunks = zip(*(rows.split(_ROWS) for rows in (logits, numbers[lanes], top_k[lanes])), strict=True)
    return torch.cat([_least_kept(*chunk) for chunk in chunks])


def _least_kept(logits: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    values = logits.sort(dim=-1, descending=True).values
    temperature, top_p, log_min_p = numbers.split(1, dim=1)
    scaled = (values.double() - values[:, :1].double()) / torch.where(temperature > 0, temperature, 1.0)
    keep = values >= values.gather(1, top_k[:, None] - 1)
    probability = torch.where(keep, scaled, -math.inf).softmax(-1)
    before = torch.cat([torch.zeros_like(top_p), probability.cumsum(-1)[:, :-1]], dim=1)
    keep &= (before < top_p) | (top_p >= 1.0)
    keep &= scaled >= log_min_p
    return values.gather(1, keep.sum(-1, keepdim=True).clamp_min(1) - 1)


def stream_key(seed: int, sample: int) -> int:
    """Returns the int64 key of the random stream of sample number ``sample`` of a request with this ``seed``."""
    return _signed(_mixed(_mixed(seed & _MASK) + (sample + 1) * GOLDEN & _MASK))


def gumbel(key: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Returns standard Gumbel noise ``[n, vocabulary]`` in float64 from each row's stream key and position (int64).

    ``argmax(logits + noise)`` is an exact sample from ``softmax(logits)``. The noise is ``-log(-log(u))``, where
    ``u = (k + 0.5) / 2**52`` and ``k`` is a random integer of 52 bits. So ``u`` is never 0 or 1 and exact in float64,
    and even the largest noise, by which rare tokens win, is exact.
    """
    token = torch.arange(vocabulary, device=key.device)
    # The counter position * 2**32 + token is unique, and stays so modulo 2**64 times an odd factor.
    bits = (key + (position << 32) * _signed(GOLDEN))[:, None] + token * _signed(GOLDEN)
    for shift, factor in ROUNDS:
        bits = bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))
        bits = bits * _signed(factor) if factor != 1 else bits
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _mixed(x: int) -> int:
    """Applies the output function of splitmix64 to an integer from 0 to 2**64 - 1."""
    for shift, factor in ROUNDS:
        x = (x ^ (x >> shift)) * factor & _MASK
    return x


def _signed(x: int) -> int:
    """Returns the int64 value that is congruent to ``x`` modulo 2**64."""
    return (x + (1 << 63) & _MASK) - (1 << 63)
