"""Memory in which programs that share a row's keys meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Most parts that the keys of a row are split into.
MOST_SPLITS = 32


class Scratch(NamedTuple):
    """Calls that follow one another may share it.

    Attributes:
        partial: float32 ``[rows * heads, splits, size]``, results of the parts.
        level: float32 ``[rows * heads, splits]``, the base-2 logarithm of what each part was normalised by.
        counter: int32 ``[rows * key heads]``, how many parts are done; 0 between calls.
    """

    partial: Tensor
    level: Tensor
    counter: Tensor


def scratch_for(rows: int, heads: int, size: int, device: torch.device | str) -> Scratch:
    """Enough for any pass of at most ``rows`` rows alone."""
    partial = torch.empty(rows * heads, MOST_SPLITS, size, dtype=torch.float32, device=device)
    level = torch.empty(rows * heads, MOST_SPLITS, dtype=torch.float32, device=device)
    return Scratch(partial, level, torch.zeros(rows * heads, dtype=torch.int32, device=device))
