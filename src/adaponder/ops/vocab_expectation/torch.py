"""Computes ``softmax(h W^T + b) E``, holding at most a chunk of the tokens-by-vocabulary matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adaponder.ops.chunks import add_gradients, add_product_, as_rows, narrowed, sums_of
from adaponder.ops.precision import wide_dtype, widened


def plain_vocab_expectation(
    hidden: Tensor, weight: Tensor, table: Tensor, *, bias: Tensor | None = None, top_k: int | None = None
) -> Tensor:
    """Computes ``softmax(hidden @ weight.T + bias) @ table`` directly: the reference for all implementations.

    With ``top_k`` the softmax is over the k largest logits only.
    """
    return mixture(torch.nn.functional.linear(hidden, weight, bias), table, top_k)


def mixture(logits: Tensor, table: Tensor, top_k: int | None) -> Tensor:
    """Computes ``softmax(logits) @ table``; with ``top_k`` the softmax is over the k largest logits only."""
    wide = widened(logits)
    if top_k is None:
        return torch.softmax(wide, dim=-1).to(table.dtype) @ table
    best, index = wide.topk(min(top_k, wide.shape[-1]), dim=-1)
    probability = torch.softmax(best, dim=-1).to(table.dtype)
    return (probability.unsqueeze(-2) @ table[index]).squeeze(-2)


class Pointwise(NamedTuple):
    """The implementation of the operations on a chunk of logits ``[n, vocabulary]``; results have the logits' dtype.

    Attributes:
        softmax: (logits, keep) -> probabilities; may overwrite the logits unless ``keep`` is true.
        gradients: (logits, gradient of the probabilities, keep) -> (probabilities, gradient of the logits); may
            overwrite the given gradient, and the logits unless ``keep`` is true.
        elements: the maximum number of logits to hold at once; ``None``: ``chunks.CHUNK_ELEMENTS``.
    """

    softmax: Callable[[Tensor, bool], Tensor]
    gradients: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    elements: int | None = None


def vocab_expectation(
    hidden: Tensor,
    weight: Tensor,
    table: Tensor,
    *,
    bias: Tensor | None = None,
    top_k: int | None = None,
    chunk: int | None = None,
    keep_logits: bool = False,
    pointwise: Pointwise | None = None,
) -> Tensor:
    """Equals :func:`plain_vocab_expectation`, gradients included, ``chunk`` tokens at a time.

    Args:
        hidden: ``[..., d]``, the final-normed hidden states.
        weight, bias: the head, ``[vocabulary, d]`` and ``[vocabulary]``; ``bias=None``: no bias.
        table: ``[vocabulary, e]``, the embeddings to mix.
        top_k: mix only the k likeliest embeddings; ``None``: all.
        chunk: tokens per chunk; ``None``: as many as ``pointwise.elements`` logits allow.
        keep_logits: store all logits until backward instead of recomputing them; the same results, bit for bit.
        pointwise: the implementation of the operations on logits; ``None``: torch. The kernels have no ``top_k``.
    """
    if not hidden.device == weight.device == table.device:
        raise ValueError(f"hidden, weight and table lie on {hidden.device}, {weight.device} and {table.device}")
    if torch.compiler.is_exporting():  # a loop over chunks would fix the number of tokens
        return plain_vocab_expectation(hidden, weight, table, bias=bias, top_k=top_k)
    if pointwise is None:
        pointwise = Pointwise(
            lambda z, keep: _probability(z, top_k).to(z.dtype), lambda z, dp, keep: _gradients(z, dp, top_k)
        )
    rows, chunk = as_rows(hidden, weight, chunk, pointwise.elements)
    # Logits are stored only if a backward may follow.
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, table, bias))
    with torch.autocast(hidden.device.type, enabled=False):
        mixed = _VocabExpectation.apply(rows, weight, table, bias, chunk, keep_logits and learns, pointwise)
    return mixed.reshape(*hidden.shape[:-1], table.shape[-1])


def _probability(logits: Tensor, top_k: int | None) -> Tensor:
    """Returns probabilities ``[rows, vocabulary]`` in at least float32; with ``top_k``, zero outside the k largest."""
    logits = widened(logits)
    if top_k is None:
        return logits.softmax(-1)
    best, index = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return torch.zeros_like(logits).scatter_(-1, index, best.softmax(-1))


def _gradients(logits: Tensor, grad_probability: Tensor, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Returns probabilities p and the logits' gradient, ``p * (dp - <p, dp>)``; both are zero outside the top k."""
    probability = _probability(logits, top_k)
    grad_logits = grad_probability.to(probability.dtype)
    grad_logits = grad_logits - (probability * grad_logits).sum(-1, keepdim=True)
    return probability.to(logits.dtype), grad_logits.mul_(probability).to(logits.dtype)


class _VocabExpectation(torch.autograd.Function):
    """Saves only its inputs, and the logits if ``keep_logits``; backward recomputes the probabilities.

    ``rows`` are in the compute precision; weight, table, bias and their gradients are in the dtype of the parameter.
    Gradients are summed over chunks in at least float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        table: Tensor,
        bias: Tensor | None,
        chunk: int,
        keep_logits: bool,
        pointwise: Pointwise,
    ) -> Tensor:
        narrow_weight, narrow_table, narrow_bias = narrowed(rows.dtype, weight, table, bias)
        mixed = narrow_table.new_empty(rows.shape[0], table.shape[1])
        kept_logits = []
        for start in range(0, rows.shape[0], chunk):
            span = slice(start, start + chunk)
            logits = torch.nn.functional.linear(rows[span], narrow_weight, narrow_bias)
            mixed[span] = pointwise.softmax(logits, keep_logits) @ narrow_table
            if keep_logits:
                kept_logits.append(logits)
        ctx.save_for_backward(rows, weight, table, bias, *kept_logits)
        ctx.chunk, ctx.keep_logits, ctx.pointwise = chunk, keep_logits, pointwise
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *parameters = ctx.saved_tensors[:4]
        kept_logits = ctx.saved_tensors[4:]
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        totals = sums_of(ctx.needs_input_grad[1:4], wide_dtype(rows.dtype), *parameters)
        grad_weight, grad_table, grad_bias = totals
        weight, table, bias = narrowed(rows.dtype, *parameters)
        grad = grad.contiguous()
        for index, start in enumerate(range(0, rows.shape[0], ctx.chunk)):
            span = slice(start, start + ctx.chunk)
            logits = kept_logits[index] if ctx.keep_logits else torch.nn.functional.linear(rows[span], weight, bias)
            probability, grad_logits = ctx.pointwise.gradients(logits, grad[span] @ table.t(), ctx.keep_logits)
            if grad_table is not None:
                add_product_(grad_table, probability.t(), grad[span])
            if grad_rows is not None:
                grad_rows[span] = grad_logits @ weight
            add_gradients(grad_weight, grad_bias, grad_logits, rows[span])
        grads = (x if x is None else x.to(like.dtype) for x, like in zip(totals, parameters, strict=True))
        return grad_rows, *grads, None, None, None
