"""Widens numbers to at least float32 for decisions, sums and losses."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 for float64, float32 for all narrower dtypes."""
    return torch.promote_types(dtype, torch.float32)


def widened(values: Tensor) -> Tensor:
    """Converts values to at least float32 (:func:`wide_dtype`)."""
    return values.to(wide_dtype(values.dtype))
