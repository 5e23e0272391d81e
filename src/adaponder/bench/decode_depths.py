"""Forced depths of a given mean, in exact shares and random order."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from adaponder.errors import InputError

# Shares of the tokens of depth 1, 2, 3, 4.
SHARES = {
    4.0: (0.0, 0.0, 0.0, 1.0),
    3.7: (0.0, 0.1, 0.1, 0.8),
    3.0: (0.1, 0.2, 0.3, 0.4),
    2.0: (0.4, 0.3, 0.2, 0.1),
    1.0: (1.0, 0.0, 0.0, 0.0),
}


def shares_of(mean: float, iterations: int) -> tuple[float, ...]:
    """Shares of depths 1 … ``iterations`` with this mean: :data:`SHARES`, or else falling or growing geometrically."""
    if not 1 <= mean <= iterations:
        raise InputError(f"--depths {mean:g}: a mean depth from 1 to {iterations} is needed")
    if iterations == 4 and mean in SHARES:
        return SHARES[mean]
    if mean in (1, iterations):
        return tuple(float(depth == mean) for depth in range(1, iterations + 1))
    low, high = -40.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_depth(_geometric(middle, iterations)) < mean else (low, middle)
    return _geometric(low, iterations)


def _geometric(slope: float, iterations: int) -> tuple[float, ...]:
    """Shares in proportion to ``exp(slope * depth)``."""
    # Relative to the greatest: no exponential overflows.
    weights = [math.exp(slope * (depth - (iterations if slope > 0 else 1))) for depth in range(1, iterations + 1)]
    return tuple(weight / sum(weights) for weight in weights)


def mean_depth(shares: Sequence[float]) -> float:
    """The mean of depths 1, 2, … in these shares."""
    return sum(depth * share for depth, share in enumerate(shares, start=1))


def drawn(shares: Sequence[float], count: int, *, seed: int) -> list[int]:
    """``count`` depths in these shares, rounded so that they add up, in an order that follows the seed."""
    bounds = [round(sum(shares[:depth]) / sum(shares) * count) for depth in range(len(shares) + 1)]
    depths = [depth + 1 for depth in range(len(shares)) for _ in range(bounds[depth + 1] - bounds[depth])]
    random.Random(seed).shuffle(depths)
    return depths
