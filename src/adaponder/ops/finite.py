"""Finds weights with NaN or infinity, when a model is wrapped, loaded or saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# torch has no isfinite for narrower dtypes (float8).
_CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class NotFinite(NamedTuple):
    """The name and dtype of a tensor that is not finite; ``holds`` is ``"NaN"`` or ``"an infinity"``."""

    name: str
    holds: str
    dtype: torch.dtype


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> NotFinite | None:
    """Returns the first tensor with a NaN or an infinity, or ``None``; skips integers, float8 and meta tensors."""
    for name, value in tensors:
        if value.is_meta or value.dtype not in _CHECKED or bool(value.isfinite().all()):
            continue
        return NotFinite(name, "NaN" if bool(value.isnan().any()) else "an infinity", value.dtype)
    return None
