"""``-log softmax(h W^T + b)[target]`` without ever holding more than a chunk of the tokens-by-vocabulary matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adaponder.ops.dispatch import add_product_, compute_dtype, rows_per_chunk
from adaponder.ops.precision import wide_dtype, widened

# Elements of tokens x vocabulary held at once: 2^25 float32 values are 128 MiB.
CHUNK_ELEMENTS = 1 << 25
IGNORE = -100


def plain_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """Equals ``cross_entropy(hidden @ weight.T + bias, targets, reduction="none")`` in the plainest words: the oracle.

    The logits are widened to float32 first; a target of -100 costs nothing.
    """
    logits = widened(torch.nn.functional.linear(hidden, weight, bias))
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Equals :func:`plain_linear_cross_entropy`, in value and in every gradient, ``chunk`` tokens at a time.

    Args:
        hidden: ``[..., d]``, the final-normed hidden states.
        weight: ``[vocabulary, d]``, the head.
        targets: ``[...]``, token ids; -100 is ignored.
        bias: ``[vocabulary]``, the head's bias.
        chunk: tokens per chunk; by default as many as ``CHUNK_ELEMENTS`` logits allow.
    """
    return chunked_cross_entropy(hidden, weight, targets, bias, chunk, _pointwise())


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Equals ``(token_weights * linear_cross_entropy(…)).sum()``, in value and in every gradient, logits computed once.

    Where inputs require gradients, forward computes these too: what each token weighs is known, and backward has only
    to multiply. So call it under ``no_grad`` where the value alone is needed.

    Args:
        hidden, weight, targets, bias, chunk: as in :func:`linear_cross_entropy`.
        token_weights: ``[...]``, a constant for each token, about 1: a factor on all, such as one over their number,
            belongs on the result, because slopes are held in the precision of the products.
    """
    return chunked_cross_entropy_sum(hidden, weight, targets, token_weights, bias, chunk, _pointwise())


class Pointwise(NamedTuple):
    """What happens to a chunk of logits ``[n, vocabulary]`` between the products.

    Attributes:
        losses: (logits, targets) -> ``[n]`` in at least float32.
        slopes: (logits, targets, d loss) -> d logits in the logits' precision; may overwrite the logits.
        both: (logits, targets, d loss) -> (losses, d logits), as the two above; may overwrite the logits.
        elements: how many logits to hold at once.
    """

    losses: Callable[[Tensor, Tensor], Tensor]
    slopes: Callable[[Tensor, Tensor, Tensor], Tensor]
    both: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    elements: int


def _pointwise() -> Pointwise:
    return Pointwise(_losses, _slopes, lambda z, t, g: (_losses(z, t), _slopes(z, t, g)), CHUNK_ELEMENTS)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk: int | None, pointwise: Pointwise
) -> Tensor:
    """:func:`linear_cross_entropy`, with ``pointwise`` between the products of each chunk."""
    rows, chunk = _as_rows(hidden, weight, targets, chunk, pointwise.elements)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = _LinearCrossEntropy.apply(rows, weight, bias, targets.flatten(), chunk, pointwise)
    return losses.view(targets.shape)


def chunked_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    bias: Tensor | None,
    chunk: int | None,
    pointwise: Pointwise,
) -> Tensor:
    """:func:`linear_cross_entropy_sum`, with ``pointwise`` between the products of each chunk."""
    if token_weights.shape != targets.shape:
        raise ValueError(
            f"token_weights has shape {tuple(token_weights.shape)}, targets {tuple(targets.shape)}: they must agree"
        )
    if token_weights.requires_grad:
        raise ValueError("token_weights requires grad and would get none: detach it, or weigh the losses of each token")
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in (hidden, weight, bias)):
        losses = chunked_cross_entropy(hidden, weight, targets, bias, chunk, pointwise)
        return (losses * token_weights.to(losses.dtype)).sum()
    rows, chunk = _as_rows(hidden, weight, targets, chunk, pointwise.elements)
    with torch.autocast(hidden.device.type, enabled=False):
        weights = token_weights.flatten().to(wide_dtype(rows.dtype))
        return _LinearCrossEntropySum.apply(rows, weight, bias, targets.flatten(), weights, chunk, pointwise)


def _as_rows(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None, elements: int) -> tuple[Tensor, int]:
    """The hidden states as rows in the precision to compute in, and how many of them make a chunk."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"targets has shape {tuple(targets.shape)}, hidden {tuple(hidden.shape)}: they must agree")
    rows = hidden.reshape(-1, hidden.shape[-1]).to(compute_dtype(hidden))
    if chunk is None:
        chunk = rows_per_chunk(rows.shape[0], weight.shape[0], elements)
    elif chunk < 1:
        raise ValueError(f"chunk={chunk}: at least one token at a time")
    return rows, chunk


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(widened(logits), targets, ignore_index=IGNORE, reduction="none")


def _slopes(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """d loss / d logits = softmax - one-hot, and nothing where the target is ignored."""
    slope = widened(logits).softmax(-1)
    hit = targets.clamp_min(0)[:, None]
    slope.scatter_add_(1, hit, torch.full_like(hit, -1, dtype=slope.dtype))
    return slope.mul_((grad * (targets != IGNORE))[:, None]).to(logits.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves nothing but its inputs and computes each chunk's probabilities again in backward.

    Saving a normaliser per token would spare a reduction and cost precision: measured in float32, gradients built from
    ``exp(z - normaliser)`` were twice as far from float64's as those of a softmax.

    ``rows`` come in the precision to compute in; weight and bias in their own, and so do their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        pointwise: Pointwise,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, targets)
        ctx.chunk, ctx.pointwise = chunk, pointwise
        weight, bias = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
        losses = torch.empty(rows.shape[0], dtype=wide_dtype(rows.dtype), device=rows.device)
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            losses[part] = pointwise.losses(torch.nn.functional.linear(rows[part], weight, bias), targets[part])
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, held_weight, held_bias, targets = ctx.saved_tensors
        need_rows, need_weight, need_bias = ctx.needs_input_grad[:3]
        weight, bias = held_weight.to(rows.dtype), None if held_bias is None else held_bias.to(rows.dtype)
        # Sums over many chunks are kept wide: bf16 would lose the small ones.
        wide = grad.dtype
        grad_rows = torch.empty_like(rows) if need_rows else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and need_bias else None
        for start in range(0, rows.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = torch.nn.functional.linear(rows[part], weight, bias)
            slope = ctx.pointwise.slopes(logits, targets[part], grad[part])
            if grad_rows is not None:
                grad_rows[part] = slope @ weight
            if grad_weight is not None:
                add_product_(grad_weight, slope.t(), rows[part])
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=wide)
        grad_weight = None if grad_weight is None else grad_weight.to(held_weight.dtype)
        grad_bias = None if grad_bias is None or held_bias is None else grad_bias.to(held_bias.dtype)
        return grad_rows, grad_weight, grad_bias, None, None, None


class _LinearCrossEntropySum(torch.autograd.Function):
    """Computes the gradients with the loss, while a chunk's logits are there, and saves nothing else.

    All sums are wide until the upstream gradient is known, so that a GPU rounds each sum once. A slope is rounded
    before that gradient is known, where autograd rounds their product: in half precision that loses a little more.
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
        inputs, wide = (rows, weight, bias), token_weights.dtype
        grad_rows, grad_weight, grad_bias = (
            x.new_zeros(x.shape, dtype=wide) if x is not None and needed else None
            for x, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        )
        weight, bias = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
        losses = token_weights.new_empty(rows.shape[0])
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = torch.nn.functional.linear(rows[part], weight, bias)
            losses[part], slope = pointwise.both(logits, targets[part], token_weights[part])
            if grad_rows is not None:
                add_product_(grad_rows[part], slope, weight)
            if grad_weight is not None:
                add_product_(grad_weight, slope.t(), rows[part])
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=wide)
        ctx.save_for_backward(grad_rows, grad_weight, grad_bias)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return (losses * token_weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: what is saved must still be right if backward comes again.
        totals = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (
            *(None if total is None else (total * grad).to(dtype) for total, dtype in totals),
            None,
            None,
            None,
            None,
        )
