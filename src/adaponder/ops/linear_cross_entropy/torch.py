"""``-log softmax(h W^T + b)[target]`` without ever holding more than a chunk of the tokens-by-vocabulary matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of tokens x vocabulary held at once: 2^25 float32 values are 128 MiB.
CHUNK_ELEMENTS = 1 << 25
IGNORE = -100


def plain_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """Equals ``cross_entropy(hidden @ weight.T + bias, targets, reduction="none")`` in the plainest words: the oracle.

    The logits are widened to float32 first; a target of -100 costs nothing.
    """
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
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
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"targets has shape {tuple(targets.shape)}, hidden {tuple(hidden.shape)}: they must agree")
    if torch.is_autocast_enabled(hidden.device.type):
        # Autocast is off inside a custom Function's backward, so the precision is chosen here, once, for both.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS // weight.shape[0])
    elif chunk < 1:
        raise ValueError(f"chunk={chunk}: at least one token at a time")
    rows = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(hidden.device.type, enabled=False):
        losses = _LinearCrossEntropy.apply(rows, weight, bias, targets.flatten(), chunk)
    return losses.view(targets.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves nothing but its inputs and computes each chunk's probabilities again in backward.

    Saving a normaliser per token would spare a reduction and cost precision: measured in float32, gradients built from
    ``exp(z - normaliser)`` were twice as far from float64's as those of a softmax.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int) -> Tensor:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        losses = torch.empty(rows.shape[0], dtype=wide, device=rows.device)
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = torch.nn.functional.linear(rows[part], weight, bias).to(wide)
            losses[part] = torch.nn.functional.cross_entropy(
                logits, targets[part], ignore_index=IGNORE, reduction="none"
            )
        ctx.save_for_backward(rows, weight, bias, targets)
        ctx.chunk = chunk
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets = ctx.saved_tensors
        need_rows, need_weight, need_bias = ctx.needs_input_grad[:3]
        # Sums over many chunks are kept wide: bf16 would lose the small ones.
        wide = grad.dtype
        grad_rows = torch.empty_like(rows) if need_rows else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and need_bias else None
        for start in range(0, rows.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            # d loss / d logits = softmax - one-hot, and nothing where the target is ignored.
            slope = torch.nn.functional.linear(rows[part], weight, bias).to(wide).softmax(-1)
            hit = targets[part].clamp_min(0)[:, None]
            slope.scatter_add_(1, hit, torch.full_like(hit, -1, dtype=wide))
            slope = slope.mul_((grad[part] * (targets[part] != IGNORE))[:, None]).to(rows.dtype)
            if grad_rows is not None:
                grad_rows[part] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.t() @ rows[part]
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=wide)
        narrow_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        narrow_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_rows, narrow_weight, narrow_bias, None, None
