"""Memory in which programs that share a row's keys meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Most parts that the keys of a row are split into, and most programs that keys are ever split for.
MOST_SPLITS, MOST_PROGRAMS = 32, 256


class Scratch(NamedTuple):
    """A place for each row, head and part; calls that follow one another may share it.

    Attributes:
        partial: float32 ``[places, size]``, results of the parts.
        level: float32 ``[places]``, the base-2 logarithm of what each part was normalised by.
        counter: int32 ``[places]``, for each row and key head how many parts are done; 0 between calls.
    """

    partial: Tensor
    level: Tensor
    counter: Tensor


def scratch_for(rows: int, heads: int, size: int, device: torch.device | str) -> Scratch:
    """Enough for any pass: keys are split only where few rows leave room for it."""
    places = max(rows, MOST_PROGRAMS) * heads
    partial = torch.empty(places, size, dtype=torch.float32, device=device)
    level = torch.empty(places, dtype=torch.float32, device=device)
    return Scratch(partial, level, torch.zeros(places, dtype=torch.int32, device=device))
