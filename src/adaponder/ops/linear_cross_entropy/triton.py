"""The loss's pointwise work on a GPU: one kernel per chunk forward that only reads, one backward in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.linear_cross_entropy.torch import IGNORE, Pointwise, chunked_cross_entropy

# Elements of tokens x vocabulary held at once: 2^29 bf16 values are 1 GiB.
CHUNK_ELEMENTS = 1 << 29
BLOCK = 8192
WARPS = 16


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Equals :func:`adaponder.ops.linear_cross_entropy.torch.linear_cross_entropy`."""
    return chunked_cross_entropy(hidden, weight, targets, bias, chunk, Pointwise(losses, slopes_, CHUNK_ELEMENTS))


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """``logsumexp(z) - z[target]`` of each row in float32; 0 where the target is ignored."""
    rows, vocabulary = logits.shape
    found = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _losses_kernel[(rows,)](
            logits, targets, found, vocabulary, logits.stride(0), IGNORE, BLOCK=_block(vocabulary), num_warps=WARPS
        )
    return found


def slopes_(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """``(softmax(z) - onehot(target)) * grad`` of each row, in the place of the logits."""
    rows, vocabulary = logits.shape
    if rows:
        # An expanded gradient (of a sum) has stride 0, and the kernel walks it by one.
        _slopes_kernel[(rows,)](
            logits,
            targets,
            grad.contiguous(),
            vocabulary,
            logits.stride(0),
            IGNORE,
            BLOCK=_block(vocabulary),
            num_warps=WARPS,
        )
    return logits


def _block(vocabulary: int) -> int:
    return min(BLOCK, triton.next_power_of_2(vocabulary))


@triton.jit
def _normaliser(row, column, vocabulary, BLOCK: tl.constexpr):  # noqa: N803
    """(maximum, sum of exponentials below it) of one row, in one walk."""
    top, total = -float("inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    return top, total


@triton.jit
def _losses_kernel(logits, targets, found, vocabulary, stride, ignore, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    top, total = _normaliser(row, tl.arange(0, BLOCK), vocabulary, BLOCK)
    target = tl.load(targets + index)
    counts = target != ignore
    hit = tl.load(row + target, mask=counts, other=0.0).to(tl.float32)
    tl.store(found + index, tl.where(counts, tl.log(total) + (top - hit), 0.0))


@triton.jit
def _slopes_kernel(logits, targets, grads, vocabulary, stride, ignore, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    column = tl.arange(0, BLOCK)
    top, total = _normaliser(row, column, vocabulary, BLOCK)
    target = tl.load(targets + index)
    grad = tl.where(target != ignore, tl.load(grads + index), 0.0)
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        slope = tl.exp(z - top) / total - tl.where(at == target, 1.0, 0.0)
        tl.store(row + at, slope * grad, mask=at < vocabulary)
