"""The precision of decisions, sums and losses: at least float32, whatever the model computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything narrower becomes float32."""
    return torch.promote_types(dtype, torch.float32)


def widened(values: Tensor) -> Tensor:
    """The values in :func:`wide_dtype` of their own."""
    return values.to(wide_dtype(values.dtype))
