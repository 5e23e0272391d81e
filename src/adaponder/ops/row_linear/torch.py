"""Computes linear layers on rows, including the norm before them and the activation or residual sum after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from adaponder.ops.precision import widened

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class Norm(NamedTuple):
    """A norm over the last dimension: LayerNorm if ``centred``, else RMSNorm, which has no bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


class Linear(NamedTuple):
    """The parameters of a linear layer: ``weight [out, in]``, ``bias [out]`` or ``None``."""

    weight: Tensor
    bias: Tensor | None = None


class Piece(NamedTuple):
    """Linear layers that share a norm before and an activation after (both optional): ``activation(linear(norm(x)))``.

    Their outputs are concatenated.
    """

    linears: tuple[Linear, ...]
    norm: Norm | None = None
    activation: str | None = None

    @property
    def outputs(self) -> int:
        return sum(linear.weight.shape[0] for linear in self.linears)


class Term(NamedTuple):
    """A term to add to a residual: ``linear(x)`` with ``x [n, in]``."""

    x: Tensor
    linear: Linear


def row_norm(x: Tensor, norm: Norm) -> Tensor:
    """Applies LayerNorm or RMSNorm to each row of ``x […, d]`` as stock decoders do, in at least float32."""
    if norm.centred:
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    wide = widened(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return norm.weight * wide.to(x.dtype)


def normed_linears(x: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Returns ``activation(linear(norm(x)))`` of each piece, ``[n, piece.outputs]``; results may share memory."""
    normed: dict[Norm | None, Tensor] = {None: x}
    results = []
    for linears, norm, activation in pieces:
        if norm is not None and norm not in normed:
            normed[norm] = row_norm(x, norm)
        products = [functional.linear(normed[norm], *linear) for linear in linears]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        results.append(product if activation is None else ACTIVATIONS[activation](product))
    return results


def gated_linear(x: Tensor, gate: Linear, up: Linear, norm: Norm, *, activation: str) -> Tensor:
    """Computes ``activation(gate(norm(x))) * up(norm(x))``."""
    normed = row_norm(x, norm)
    return ACTIVATIONS[activation](functional.linear(normed, *gate)) * functional.linear(normed, *up)


def residual_linears(residual: Tensor, terms: Sequence[Term]) -> Tensor:
    """Returns ``residual`` plus the terms; adds the terms from last to first, then the residual, as GPT-NeoX does."""
    total: Tensor | None = None
    for x, linear in reversed(terms):
        product = functional.linear(x, *linear)
        total = product if total is None else total + product
    return residual if total is None else total + residual
