"""What config and recipe share of a model's settings; importing it costs nothing."""

from __future__ import annotations

import math
from typing import Literal, get_args

Method = Literal["adaponder", "ponder", "loop", "pause", "mor", "ouro", "vanilla"]
METHODS: tuple[str, ...] = get_args(Method)

# Embedding scales that depend on the hidden size d, as a recipe writes them: the factor on d under the root.
SCALES = {"sqrt(d)": 1.0, "sqrt(2.5 d)": 2.5}


def scale_from_scratch(method: str) -> str:
    """The embedding scale of a model trained from scratch unless told otherwise: one of ``SCALES``.

    The same for every method, vanilla included, so that a comparison compares methods; loop's is its release's.
    """
    return "sqrt(2.5 d)" if method == "loop" else "sqrt(d)"


def scale_of(rule: str, hidden_size: int) -> float:
    """The number that a rule of ``SCALES`` means at that hidden size."""
    return math.sqrt(SCALES[rule] * hidden_size)
