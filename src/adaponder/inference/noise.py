"""Random numbers that are a hash of (seed, sample, position, token id): the same in any batch, lane and run.

The generator is splitmix64 read at a counter: seed and sample make the stream's key, position and token id the counter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaponder.policies import as_int64

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Each shift and the factor after it; the last has none.
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def stream_key(seed: int, sample: int) -> int:
    """The int64 that starts the random stream of one sample of a request."""
    return as_int64(_mixed(_mixed(seed & _MASK) + (sample + 1) * _GOLDEN & _MASK))


def gumbel(key: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise ``[n, vocabulary]`` in float64, of each row's stream key and position (int64 ``[n]``).

    ``argmax(logits + gumbel)`` is then an exact draw from ``softmax(logits)``. Equals ``-log(-log(1 - u))`` of uniform
    numbers ``u`` with 52 bits, midpoints of their cells, so that neither 0 nor 1 occurs. Large noise, which lets a rare
    token win, comes from small ``u``, where the fewest digits are lost.
    """
    token = torch.arange(vocabulary, device=key.device)
    # The counter position * 2**32 + token is unique, and an odd factor keeps it so modulo 2**64.
    bits = (key + (position << 32) * as_int64(_GOLDEN))[:, None] + token * as_int64(_GOLDEN)
    for shift, factor in _ROUNDS:
        bits = bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))
        bits = bits * as_int64(factor) if factor != 1 else bits
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mixed(x: int) -> int:
    """splitmix64's output function, over whole numbers modulo 2**64."""
    for shift, factor in _ROUNDS:
        x = (x ^ (x >> shift)) * factor & _MASK
    return x
