"""The mathematics of halting: gates, the threshold, the gated update, and the loss that teaches gates to close."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from adaponder.errors import ConfigError
from adaponder.ops.gelu import gelu
from adaponder.ops.precision import wide_dtype, widened


class Column(nn.Linear):
    """A linear map to one number, never in less than float32: bf16 is a sixteenth apart where tau = 1e-4 decides."""

    def __init__(self, width: int):
        super().__init__(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = wide_dtype(hidden.dtype)
        hidden, weight, bias = hidden.to(wide), self.weight.to(wide), self.bias.to(wide)
        if is_compiling():
            # A compiler fuses a sum into what comes before it; a product would write and read all of that once more.
            return (hidden * weight).sum(-1, keepdim=True) + bias
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden, weight, bias)


class Gate(nn.Module):
    """One iteration's gate: the final-normed hidden state ``[…, d]`` to a logit ``[…]``; large means keep pondering.

    Equals ``W2 gelu(W1 h + b1) + b2`` (eq. 2); width 0 leaves the linear map alone. The last bias starts at
    ``bias`` and the last weights at zero, so every token starts with ``s = sigmoid(bias)``: open, and how far is known.
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
    """Equals ``gate(hidden)``: one function, and so one compiled graph, for all gates."""
    return gate(hidden)


def gate_probability(logit: Tensor) -> Tensor:
    """Equals ``sigmoid(logit)`` (eq. 3), never in less than float32, so that rounding moves no token across tau."""
    return torch.sigmoid(widened(logit))


def stays_active(probability: Tensor, tau: float | Tensor) -> Tensor:
    """Equals ``s >= tau`` compared in float32 (eq. 4), so that no precision of the model moves the threshold."""
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
        raise ConfigError(f"ponder_full={full} lies before ponder_start={start}")
    if step >= full:
        return k_max
    if step <= start:
        return 0.0
    return k_max * (step - start) / (full - start)


def pool_count(fraction: float, size: int) -> int:
    """Equals ``floor(fraction * size)``, immune to 0.29 * 100 = 28.999…"""
    return min(size, math.floor(fraction * size + 1e-9))


def bottom_k_mean(values: Tensor, fraction: float) -> Tensor:
    """Equals the mean of the smallest ``floor(fraction * size)`` elements (eq. 13); exactly 0 when that is none."""
    count = pool_count(fraction, values.numel())
    if count == 0:
        return values.new_zeros(())
    return torch.topk(values.flatten(), count, largest=False, sorted=False).values.mean()


def ponder_pool(logits: Tensor, real: Tensor | None, depth: Tensor, *, on: str, pool: str) -> Tensor:
    """Returns the collection that the ponder loss ranks: every real token (``None``: all are) times K-1 gates.

    ``logits`` is ``[batch, time, K-1]``. Gate i of a token of depth D was still open to decide while ``i < D``; later
    gates read its frozen hidden state (``pool="all"`` and ``"each"``) or count as constant 0 (``pool="closed"``).
    """
    values = gate_probability(logits) if on == "probabilities" else logits
    if pool == "closed":
        gate = torch.arange(logits.shape[-1], device=logits.device)
        values = values * (gate < depth[..., None])
    return values if real is None else values[real]
