"""What the kernels over the vocabulary share: a program owns one row of logits and walks it in blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.dispatch import on_device_of

# Elements of tokens x vocabulary held at once, backward twice: 2^29 bf16 values are 1 GiB.
CHUNK_ELEMENTS = 1 << 29
BLOCK = 8192
WARPS = 16


def launch(kernel, logits: Tensor, *arguments) -> None:
    """Runs ``kernel(logits, *arguments, vocabulary, stride, BLOCK)`` for each row of ``logits [n, vocabulary]``."""
    rows, vocabulary = logits.shape
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        with on_device_of(logits):
            kernel[(rows,)](logits, *arguments, vocabulary, logits.stride(0), BLOCK=block, num_warps=WARPS)


@triton.jit
def finite(level):
    """The level to take exponents from: where all logits so far are minus infinity, none of them counts yet."""
    return tl.where(level == -float("inf"), 0.0, level)


@triton.jit
def normaliser(row, column, vocabulary, BLOCK: tl.constexpr):  # noqa: N803
    """(maximum, sum of exponentials below it) of one row, in one walk: the sum is rescaled when the maximum moves."""
    top, total = -float("inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        level = finite(higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(z - level), 0)
        top = higher
    return top, total
