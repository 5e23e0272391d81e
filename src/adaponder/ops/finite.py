"""Finds weights that are not finite: before a model is used, after it is loaded, before it is saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# torch cannot ask narrower kinds (float8) whether they are finite.
_JUDGED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class NotFinite(NamedTuple):
    """Names a tensor that holds ``NaN`` or ``an infinity``."""

    name: str
    holds: str
    dtype: torch.dtype


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> NotFinite | None:
    """Returns the first tensor with a NaN or an infinity, or ``None``; integers and meta tensors have neither."""
    for name, value in tensors:
        if value.is_meta or value.dtype not in _JUDGED or bool(value.isfinite().all()):
            continue
        return NotFinite(name, "NaN" if bool(value.isnan().any()) else "an infinity", value.dtype)
    return None
