"""``softmax(h W^T + b) E`` without ever holding more than a chunk of the tokens-by-vocabulary matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

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
    if torch.is_autocast_enabled(hidden.device.type):
        # Autocast is off inside a custom Function's backward, so the precision is chosen here, once, for both.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, table = hidden.to(dtype), weight.to(dtype), table.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    chunk = chunk or max(1, CHUNK_ELEMENTS // weight.shape[0])
    rows = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(hidden.device.type, enabled=False):
        if top_k is None:
            mixed = _VocabExpectation.apply(rows, weight, table, bias, chunk)
        else:
            mixed = _top_k(rows, weight, table, bias, top_k, chunk)
    return mixed.reshape(*hidden.shape[:-1], table.shape[-1])


def _top_k(rows: Tensor, weight: Tensor, table: Tensor, bias: Tensor | None, top_k: int, chunk: int) -> Tensor:
    def one(part: Tensor) -> Tensor:
        return plain_vocab_expectation(part, weight, table, bias=bias, top_k=top_k)

    parts = [checkpoint(one, part, use_reentrant=False) for part in rows.split(chunk)] or [one(rows)]
    return torch.cat(parts)


class _VocabExpectation(torch.autograd.Function):
    """Saves inputs, the mixture and one log-sum-exp per token; recomputes each chunk of logits in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, table: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
        mixed = table.new_empty(rows.shape[0], table.shape[1])
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        normaliser = rows.new_empty(rows.shape[0], 1, dtype=wide)
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = torch.nn.functional.linear(rows[part], weight, bias).to(wide)
            normaliser[part] = logits.logsumexp(-1, keepdim=True)
            mixed[part] = (logits - normaliser[part]).exp_().to(table.dtype) @ table
        ctx.save_for_backward(rows, weight, table, bias, mixed, normaliser)
        ctx.chunk = chunk
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, table, bias, mixed, normaliser = ctx.saved_tensors
        need_rows, need_weight, need_table, need_bias = ctx.needs_input_grad[:4]
        wide = normaliser.dtype
        grad_rows = torch.empty_like(rows) if need_rows else None
        # Sums over many chunks are kept wide: bf16 would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_table = torch.zeros_like(table, dtype=wide) if need_table else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and need_bias else None
        through_logits = need_rows or need_weight or grad_bias is not None
        for start in range(0, rows.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = torch.nn.functional.linear(rows[part], weight, bias).to(wide)
            probability = (logits - normaliser[part]).exp_()
            if grad_table is not None:
                grad_table += probability.to(table.dtype).t() @ grad[part]
            if not through_logits:
                continue
            # softmax backward: d z = p * (d p - <p, d p>), and <p, d p> = <mixture, d mixture>.
            inner = (grad[part] * mixed[part]).sum(-1, keepdim=True, dtype=wide)
            grad_logits = (probability * ((grad[part] @ table.t()).to(wide) - inner)).to(rows.dtype)
            if grad_rows is not None:
                grad_rows[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ rows[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)

        def narrow(value: Tensor | None, like: Tensor | None) -> Tensor | None:
            return None if value is None or like is None else value.to(like.dtype)

        return grad_rows, narrow(grad_weight, weight), narrow(grad_table, table), narrow(grad_bias, bias), None
