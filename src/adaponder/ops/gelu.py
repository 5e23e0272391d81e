"""Computes GELU in compiled half-precision passes as fast as memory allows.

With ``erf``, GELU is compute-bound (``benchmarks/records/tuning-h200.json``, run 4). Here the tail of the normal
distribution is ``e^(-x^2/2)`` times a polynomial in ``1 / (1 + p |x|)`` (Abramowitz and Stegun 7.1.26, error below
3e-7), and the derivative uses the same exponential.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import gelu as stock_gelu
from transformers import PreTrainedModel
from transformers.activations import GELUActivation

# Half of Abramowitz and Stegun's coefficients, because the tail is half of the complementary error function.
_P = 0.3275911 / math.sqrt(2.0)
_TAIL = tuple(0.5 * c for c in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))


def gelu(x: Tensor) -> Tensor:
    """Computes GELU, ``x * Phi(x)``; in compiled bf16 and fp16 passes, ``Phi`` is approximated by a polynomial."""
    if is_compiling() and x.dtype in (torch.bfloat16, torch.float16):
        return _Gelu.apply(x)
    return stock_gelu(x)


def use(stock: PreTrainedModel) -> None:
    """Replaces the exact GELU of a decoder's activation modules by :func:`gelu`; other activations are unchanged."""
    for module in stock.modules():
        if isinstance(module, GELUActivation) and module.act is stock_gelu:
            module.act = gelu


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * _distribution(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, bell = _distribution(wide)
        return (grad.float() * (below + wide * bell * (1.0 / math.sqrt(2.0 * math.pi)))).to(x.dtype)


def _distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (Phi(x), e^(-x^2/2)); ``Phi`` is the cumulative normal distribution."""
    bell = torch.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + _P * x.abs())
    tail = t * _TAIL[4] + _TAIL[3]
    for coefficient in (_TAIL[2], _TAIL[1], _TAIL[0]):
        tail = tail * t + coefficient
    tail = tail * t * bell
    return torch.where(x > 0, 1.0 - tail, tail), bell
