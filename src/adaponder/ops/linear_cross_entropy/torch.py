"""Computes ``-log softmax(h W^T + b)[target]``, holding at most a chunk of the tokens-by-vocabulary matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adaponder.ops import chunks
from adaponder.ops.chunks import add_gradients, as_rows, narrowed, sums_of
from adaponder.ops.precision import wide_dtype, widened

IGNORE = -100


def plain_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """Computes ``cross_entropy(hidden @ weight.T + bias, targets, reduction="none")`` directly, as the reference.

    The logits are widened to at least float32 first; a target of -100 has loss 0.
    """
    logits = widened(torch.nn.functional.linear(hidden, weight, bias))
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


class Pointwise(NamedTuple):
    """The implementation (torch or Triton) of the operations on a chunk of logits ``[n, vocabulary]``.

    Attributes:
        losses: (logits, targets) -> loss of each token, ``[n]``, in at least float32.
        gradients: (logits, targets, gradient of the losses) -> gradient of the logits, in their precision; may
            overwrite the logits.
        both: (logits, targets, gradient of the losses) -> (losses, gradient of the logits); may overwrite the logits.
        elements: the maximum number of logits to hold at once; ``None``: ``chunks.CHUNK_ELEMENTS``.
    """

    losses: Callable[[Tensor, Tensor], Tensor]
    gradients: Callable[[Tensor, Tensor, Tensor], Tensor]
    both: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    elements: int | None = None


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(widened(logits), targets, ignore_index=IGNORE, reduction="none")


def _gradients(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient of the logits, ``grad * (softmax - one-hot target)``; zeros for ignored targets."""
    grad_logits = widened(logits).softmax(-1)
    hit = targets.clamp_min(0)[:, None]
    grad_logits.scatter_add_(1, hit, torch.full_like(hit, -1, dtype=grad_logits.dtype))
    return grad_logits.mul_((grad * (targets != IGNORE))[:, None]).to(logits.dtype)


_PLAIN = Pointwise(_losses, _gradients, lambda z, t, g: (_losses(z, t), _gradients(z, t, g)))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    pointwise: Pointwise = _PLAIN,
) -> Tensor:
    """Equals :func:`plain_linear_cross_entropy`, gradients included, ``chunk`` tokens at a time.

    Args:
        hidden: ``[..., d]``, the final-normed hidden states.
        weight, bias: the head, ``[vocabulary, d]`` and ``[vocabulary]``; ``bias=None``: no bias.
        targets: ``[...]``, token ids; -100 is ignored.
        chunk: tokens per chunk; ``None``: as many as ``pointwise.elements`` logits allow.
        pointwise: the implementation of the operations on logits; the Triton version passes its kernels.
    """
    _require_shape("targets", targets, hidden.shape[:-1])
    rows, chunk = as_rows(hidden, weight, chunk, pointwise.elements)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = _LinearCrossEntropy.apply(rows, weight, bias, targets.flatten(), chunk, pointwise)
    return losses.view(targets.shape)


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    pointwise: Pointwise = _PLAIN,
) -> Tensor:
    """Equals ``(token_weights * linear_cross_entropy(…)).sum()``, gradients included, but computes logits only once.

    If an input requires gradients, forward computes them too and backward only scales them. Call it under ``no_grad``
    if only the value is needed.

    Args:
        hidden, weight, targets, bias, chunk, pointwise: as in :func:`linear_cross_entropy`.
        token_weights: ``[...]``, constants of about 1: apply a common factor such as ``1 / N`` to the result instead,
            because gradients of logits are in the precision of the products.
    """
    _require_shape("targets", targets, hidden.shape[:-1])
    _require_shape("token_weights", token_weights, targets.shape)
    if token_weights.requires_grad:
        raise ValueError("token_weights requires grad and would get none: detach it, or weigh the losses of each token")
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in (hidden, weight, bias)):
        losses = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk=chunk, pointwise=pointwise)
        return (losses * token_weights.to(losses.dtype)).sum()
    rows, chunk = as_rows(hidden, weight, chunk, pointwise.elements)
    with torch.autocast(hidden.device.type, enabled=False):
        weights = token_weights.flatten().to(wide_dtype(rows.dtype))
        return _LinearCrossEntropySum.apply(rows, weight, bias, targets.flatten(), weights, chunk, pointwise)


def _require_shape(name: str, values: Tensor, shape: torch.Size) -> None:
    if values.shape != shape:
        raise ValueError(f"{name} has shape {tuple(values.shape)} but must have {tuple(shape)}, one entry per token")


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves only its inputs; backward recomputes each chunk's probabilities.

    Saving each token's log-normaliser would save a reduction but cost precision: in float32, gradients computed from
    ``exp(z - normaliser)`` had twice the error, measured against float64, of gradients computed from a softmax.

    ``rows`` are in the compute precision; weight, bias and their gradients are in the dtype of the parameter.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, pointwise: Pointwise
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, targets)
        ctx.chunk, ctx.pointwise = chunk, pointwise
        head = narrowed(rows.dtype, weight, bias)
        losses = torch.empty(rows.shape[0], dtype=wide_dtype(rows.dtype), device=rows.device)
        for start in range(0, rows.shape[0], chunk):
            span = slice(start, start + chunk)
            losses[span] = pointwise.losses(torch.nn.functional.linear(rows[span], *head), targets[span])
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *parameters, targets = ctx.saved_tensors
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        totals = sums_of(ctx.needs_input_grad[1:3], grad.dtype, *parameters)
        head = narrowed(rows.dtype, *parameters)
        for start in range(0, rows.shape[0], ctx.chunk):
            span = slice(start, start + ctx.chunk)
            logits = torch.nn.functional.linear(rows[span], *head)
            grad_logits = ctx.pointwise.gradients(logits, targets[span], grad[span])
            if grad_rows is not None:
                grad_rows[span] = grad_logits @ head[0]
            add_gradients(*totals, grad_logits, rows[span])
        grads = (x if x is None else x.to(like.dtype) for x, like in zip(totals, parameters, strict=True))
        return grad_rows, *grads, None, None, None


class _LinearCrossEntropySum(torch.autograd.Function):
    """Computes the gradients in forward, from each chunk's logits, and saves only them.

    Sums over chunks stay in float32; backward multiplies them by the upstream gradient and rounds each product once.
    In bf16 and fp16, the logits' gradients are rounded before that multiplication: slightly less precise than autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_weights: Tensor,
        chunk: int,
        pointwise: Pointwise,
    ) -> Tensor:
        totals = sums_of(ctx.needs_input_grad[:3], token_weights.dtype, rows, weight, bias)
        head = narrowed(rows.dtype, weight, bias)
        losses = token_weights.new_empty(rows.shape[0])
        for start in range(0, rows.shape[0], chunk):
            span = slice(start, start + chunk)
            logits = torch.nn.functional.linear(rows[span], *head)
            losses[span], grad_logits = pointwise.both(logits, targets[span], token_weights[span])
            if totals[0] is not None:
                chunks.add_product_(totals[0][span], grad_logits, head[0])
            add_gradients(*totals[1:], grad_logits, rows[span])
        ctx.save_for_backward(*totals)
        ctx.dtypes = [None if x is None else x.dtype for x in (rows, weight, bias)]
        return (losses * token_weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: backward may run again on the same saved tensors.
        totals = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if total is None else (total * grad).to(dtype) for total, dtype in totals), *[None] * 4
