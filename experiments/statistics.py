"""Paired differences over seeds, their 95 % t intervals, and the verdicts that follow from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Nats within which two losses count as equal; committed after seed 0 (2026-11-17), before the other seeds.
MARGIN = 0.005

HOLDS = "holds"
FAILS = "does not hold here"
UNRESOLVED = "not resolvable here"
UNTESTABLE = "not testable here"
NOT_RUN = "not run yet"
VERDICTS = (HOLDS, FAILS, UNRESOLVED, UNTESTABLE, NOT_RUN)


class Estimate(NamedTuple):
    """A mean over seeds with its two-sided 95 % t interval.

    Attributes:
        values: one value per seed.
        low, high: the interval's ends; infinite where there is one seed.
    """

    mean: float
    low: float
    high: float
    values: Mapping[int, float]


def estimate(values: Mapping[int, float]) -> Estimate | None:
    """Returns the mean of ``values``, one per seed, with its interval; ``None`` without values."""
    if not values:
        return None
    mean, count = statistics.fmean(values.values()), len(values)
    if count == 1:
        return Estimate(mean, -math.inf, math.inf, values)
    half = t_quantile(count - 1) * statistics.stdev(values.values()) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, values)


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """Estimates ``first`` minus ``second`` over the seeds that both have."""
    return estimate({seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())})


# P(|T| <= t) = 0.95 by degrees of freedom 1 … 30; the records need no more, and the GPU machine has no scipy.
_T95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def t_quantile(freedom: int) -> float:
    """Returns the t with ``P(|T| <= t) = 0.95`` for Student's T; beyond 30 degrees of freedom by its expansion."""
    if freedom < 1:
        raise ValueError(f"freedom={freedom} must be at least 1: an interval needs two values")
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def lower(difference: Estimate | None) -> str:
    """Returns the verdict on "the first is lower than the second", from first minus second.

    It holds where the whole interval lies below 0, and does not where the whole interval lies above.
    """
    if difference is None:
        return NOT_RUN
    return HOLDS if difference.high < 0 else FAILS if difference.low > 0 else UNRESOLVED


def higher(difference: Estimate | None) -> str:
    """Returns the verdict on "the first is higher than the second", from first minus second."""
    return lower(None if difference is None else estimate({seed: -x for seed, x in difference.values.items()}))


def within(value: Estimate | None, low: float, high: float) -> str:
    """Returns the verdict on "the value lies between ``low`` and ``high``".

    It holds where the whole interval lies inside, and does not where the whole interval lies outside.
    """
    if value is None:
        return NOT_RUN
    if low <= value.low and value.high <= high:
        return HOLDS
    return FAILS if value.high < low or value.low > high else UNRESOLVED


def equal(difference: Estimate | None, margin: float = MARGIN) -> str:
    """Returns the verdict on "the two are equal": the difference's interval must lie inside the margin."""
    return within(difference, -margin, margin)


def often(cases: Mapping[int, bool], *, least: int = 3) -> str:
    """Returns the verdict on "this happens frequently", from whether it did with each seed.

    With ``least`` seeds or more it holds if it did in at least half of them, and does not if it never did.
    """
    if not cases:
        return NOT_RUN
    if len(cases) < least:
        return UNRESOLVED
    happened = sum(cases.values())
    return HOLDS if 2 * happened >= len(cases) else UNRESOLVED if happened else FAILS


def exact_interval(count: int, total: int) -> tuple[float, float]:
    """Returns the exact (Clopper-Pearson) 95 % interval of a share that was seen ``count`` times in ``total``."""

    def at_least(least: int, share: float) -> float:
        return sum(math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(least, total + 1))

    def share_where(least: int, probability: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if at_least(least, middle) < probability else (low, middle)
        return (low + high) / 2

    lower_end = share_where(count, 0.025) if count else 0.0
    return lower_end, share_where(count + 1, 0.975) if count < total else 1.0


def all_of(verdicts: Sequence[str]) -> str:
    """Combines verdicts: fails if one fails, holds only if all hold."""
    for verdict in (FAILS, UNTESTABLE, NOT_RUN, UNRESOLVED):
        if verdict in verdicts:
            return verdict
    return HOLDS


def at_depth(points: Iterable[tuple[float, float]], depth: float, *, beyond: float = 0.05) -> float | None:
    """Interpolates the value at ``depth`` between neighbouring ``(depth, value)`` points.

    Up to ``beyond`` outside of the points the outermost line goes on; further out there is none.
    """
    known = sorted(dict(points).items())
    if not known or not known[0][0] - beyond <= depth <= known[-1][0] + beyond:
        return None
    if len(known) == 1:
        return known[0][1]
    right = next((i for i, (x, _) in enumerate(known) if x >= depth), len(known) - 1)
    (x0, y0), (x1, y1) = known[max(0, right - 1)], known[max(1, right)]
    return y0 + (y1 - y0) * (depth - x0) / (x1 - x0)
