"""The expectation's pointwise work on a GPU: one kernel per chunk forward, one backward, in place where it may.

A program owns one row of the vocabulary and walks it twice: once for the sums, once to write. No logit is widened or
copied in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.rows import CHUNK_ELEMENTS, finite, launch, normaliser
from adaponder.ops.vocab_expectation.torch import Pointwise, chunked_expectation


def vocab_expectation(
    hidden: Tensor,
    weight: Tensor,
    table: Tensor,
    *,
    bias: Tensor | None = None,
    top_k: int | None = None,
    chunk: int | None = None,
    keep_logits: bool = False,
) -> Tensor:
    """Equals :func:`adaponder.ops.vocab_expectation.torch.vocab_expectation`; the whole vocabulary only."""
    if top_k is not None:
        raise ValueError(f"top_k={top_k}: the kernels mix the whole vocabulary; use the torch version")
    fused = Pointwise(softmax_, slopes_, CHUNK_ELEMENTS)
    return chunked_expectation(hidden, weight, table, bias, chunk, keep_logits, fused)


def softmax_(logits: Tensor, keep: bool = False) -> Tensor:
    """The probabilities of each row of ``logits [n, vocabulary]``, in their place unless they are to be kept."""
    probability = torch.empty_like(logits) if keep else logits
    launch(_softmax_kernel, logits, probability, probability.stride(0))
    return probability


def slopes_(logits: Tensor, grad_probability: Tensor, keep: bool = False) -> tuple[Tensor, Tensor]:
    """(logits, dp) -> (p, dz = p * (dp - <p, dp>)), each in the place of its argument; p is not where logits are kept.

    A backward may come again, and autograd does not see what a kernel overwrites.
    """
    probability = torch.empty_like(logits) if keep else logits
    strides = probability.stride(0), grad_probability.stride(0)
    launch(_slopes_kernel, logits, probability, grad_probability, *strides)
    return probability, grad_probability


@triton.jit
def _softmax_kernel(logits, found, found_stride, vocabulary, stride, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0).to(tl.int64)
    row, found_row = logits + index * stride, found + index * found_stride
    column = tl.arange(0, BLOCK)
    top, total = normaliser(row, column, vocabulary, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        tl.store(found_row + at, tl.exp(z - top) / total, mask=at < vocabulary)


@triton.jit
def _slopes_kernel(logits, found, grads, found_stride, grad_stride, vocabulary, stride, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0).to(tl.int64)
    row, found_row, grad_row = logits + index * stride, found + index * found_stride, grads + index * grad_stride
    column = tl.arange(0, BLOCK)
    # As in `normaliser`, with the sum of p * dp along.
    top, total, along = -float("inf"), 0.0, 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        dp = tl.load(grad_row + at, mask=at < vocabulary, other=0.0).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        level = finite(higher)
        old, new = tl.exp(top - level), tl.exp(z - level)
        total = total * old + tl.sum(new, 0)
        along = along * old + tl.sum(new * dp, 0)
        top = higher
    along = along / total  # <p, dp>
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        dp = tl.load(grad_row + at, mask=at < vocabulary, other=0.0).to(tl.float32)
        p = tl.exp(z - top) / total
        tl.store(found_row + at, p, mask=at < vocabulary)
        tl.store(grad_row + at, p * (dp - along), mask=at < vocabulary)
