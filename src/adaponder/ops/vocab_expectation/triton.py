"""Computes the softmax of a chunk of logits by one kernel and its backward by another, both in place.

A program processes the logits of one token in two loops over the vocabulary: one for the sums, one to write. Logits
are converted to float32 only in registers.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.kernels import CHUNK_ELEMENTS, finite, launch_rows, normaliser
from adaponder.ops.vocab_expectation import torch as plain
from adaponder.ops.vocab_expectation.torch import Pointwise


def softmax_(logits: Tensor, keep: bool = False) -> Tensor:
    """Returns the softmax of each row of ``logits [n, vocabulary]``; overwrites the logits unless ``keep`` is true."""
    probability = torch.empty_like(logits) if keep else logits
    launch_rows(_softmax_kernel, logits, probability, probability.stride(0))
    return probability


def gradients_(logits: Tensor, grad_probability: Tensor, keep: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the probabilities p and the gradient of the logits, ``p * (dp - <p, dp>)``.

    The gradient overwrites ``dp = grad_probability``; p overwrites the logits unless ``keep`` is true. Logits saved for
    backward need ``keep``: backward may run twice, and autograd does not notice that a kernel has overwritten them.
    """
    probability = torch.empty_like(logits) if keep else logits
    strides = probability.stride(0), grad_probability.stride(0)
    launch_rows(_gradients_kernel, logits, probability, grad_probability, *strides)
    return probability, grad_probability


vocab_expectation = partial(plain.vocab_expectation, pointwise=Pointwise(softmax_, gradients_, CHUNK_ELEMENTS))


@triton.jit
def _softmax_kernel(logits, probability, probability_stride, vocabulary, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row, probability_row = logits + index * stride, probability + index * probability_stride
    column = tl.arange(0, BLOCK)
    top, total = normaliser(row, column, vocabulary, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        tl.store(probability_row + at, tl.exp(z - top) / total, mask=at < vocabulary)


@triton.jit
def _gradients_kernel(
    logits, probability, grads, probability_stride, grad_stride, vocabulary, stride, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row, probability_row, grad_row = (
        logits + index * stride,
        probability + index * probability_stride,
        grads + index * grad_stride,
    )
    column = tl.arange(0, BLOCK)
    # The loop of `normaliser`, which also sums p * dp.
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
        tl.store(probability_row + at, p, mask=at < vocabulary)
        tl.store(grad_row + at, p * (dp - along), mask=at < vocabulary)
