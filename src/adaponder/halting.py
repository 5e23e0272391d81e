"""Defines gates, the halting threshold, the gated update of embeddings, and the terms of the ponder loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from adaponder.errors import ConfigError
from adaponder.ops.gelu import gelu
from adaponder.ops.precision import wide_dtype, widened


class Column(nn.Linear):
    """A linear layer with one output, in at least float32: bf16 logits near the threshold tau = 1e-4 are 1/16 apart."""

    def __init__(self, width: int):
        super().__init__(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = wide_dtype(hidden.dtype)
        hidden, weight, bias = hidden.to(wide), self.weight.to(wide), self.bias.to(wide)
        if is_compiling():
            # The compiler fuses this sum with the operations before it; a matrix product needs their result stored.
            return (hidden * weight).sum(-1, keepdim=True) + bias
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden, weight, bias)


class Logit(nn.Linear):
    """A linear layer from ``[…, d]`` to one logit, ``[…]``."""

    def __init__(self, width: int, *, bias: bool = True):
        super().__init__(width, 1, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).squeeze(-1)


class Gate(nn.Module):
    """Maps final-normed hidden states ``[…, d]`` after one iteration to logits of continuing, ``[…]``.

    Equals ``W2 gelu(W1 h + b1) + b2`` (eq. 2), or one linear layer if ``width=0``. ``W2`` starts at 0 and ``b2`` at
    ``bias``, so that every token starts with ``s = sigmoid(bias)``.
    """

    def __init__(self, hidden_size: int, *, width: int, bias: float):
        super().__init__()
        self.inner = nn.Linear(hidden_size, width * hidden_size) if width else None
        self.out = Column(width * hidden_size if width else hidden_size)
        self.bias_init = bias

    def reset_parameters(self, std: float = 0.02) -> None:
        if self.inner is not None:
            nn.init.normal_(self.inner.weight, std=std)
            nn.init.zeros_(self.inner.bias)
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.out.bias, self.bias_init)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.inner is not None:
            hidden = gelu(self.inner(hidden))
        return self.out(hidden).squeeze(-1)


def read_gate(gate: nn.Module, hidden: Tensor) -> Tensor:
    """Equals ``gate(hidden)``; compiling this function instead of each gate gives all gates one compiled graph."""
    return gate(hidden)


def gate_probability(logit: Tensor) -> Tensor:
    """Equals ``sigmoid(logit)`` (eq. 3), in at least float32, because bf16 rounding would move tokens across tau."""
    return torch.sigmoid(widened(logit))


def stays_active(probability: Tensor, tau: float | Tensor) -> Tensor:
    """Equals ``s >= tau`` (eq. 4), compared in float32, so that tau means the same in every model precision."""
    return probability.float() >= tau


def pondered(embedding: Tensor, expected: Tensor, active: Tensor, probability: Tensor) -> Tensor:
    """Equals ``E + (m s) e`` (eq. 9): active tokens add the expected embedding, weighted by their gate."""
    weight = (active * probability).to(embedding.dtype)
    return embedding + weight[..., None] * expected


def freeze_halted(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Equals ``new`` for active tokens and ``old`` for halted ones."""
    return torch.where(active[..., None], new, old)


def ponder_fraction(step: int, *, start: int, full: int, k_max: float) -> float:
    """Equals the paper's ``k_s``: 0 up to ``start``, linear to ``k_max`` at ``full``, constant after (eq. 14)."""
    if full < start:
        raise ConfigError(f"ponder_full={full} must not be before ponder_start={start}")
    if step >= full:
        return k_max
    if step <= start:
        return 0.0
    return k_max * (step - start) / (full - start)


def pool_count(fraction: float, size: int) -> int:
    """Equals ``floor(fraction * size)``, at most ``size``; tolerates rounding (0.29 * 100 is 28.999…)."""
    return min(size, math.floor(fraction * size + 1e-9))


def bottom_k_mean(values: Tensor, fraction: float) -> Tensor:
    """Equals the mean of the smallest ``floor(fraction * size)`` elements (eq. 13); 0 if that number is 0."""
    count = pool_count(fraction, values.numel())
    if count == 0:
        return values.new_zeros(())
    return torch.topk(values.flatten(), count, largest=False, sorted=False).values.mean()


def ponder_pool(logits: Tensor, real: Tensor | None, depth: Tensor, *, on: str, pool: str) -> Tensor:
    """Returns the gate values of which the ponder loss takes the smallest, K-1 per real token.

    ``real=None`` means that all tokens are real. With ``on="probabilities"`` the values are probabilities, else the
    logits ``[batch, time, K-1]``. A token of depth D was active at gates ``i < D``. The values of its later gates,
    computed from the frozen hidden state, are kept or, with ``pool="closed"``, replaced by 0.
    """
    values = gate_probability(logits) if on == "probabilities" else logits
    if pool == "closed":
        gate = torch.arange(logits.shape[-1], device=logits.device)
        values = values * (gate < depth[..., None])
    return values if real is None else values[real]
