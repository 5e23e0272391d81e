"""Estimates differences over seeds with 95 % t intervals, noise by a two-way model and power, and gives verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

# Nats within which two losses are equal; fixed on 2026-11-17, after seed 0 and before the other seeds.
MARGIN = 0.005
# The probability with which a test must detect a true effect.
POWER = 0.8
# Fewer residual degrees of freedom than these give no estimate of the noise.
_FEWEST = 6

HOLDS = "holds"
FAILS = "does not hold here"
UNRESOLVED = "not resolvable here"
UNTESTABLE = "not testable here"
UNAFFORDABLE = "not affordable here"
NOT_RUN = "not run yet"
VERDICTS = (HOLDS, FAILS, UNRESOLVED, UNTESTABLE, UNAFFORDABLE, NOT_RUN)


class Noise(NamedTuple):
    """The residual standard deviation of a run's loss (nats) in the two-way model, and its degrees of freedom."""

    deviation: float
    freedom: int

    def error(self, seeds: int) -> float:
        """Returns the standard error of the difference between two settings, averaged over this number of seeds."""
        return self.deviation * math.sqrt(2 / seeds)


def two_way(losses: pd.DataFrame) -> Noise | None:
    """Fits ``loss = setting + seed + noise`` by least squares; ``None`` below ``_FEWEST`` degrees of freedom.

    ``losses`` has a row per setting and a column per seed; missing runs are NaN. Settings with one seed are ignored.
    """
    table = losses[losses.notna().sum(axis=1) > 1]
    setting, seed = np.nonzero(table.notna().to_numpy())
    design = np.hstack([np.eye(table.shape[0])[setting], np.eye(table.shape[1])[seed]])
    y = table.to_numpy()[setting, seed]
    freedom = len(y) - (int(np.linalg.matrix_rank(design)) if len(y) else 0)
    if freedom < _FEWEST:
        return None
    residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    return Noise(math.sqrt(residual @ residual / freedom), freedom)


class Estimate(NamedTuple):
    """A mean over seeds, its standard error and the degrees of freedom of that error, and ``{seed: value}``."""

    mean: float
    error: float
    freedom: int
    values: Mapping[int, float]

    @property
    def half(self) -> float:
        """Returns half the width of the 95 % interval; infinite for one seed without pooled noise."""
        return t_quantile(self.freedom) * self.error if self.freedom else math.inf

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def estimate(values: Mapping[int, float] | pd.Series, noise: Noise | None = None) -> Estimate | None:
    """Estimates the mean of ``values``, one difference per seed; ``None`` without values.

    The standard error comes from ``noise``, or if that is ``None``, from the spread of ``values``.
    """
    series = pd.Series(values, dtype=float).dropna().sort_index()
    if series.empty:
        return None
    count, by_seed = len(series), {int(str(seed)): float(value) for seed, value in series.items()}
    if noise is not None:
        error, freedom = noise.error(count), noise.freedom
    else:
        error, freedom = float(np.std(series, ddof=1)) / math.sqrt(count) if count > 1 else math.nan, count - 1
    return Estimate(float(series.mean()), error, freedom, by_seed)


def t_quantile(freedom: float, probability: float = 0.975) -> float:
    """Returns the quantile of Student's t distribution at ``probability``."""
    from scipy.stats import t  # here, since the GPU machine trains runs without scipy

    return float(t.ppf(probability, freedom))


def detectable(error: float, freedom: int) -> float:
    """Returns the smallest true difference that an interval tells from 0 with probability ``POWER``."""
    return (t_quantile(freedom) + t_quantile(freedom, POWER)) * error


def power_of_equality(error: float, freedom: int, margin: float = MARGIN) -> float:
    """Returns the probability that, for two equal settings, the interval of their difference is within the margin."""
    from scipy.stats import t

    if not freedom:
        return 0.0
    return max(0.0, 2 * float(t.cdf(margin / error - t_quantile(freedom), freedom)) - 1) if error else 1.0


def seeds_for(effect: float, noise: Noise) -> int:
    """Returns the number of seeds needed to detect a difference of ``effect`` with probability ``POWER``."""
    return math.ceil((detectable(noise.error(1), noise.freedom) / effect) ** 2)


def seeds_for_equality(noise: Noise, margin: float = MARGIN) -> int:
    """Returns the number of seeds needed to show that two equal settings are equal, with probability ``POWER``."""
    reach = t_quantile(noise.freedom) + t_quantile(noise.freedom, (1 + POWER) / 2)
    return math.ceil((reach * noise.error(1) / margin) ** 2)


def lower(difference: Estimate | None) -> str:
    """Judges "the first is lower than the second" by the interval of first minus second.

    ``HOLDS`` if the whole interval lies below 0, ``FAILS`` if it lies above 0; else, or with one seed, ``UNRESOLVED``.
    """
    if difference is None:
        return NOT_RUN
    if len(difference.values) < 2:
        return UNRESOLVED
    return HOLDS if difference.high < 0 else FAILS if difference.low > 0 else UNRESOLVED


def within(value: Estimate | None, low: float, high: float) -> str:
    """Judges "the value lies between ``low`` and ``high``".

    ``HOLDS`` if the whole interval lies inside, ``FAILS`` if outside; else, or with one seed, ``UNRESOLVED``.
    """
    if value is None:
        return NOT_RUN
    if len(value.values) < 2:
        return UNRESOLVED
    if low <= value.low and value.high <= high:
        return HOLDS
    return FAILS if value.high < low or value.low > high else UNRESOLVED


def equal(difference: Estimate | None, margin: float = MARGIN) -> str:
    """Judges "the two are equal": the interval of their difference lies within the margin.

    ``UNRESOLVED`` if two equal settings would pass this test with a probability below ``POWER``.
    """
    verdict = within(difference, -margin, margin)
    if verdict != HOLDS or difference is None:
        return verdict
    return HOLDS if power_of_equality(difference.error, difference.freedom, margin) >= POWER else UNRESOLVED


def often(cases: Mapping[int, bool], *, least: int = 3) -> str:
    """Judges "this happens frequently" by ``cases``, which maps each seed to whether it happened.

    With at least ``least`` seeds: ``HOLDS`` if it happened in half of them or more, ``FAILS`` if the exact interval of
    the share lies below one half. Otherwise ``UNRESOLVED``.
    """
    if not cases:
        return NOT_RUN
    happened, total = sum(cases.values()), len(cases)
    if total < least:
        return UNRESOLVED
    return HOLDS if 2 * happened >= total else FAILS if exact_interval(happened, total)[1] < 0.5 else UNRESOLVED


def exact_interval(count: int, total: int) -> tuple[float, float]:
    """Returns the exact (Clopper-Pearson) 95 % interval of a probability, given ``count`` successes in ``total``."""
    from scipy.stats import binomtest

    interval = binomtest(count, total).proportion_ci(method="exact")
    return float(interval.low), float(interval.high)


def all_of(verdicts: Sequence[str]) -> str:
    """Returns ``HOLDS`` if all hold, else the first of ``FAILS``, ``UNTESTABLE``, ``UNAFFORDABLE``, … that occurs."""
    order = (FAILS, UNTESTABLE, UNAFFORDABLE, NOT_RUN, UNRESOLVED)
    return next((verdict for verdict in order if verdict in verdicts), HOLDS)


def at_depth(points: Iterable[tuple[float, float]], depth: float, *, beyond: float = 0.05) -> float | None:
    """Interpolates linearly between neighbouring ``(depth, value)`` points.

    Extrapolates by at most ``beyond``; returns ``None`` for a depth further outside.
    """
    known = sorted(dict(points).items())
    if not known or not known[0][0] - beyond <= depth <= known[-1][0] + beyond:
        return None
    if len(known) == 1:
        return known[0][1]
    right = next((i for i, (x, _) in enumerate(known) if x >= depth), len(known) - 1)
    (x0, y0), (x1, y1) = known[max(0, right - 1)], known[max(1, right)]
    return y0 + (y1 - y0) * (depth - x0) / (x1 - x0)
