"""``softmax(h W^T + b) E`` without ever holding more than a chunk of the tokens-by-vocabulary matrix."""

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


def plain_vocab_expectation(
    hidden: Tensor, weight: Tensor, table: Tensor, *, bias: Tensor | None = None, top_k: int | None = None
) -> Tensor:
    """Equals ``softmax(hidden @ weight.T + bias) @ table`` in the plainest words: the oracle of every implementation.

    With ``top_k`` the softmax runs over the k largest logits only.
    """
    wide = widened(torch.nn.functional.linear(hidden, weight, bias))
    if top_k is None:
        return torch.softmax(wide, dim=-1).to(table.dtype) @ table
    best, index = wide.topk(min(top_k, wide.shape[-1]), dim=-1)
    probability = torch.softmax(best, dim=-1).to(table.dtype)
    return (probability.unsqueeze(-2) @ table[index]).squeeze(-2)


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
    """Equals :func:`plain_vocab_expectation`, in value and in every gradient, ``chunk`` tokens at a time.

    Args:
        hidden: ``[..., d]``, the final-normed hidden states.
        weight: ``[vocabulary, d]``, the head.
        table: ``[vocabulary, e]``, the embeddings to mix.
        bias: ``[vocabulary]``, the head's bias.
        top_k: mix the k likeliest only.
        chunk: tokens per chunk; by default as many as ``CHUNK_ELEMENTS`` logits allow.
        keep_logits: hold all logits until backward instead of computing them again; the same results, bit for bit.
    """
    plain = Pointwise(
        lambda z, keep: _probability(z, top_k).to(z.dtype), lambda z, dp, keep: _slopes(z, dp, top_k), CHUNK_ELEMENTS
    )
    return chunked_expectation(hidden, weight, table, bias, chunk, keep_logits, plain)


class Pointwise(NamedTuple):
    """What happens to a chunk of logits ``[n, vocabulary]`` between the products, all in the logits' precision.

    Attributes:
        softmax: (logits, keep) -> probabilities; may overwrite the logits unless told to keep them.
        slopes: (logits, d probabilities, keep) -> (probabilities, d logits); may overwrite d probabilities, and the
            logits unless told to keep them.
        elements: how many logits to hold at once.
    """

    softmax: Callable[[Tensor, bool], Tensor]
    slopes: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    elements: int


def chunked_expectation(
    hidden: Tensor,
    weight: Tensor,
    table: Tensor,
    bias: Tensor | None,
    chunk: int | None,
    keep_logits: bool,
    pointwise: Pointwise,
) -> Tensor:
    """:func:`vocab_expectation`, with ``pointwise`` between the products of each chunk."""
    if not hidden.device == weight.device == table.device:
        raise ValueError(f"hidden, weight and table lie on {hidden.device}, {weight.device} and {table.device}")
    rows = hidden.reshape(-1, hidden.shape[-1]).to(compute_dtype(hidden))
    if chunk is None:
        chunk = rows_per_chunk(rows.shape[0], weight.shape[0], pointwise.elements)
    elif chunk < 1:
        raise ValueError(f"chunk={chunk}: at least one token at a time")
    # Without a backward to come nobody would read them: an evaluation keeps none.
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, table, bias))
    with torch.autocast(hidden.device.type, enabled=False):
        mixed = _VocabExpectation.apply(rows, weight, table, bias, chunk, keep_logits and learns, pointwise)
    return mixed.reshape(*hidden.shape[:-1], table.shape[-1])


def _probability(logits: Tensor, top_k: int | None) -> Tensor:
    """``[rows, vocabulary]`` in at least float32; with ``top_k`` zero outside the k largest."""
    logits = widened(logits)
    if top_k is None:
        return logits.softmax(-1)
    best, index = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return torch.zeros_like(logits).scatter_(-1, index, best.softmax(-1))


def _slopes(logits: Tensor, grad_probability: Tensor, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Softmax backward: dz = p * (dp - <p, dp>). Outside the top k, p is zero and so is dz."""
    probability = _probability(logits, top_k)
    slope = grad_probability.to(probability.dtype)
    slope = slope - (probability * slope).sum(-1, keepdim=True)
    return probability.to(logits.dtype), slope.mul_(probability).to(logits.dtype)


class _VocabExpectation(torch.autograd.Function):
    """Saves nothing but its inputs, and the logits where it should, and computes probabilities again in backward.

    Saving the normaliser, or the mixture for ``<p, dp> = <mixture, d mixture>``, would spare a little work and cost
    precision: where one token is nearly certain, the two large terms of the softmax's gradient no longer cancel.

    ``rows`` come in the precision to compute in; weight, table and bias in their own, and so do their gradients:
    the sums over chunks, kept wide, are never rounded to the narrow one.
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
        held = weight, table, bias
        weight, table, bias = _narrow(rows.dtype, *held)
        mixed = table.new_empty(rows.shape[0], table.shape[1])
        kept = []
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = torch.nn.functional.linear(rows[part], weight, bias)
            mixed[part] = pointwise.softmax(logits, keep_logits) @ table
            if keep_logits:
                kept.append(logits)
        ctx.save_for_backward(rows, *held, *kept)
        ctx.chunk, ctx.keep_logits, ctx.pointwise = chunk, keep_logits, pointwise
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, table, bias, *kept = ctx.saved_tensors
        need_rows, need_weight, need_table, need_bias = ctx.needs_input_grad[:4]
        # Sums over many chunks are kept wide: bf16 would lose the small ones.
        wide = wide_dtype(rows.dtype)
        grad_rows = torch.empty_like(rows) if need_rows else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_table = torch.zeros_like(table, dtype=wide) if need_table else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and need_bias else None
        held = weight, table, bias
        weight, table, bias = _narrow(rows.dtype, *held)
        grad = grad.contiguous()
        for index, start in enumerate(range(0, rows.shape[0], ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            logits = kept[index] if ctx.keep_logits else torch.nn.functional.linear(rows[part], weight, bias)
            probability, slope = ctx.pointwise.slopes(logits, grad[part] @ table.t(), ctx.keep_logits)
            if grad_table is not None:
                add_product_(grad_table, probability.t(), grad[part])
            if grad_rows is not None:
                grad_rows[part] = slope @ weight
            if grad_weight is not None:
                add_product_(grad_weight, slope.t(), rows[part])
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=wide)
        totals = zip((grad_weight, grad_table, grad_bias), held, strict=True)
        return (
            grad_rows,
            *(None if total is None or like is None else total.to(like.dtype) for total, like in totals),
            None,
            None,
            None,
        )


def _narrow(dtype: torch.dtype, weight: Tensor, table: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    narrow_bias: Any = None if bias is None else bias.to(dtype)
    return weight.to(dtype), table.to(dtype), narrow_bias
