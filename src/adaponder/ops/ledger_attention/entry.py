"""A row enters the ledger: its QKV product is turned by its position, and keys and values go into the pools."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.ops.ledger_attention.torch import LedgerRows, ledger_attention
from adaponder.ops.precision import widened


class Projection(NamedTuple):
    """How a row of the QKV product ``[n, (heads + 2 key heads) size]`` lies, and what happens to it before attention.

    Attributes:
        heads: of the queries; a multiple of ``key_heads``.
        key_heads: of keys and values.
        size: of a head.
        packed: ``[heads, 3, size]`` (GPT-NeoX) instead of all queries, then all keys, then all values.
        rotary: how many numbers of a head are turned, from the first; an even number, 0 for none.
        bias: of the product, in its layout; added here if the product came without.
        query_norm: weights ``[size]`` of an RMS norm over each query head before it is turned.
        key_norm: the same for keys.
        epsilon: of the norms.
    """

    heads: int
    key_heads: int
    size: int
    packed: bool = False
    rotary: int = 0
    bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    epsilon: float = 1e-6


class Turn(NamedTuple):
    """Where each row stands and the tables that turn it.

    Attributes:
        position: int64 ``[n]``.
        cos: float32 ``[positions, rotary]``, like ``sin``; both halves written out, as Hugging Face does.
        sin: see ``cos``.
    """

    position: Tensor
    cos: Tensor
    sin: Tensor


def enter(qkv: Tensor, keys: Tensor, values: Tensor, row: Tensor, projection: Projection, turn: Turn) -> Tensor:
    """Writes the rows' keys and values into the pools at ``row`` and returns their queries ``[n, heads, size]``.

    Computed in float32 at least, whatever the product's precision; stored in the pool's.
    """
    query, key, value = _apart(qkv, projection)
    query = _turned(_normed(widened(query), projection.query_norm, projection), projection, turn)
    key = _turned(_normed(widened(key), projection.key_norm, projection), projection, turn)
    keys[row], values[row] = key.to(keys.dtype), value.to(values.dtype)
    return query.to(keys.dtype)


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: LedgerRows,
    projection: Projection,
    turn: Turn,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Equals :func:`enter` and then ledger attention of the rows alone, ``[alone, heads, size]``."""
    alone = rows.alone
    first = rows._replace(**{name: getattr(rows, name)[:alone] for name in ("lane", "slot", "iteration", "row")})
    turn = turn._replace(position=turn.position[:alone])
    query = enter(qkv[:alone], keys, values, first.row, projection, turn)
    return ledger_attention(query, keys, values, first._replace(cohorts=()), window=window, scale=scale)


def _apart(qkv: Tensor, projection: Projection) -> tuple[Tensor, ...]:
    heads, key_heads, size = projection[:3]
    if projection.bias is not None:
        qkv = widened(qkv) + projection.bias
    if projection.packed:
        return qkv.unflatten(-1, (heads, 3, size)).unbind(-2)
    return qkv.unflatten(-1, (heads + 2 * key_heads, size)).split((heads, key_heads, key_heads), -2)


def _normed(x: Tensor, weight: Tensor | None, projection: Projection) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + projection.epsilon) * weight


def _turned(x: Tensor, projection: Projection, turn: Turn) -> Tensor:
    """The first ``rotary`` numbers of each head turned in halves."""
    if not projection.rotary:
        return x
    cos, sin = turn.cos[turn.position][:, None], turn.sin[turn.position][:, None]
    turning, rest = x.split((projection.rotary, projection.size - projection.rotary), -1)
    first, second = turning.chunk(2, -1)
    return torch.cat((turning * cos + torch.cat((-second, first), -1) * sin, rest), -1)
