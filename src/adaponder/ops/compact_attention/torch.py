"""Computes attention in which only some tokens of each sequence are queries, but all its tokens are keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adaponder.ops.masks import Places, masked_attention, visible
from adaponder.ops.precision import wide_dtype


@dataclass(frozen=True)
class PackedRows:
    """Describes the ``n`` queries of a pass, packed and ordered by sequence and slot, and the keys of all tokens.

    ``sequence [n]`` is the index of each query's sequence. The tensors of ``query`` are ``[1, n]``, those of ``key``
    ``[sequences, slots]``. If there are documents, kernels need ``key.spans``.
    """

    sequence: Tensor
    query: Places
    key: Places

    @cached_property
    def parts(self) -> list[tuple[int, slice]]:
        """Lists (index of the sequence, slice of its queries) for every sequence that has queries."""
        sequences = torch.arange(self.key.slot.shape[0] + 1, device=self.sequence.device)
        edges = torch.searchsorted(self.sequence, sequences).tolist()
        return [(index, slice(*edge)) for index, edge in enumerate(pairwise(edges)) if edge[0] < edge[1]]

    @cached_property
    def _masks(self) -> dict[int | None, list[Tensor]]:
        return {}

    def masks(self, window: int | None) -> list[Tensor]:
        """Returns a mask ``[1, 1, queries, slots]`` for each of :attr:`parts`; cached, because every layer needs it."""
        if window not in self._masks:
            self._masks[window] = [
                visible(self.query.of(slice(1), rows), self.key.of(slice(index, index + 1)), window=window)
                for index, rows in self.parts
            ]
        return self._masks[window]


def compact_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PackedRows,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Computes causal attention of packed queries over the keys of all tokens.

    Shapes: query ``[n, heads, size]``; keys ``[sequences, key heads, slots, size]``, where heads are a multiple of key
    heads; values ``[sequences, key heads, slots, value size]``; result ``[n, heads, value size]``. ``window`` is the
    maximum number of tokens to which a query attends, itself included. ``scale=None`` is ``size ** -0.5``.
    """
    grouped = query.shape[1] != keys.shape[1]
    packed_query = query.transpose(0, 1)[None]
    with masked_attention():
        mixed = [
            scaled_dot_product_attention(
                packed_query[:, :, queries],
                keys[sequence : sequence + 1],
                values[sequence : sequence + 1],
                attn_mask=mask,
                scale=scale,
                dropout_p=dropout,
                enable_gqa=grouped,
            )
            for (sequence, queries), mask in zip(rows.parts, rows.masks(window), strict=True)
        ]
    return torch.cat(mixed, 2)[0].transpose(0, 1) if mixed else query.new_zeros(0, query.shape[1], values.shape[-1])


def gradients(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, keys and values, for the custom op's backward.

    Scores, attention weights and their gradients are computed in at least float32.
    """
    groups = query.shape[1] // keys.shape[1]
    wide = wide_dtype(query.dtype)
    grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
    grad_keys, grad_values = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (keys, values))
    for (sequence, queries), mask in zip(rows.parts, rows.masks(None), strict=True):
        # Query heads are grouped by their key head: [key heads, groups, rows, size].
        q, g = (x[queries].to(wide).transpose(0, 1).unflatten(0, (-1, groups)) for x in (query, grad))
        k, v = (x[sequence].to(wide)[:, None] for x in (keys, values))
        weight = (q @ k.mT * scale).masked_fill(~mask[0], -torch.inf).softmax(-1)
        grad_scores = torch.ops.aten._softmax_backward_data(g @ v.mT, weight, -1, wide) * scale
        grad_query[queries] = (grad_scores @ k).flatten(0, 1).transpose(0, 1).to(query.dtype)
        grad_keys[sequence] = (grad_scores.mT @ q).sum(1).to(keys.dtype)
        grad_values[sequence] = (weight.mT @ g).sum(1).to(values.dtype)
    return grad_query, grad_keys, grad_values
