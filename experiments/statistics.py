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


def t_quantile(freedom: int) -> float:
    """Returns the t with ``P(|T| <= t) = 0.95`` for Student's T."""
    from scipy.stats import t  # here, since the GPU machine trains runs without scipy

    return float(t.ppf(0.975, freedom))


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
    from scipy.stats import beta

    low = float(beta.ppf(0.025, count, total - count + 1)) if count else 0.0
    return low, float(beta.ppf(0.975, count + 1, total - count)) if count < total else 1.0


def all_of(verdicts: Sequence[str]) -> str:
    """Combines verdicts: fails if one fails, holds only if all hold."""
    return next((verdict for verdict in (FAILS, UNTESTABLE, NOT_RUN, UNRESOLVED) if verdict in verdicts), HOLDS)


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
