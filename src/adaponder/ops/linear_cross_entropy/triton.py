"""Computes losses, their gradients with respect to logits (in place), or both, by one kernel per chunk of logits."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaponder.ops.kernels import CHUNK_ELEMENTS, launch_rows, normaliser
from adaponder.ops.linear_cross_entropy import torch as plain
from adaponder.ops.linear_cross_entropy.torch import IGNORE, Pointwise


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns ``logsumexp(z) - z[target]`` of each row in float32; 0 for ignored targets, NaN for invalid ones."""
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    launch_rows(_losses_kernel, logits, targets, out, IGNORE)
    return out


def gradients_(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """Overwrites each row of logits with its gradient, ``(softmax(z) - onehot(target)) * grad``; returns the tensor."""
    # An expanded gradient (of a sum) has stride 0, but the kernel assumes stride 1.
    launch_rows(_gradients_kernel, logits, targets, grad.contiguous(), IGNORE)
    return logits


def losses_and_gradients_(logits: Tensor, targets: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Computes :func:`losses` and :func:`gradients_` by one kernel, which reads a row twice and writes it once."""
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    launch_rows(_losses_and_gradients_kernel, logits, targets, out, grad.contiguous(), IGNORE)
    return out, logits


_FUSED = Pointwise(losses, gradients_, losses_and_gradients_, CHUNK_ELEMENTS)
linear_cross_entropy = partial(plain.linear_cross_entropy, pointwise=_FUSED)
linear_cross_entropy_sum = partial(plain.linear_cross_entropy_sum, pointwise=_FUSED)


@triton.jit
def _losses_kernel(logits, targets, out, ignore, vocabulary, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    top, total = normaliser(row, tl.arange(0, BLOCK), vocabulary, BLOCK)
    target = tl.load(targets + index)
    tl.store(out + index, _loss(row, target, top, total, ignore, vocabulary))


@triton.jit
def _gradients_kernel(logits, targets, grads, ignore, vocabulary, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    column = tl.arange(0, BLOCK)
    top, total = normaliser(row, column, vocabulary, BLOCK)
    target = tl.load(targets + index)
    grad = tl.where(target != ignore, tl.load(grads + index), 0.0)
    _write_gradients(row, column, target, grad, top, total, vocabulary, BLOCK)


@triton.jit
def _losses_and_gradients_kernel(logits, targets, out, grads, ignore, vocabulary, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    column = tl.arange(0, BLOCK)
    top, total = normaliser(row, column, vocabulary, BLOCK)
    target = tl.load(targets + index)
    tl.store(out + index, _loss(row, target, top, total, ignore, vocabulary))
    grad = tl.where(target != ignore, tl.load(grads + index), 0.0)
    # Every warp reads the target's logit, so all must have read it before one overwrites it.
    tl.debug_barrier()
    _write_gradients(row, column, target, grad, top, total, vocabulary, BLOCK)


@triton.jit
def _loss(row, target, top, total, ignore, vocabulary):
    known = (target >= 0) & (target < vocabulary)
    # Targets are not checked on the host: one out of range makes the loss NaN, which stops a run.
    hit = tl.load(row + target, mask=known, other=float("nan")).to(tl.float32)
    return tl.where(target == ignore, 0.0, tl.log(total) + (top - hit))


@triton.jit
def _write_gradients(row, column, target, grad, top, total, vocabulary, BLOCK: tl.constexpr):
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        z = tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        grad_logits = tl.exp(z - top) / total - tl.where(at == target, 1.0, 0.0)
        tl.store(row + at, grad_logits * grad, mask=at < vocabulary)
