"""Computes the gate logit of each row, for rows at different iterations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Most rows for the kernel; for more, torch computes all gates in one product.
FEW = 8


class StackedGates(NamedTuple):
    """Stacked copies of the weights of all gates; later changes of the gates do not affect them.

    The first layers, ``inner [gates, inner features, d]``, are ``None`` if gates are linear. The second layers,
    ``out [gates, inner features]`` (``[gates, d]`` if linear), are at least float32.
    """

    inner: Tensor | None
    inner_bias: Tensor | None
    out: Tensor
    out_bias: Tensor


def counter_on(device: torch.device) -> Tensor:
    """Returns zeros in which the kernel counts each row's finished programs; concurrent calls must not share them."""
    return torch.zeros(FEW, dtype=torch.int32, device=device)


def stacked_gates(stacked: StackedGates, hidden: Tensor, iteration: Tensor, *, counter: Tensor | None = None) -> Tensor:
    """Returns the gate logit ``[n]`` of each row of ``hidden [n, d]``, by the gate of its iteration.

    Iterations without a gate use the last gate. Only the kernel uses ``counter``.
    """
    inner, inner_bias, out, out_bias = stacked
    if inner is None or inner_bias is None:
        logits = functional.linear(hidden.to(out.dtype), out, out_bias)
    else:
        between = functional.gelu(functional.linear(hidden, inner.flatten(0, 1), inner_bias.flatten()))
        between = between.unflatten(-1, inner.shape[:2]).to(out.dtype)
        logits = (between * out).sum(-1) + out_bias
    return logits.gather(-1, iteration.clamp(max=out.shape[0] - 1)[:, None]).squeeze(-1)
