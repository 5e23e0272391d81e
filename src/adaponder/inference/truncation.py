"""Top-k, top-p and min-p as one threshold per row: tokens as likely as the least likely one that stays all stay."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adaponder.inference.noise import has_kernels

# Rows whose sorted logits exist at a time.
_ROWS = 64


def least_kept(logits: Tensor, lanes: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    """The smallest logit that truncation keeps in each row, ``[n, 1]``; the likeliest token always stays.

    A token stays if its logit is at least the k-th largest; if of those the ones before it do not sum to a probability
    of top-p; and if its probability is at least min-p times the largest.

    Args:
        logits: ``[n, V]``.
        lanes: int64 ``[n]``.
        numbers: float64 ``[lanes, 3]``: temperature (0 counts as 1), top-p and the logarithm of min-p.
        top_k: int64 ``[lanes]``, from 1 to V.
    """
    if has_kernels(logits):
        from adaponder.inference import truncation_triton

        return truncation_triton.least_kept(logits, lanes, numbers, top_k)
    parts = zip(*(rows.split(_ROWS) for rows in (logits, numbers[lanes], top_k[lanes])), strict=True)
    return torch.cat([_least_kept(*part) for part in parts])


def _least_kept(logits: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    values = logits.sort(dim=-1, descending=True).values
    temperature, top_p, log_min_p = numbers.split(1, dim=1)
    scaled = (values.double() - values[:, :1].double()) / torch.where(temperature > 0, temperature, 1.0)
    keep = values >= values.gather(1, top_k[:, None] - 1)
    probability = torch.where(keep, scaled, -math.inf).softmax(-1)
    before = torch.cat([torch.zeros_like(top_p), probability.cumsum(-1)[:, :-1]], dim=1)
    keep &= (before < top_p) | (top_p >= 1.0)
    keep &= scaled >= log_min_p
    return values.gather(1, keep.sum(-1, keepdim=True).clamp_min(1) - 1)
