"""``softmax(h W^T + b) E`` without ever holding more than a chunk of the tokens-by-vocabulary matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of tokens x vocabulary held at once: 2^25 float32 values are 128 MiB.
CHUNK_ELEMENTS = 1 << 25


def plain_vocab_expectation(
    hidden: Tensor, weight: Tensor, table: Tensor, *, bias: Tensor | None = None, top_k: int | None = None
) -> Tensor:
    """Equals ``softmax(hidden @ weight.T + bias) @ table`` in the plainest words: the oracle of every implementation.

    With ``top_k`` the softmax runs over the k largest logits only.
    """
    logits = torch.nn.functional.linear(hidden, weight, bias)
    wide = logits if logits.dtype == torch.float64 else logits.float()
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
) -> Tensor:
    """Equals :func:`plain_vocab_expectation`, in value and in every gradient, ``chunk`` tokens at a time.

    Args:
        hidden: ``[..., d]``, the final-normed hidden states.
        weight: ``[vocabulary, d]``, the head.
        table: ``[vocabulary, e]``, the embeddings to mix.
        bias: ``[vocabulary]``, the head's bias.
        top_k: mix the k likeliest only.
        chunk: tokens per chunk; by default as many as ``CHUNK_ELEMENTS`` logits allow.
    """
    if not hidden.device == weight.device == table.device:
        raise ValueError(f"hidden, weight and table lie on {hidden.device}, {weight.device} and {table.device}")
    if torch.is_autocast_enabled(hidden.device.type):
        # Autocast is off inside a custom Function's backward, so the precision is chosen here, once, for both.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, table = hidden.to(dtype), weight.to(dtype), table.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS // weight.shape[0])
    elif chunk < 1:
        raise ValueError(f"chunk={chunk}: at least one token at a time")
    rows = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(hidden.device.type, enabled=False):
        mixed = _VocabExpectation.apply(rows, weight, table, bias, top_k, chunk)
    return mixed.reshape(*hidden.shape[:-1], table.shape[-1])


def _probability(rows: Tensor, weight: Tensor, bias: Tensor | None, top_k: int | None) -> Tensor:
    """``[rows, vocabulary]`` in at least float32; with ``top_k`` zero outside the k largest."""
    logits = torch.nn.functional.linear(rows, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if top_k is None:
        return logits.softmax(-1)
    best, index = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return torch.zeros_like(logits).scatter_(-1, index, best.softmax(-1))


class _VocabExpectation(torch.autograd.Function):
    """Saves nothing but its inputs and computes each chunk's probabilities again in backward.

    Saving the normaliser, or the mixture for ``<p, dp> = <mixture, d mixture>``, would spare a little work and cost
    precision: where one token is nearly certain, the two large terms of the softmax's gradient no longer cancel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        table: Tensor,
        bias: Tensor | None,
        top_k: int | None,
        chunk: int,
    ) -> Tensor:
        mixed = table.new_empty(rows.shape[0], table.shape[1])
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            mixed[part] = _probability(rows[part], weight, bias, top_k).to(table.dtype) @ table
        ctx.save_for_backward(rows, weight, table, bias)
        ctx.top_k, ctx.chunk = top_k, chunk
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, table, bias = ctx.saved_tensors
        need_rows, need_weight, need_table, need_bias = ctx.needs_input_grad[:4]
        # Sums over many chunks are kept wide: bf16 would lose the small ones.
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        grad_rows = torch.empty_like(rows) if need_rows else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_table = torch.zeros_like(table, dtype=wide) if need_table else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and need_bias else None
        for start in range(0, rows.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            probability = _probability(rows[part], weight, bias, ctx.top_k)
            if grad_table is not None:
                grad_table += probability.to(table.dtype).t() @ grad[part]
            # Softmax backward: dz = p * (dp - <p, dp>). Outside the top k, p is zero and so is dz.
            grad_logits = (grad[part] @ table.t()).to(wide)
            grad_logits -= (probability * grad_logits).sum(-1, keepdim=True)
            grad_logits = grad_logits.mul_(probability).to(rows.dtype)
            if grad_rows is not None:
                grad_rows[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ rows[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)

        def narrow(value: Tensor | None, like: Tensor | None) -> Tensor | None:
            return None if value is None or like is None else value.to(like.dtype)

        return grad_rows, narrow(grad_weight, weight), narrow(grad_table, table), narrow(grad_bias, bias), None, None
