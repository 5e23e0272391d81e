"""Intervals over seeds, their noise and power, and verdicts: each rule at its edges."""

import math

import numpy as np
import pandas as pd
import pytest

from experiments import statistics
from experiments.judging import shown
from experiments.statistics import FAILS, HOLDS, NOT_RUN, POWER, UNRESOLVED, UNTESTABLE, Estimate, Noise

# Quantiles of Student's t from a printed table: 0.975 and 0.8 for 2, 10 and 40 degrees of freedom.
TABLE = {2: (4.30265, 1.06066), 10: (2.22814, 0.87906), 40: (2.02108, 0.85070)}


def between(low: float, high: float) -> Estimate:
    """Returns an estimate of many seeds with this interval."""
    return Estimate((low + high) / 2, (high - low) / 2 / TABLE[40][0], 40, dict.fromkeys(range(41), 0.0))


def test_an_interval_is_of_differences_within_a_seed_and_leaves_out_who_has_no_partner():
    first, second = pd.Series({0: 3.50, 1: 3.60, 2: 3.70, 7: 1.0}), pd.Series({2: 3.73, 1: 3.62, 0: 3.51, 9: 2.0})
    found = statistics.estimate(first - second)
    assert found is not None
    assert list(found.values) == [0, 1, 2]
    assert found.mean == pytest.approx(-0.02)
    half = TABLE[2][0] * 0.01 / math.sqrt(3)  # the standard deviation of 0.01, 0.02, 0.03 is 0.01
    assert (found.low, found.high) == pytest.approx((-0.02 - half, -0.02 + half), abs=1e-6)
    pooled = statistics.estimate(first - second, Noise(0.005, 10))
    assert pooled is not None
    assert pooled.half == pytest.approx(TABLE[10][0] * 0.005 * math.sqrt(2 / 3), rel=1e-5)
    assert statistics.estimate(pd.Series({0: 1.0}) - pd.Series({1: 1.0})) is None


def test_noise_is_what_settings_and_seeds_do_not_explain():
    """Against the sum of squares by alternating means, on a table with gaps; settings of one seed change nothing."""
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(9, 3)), columns=[0, 1, 2])
    table.iloc[1, 2] = table.iloc[4, 0] = np.nan
    rest = table.copy()
    for _ in range(200):
        rest = rest.sub(rest.mean(axis=1), axis=0)
        rest = rest - rest.mean(axis=0)
    freedom = 25 - (9 + 3 - 1)
    expected = math.sqrt(float((rest**2).sum().sum()) / freedom)
    assert statistics.two_way(table) == (pytest.approx(expected, rel=1e-6), freedom)
    assert statistics.two_way(pd.concat([table, pd.DataFrame({0: [99.0]})])) == statistics.two_way(table)
    assert statistics.two_way(table.iloc[:3]) is None, "too few runs"


@pytest.mark.parametrize("freedom", [10, 40])
def test_power_and_seeds_that_an_effect_needs(freedom):
    t, t_power = TABLE[freedom]
    noise = Noise(0.006, freedom)
    expected = (t + t_power) * 0.006 * math.sqrt(2 / 3)
    assert statistics.detectable(noise.error(3), freedom) == pytest.approx(expected, rel=1e-4)
    assert statistics.detectable(noise.error(statistics.seeds_for(0.003, noise)), freedom) <= 0.003
    assert statistics.detectable(noise.error(statistics.seeds_for(0.003, noise) - 1), freedom) > 0.003
    assert statistics.power_of_equality(noise.error(3), freedom) == 0.0, "three seeds never show equality within 0.005"
    seeds = statistics.seeds_for_equality(noise)
    powers = [statistics.power_of_equality(noise.error(count), freedom) for count in (seeds - 1, seeds)]
    assert powers[0] < POWER <= powers[1]
    # Of as many pairs of equal settings the interval lies within the margin that often.
    rng, count = np.random.default_rng(1), 4000
    errors = noise.error(seeds) * np.sqrt(rng.chisquare(freedom, count) / freedom)
    inside = abs(rng.normal(0, noise.error(seeds), count)) + t * errors <= 0.005
    assert inside.mean() == pytest.approx(POWER, abs=0.06)


def test_one_seed_resolves_nothing():
    for noise in (None, Noise(0.001, 40)):
        one = statistics.estimate({0: -0.5}, noise)
        assert one is not None
        assert (statistics.lower(one), statistics.equal(one)) == (UNRESOLVED,) * 2
        assert shown(one).endswith(" (seed 0 alone)")
        assert ("[" in shown(one)) == (noise is not None), "without a pool one seed has no interval"
    assert {statistics.lower(None), statistics.equal(None), statistics.often({})} == {NOT_RUN}


@pytest.mark.parametrize(
    ("low", "high", "difference", "equality"),
    [
        (-0.03, -0.001, HOLDS, UNRESOLVED),
        (0.001, 0.03, FAILS, UNRESOLVED),
        (-0.03, 0.0001, UNRESOLVED, UNRESOLVED),
        (-0.0015, 0.002, UNRESOLVED, HOLDS),
        (-0.0049, 0.0049, UNRESOLVED, UNRESOLVED),  # inside of the margin, but two equal settings rarely are
        (0.001, 0.004, FAILS, HOLDS),  # a small difference is equality, even if it is told from 0
        (-0.004, 0.006, UNRESOLVED, UNRESOLVED),
        (0.0051, 0.02, FAILS, FAILS),
        (-0.02, -0.0051, HOLDS, FAILS),
    ],
)
def test_verdicts_need_the_whole_interval_and_equality_power(low, high, difference, equality):
    assert (statistics.lower(between(low, high)), statistics.equal(between(low, high))) == (difference, equality)


@pytest.mark.parametrize(
    ("happened", "never", "verdict"),
    [(2, 0, UNRESOLVED), (2, 1, HOLDS), (2, 2, HOLDS), (1, 2, UNRESOLVED), (0, 3, UNRESOLVED), (0, 6, FAILS)],
)
def test_what_happens_often_needs_three_seeds_and_half_of_them(happened, never, verdict):
    """Never in three seeds still allows 71 %; never in six excludes one half."""
    assert statistics.often(dict(enumerate([True] * happened + [False] * never))) == verdict


def test_several_statements_hold_together_or_not_at_all():
    assert statistics.all_of([HOLDS, HOLDS]) == HOLDS
    assert statistics.all_of([HOLDS, UNRESOLVED]) == UNRESOLVED
    assert statistics.all_of([NOT_RUN, HOLDS, UNRESOLVED]) == NOT_RUN
    assert statistics.all_of([NOT_RUN, FAILS]) == FAILS
    assert statistics.all_of([HOLDS, UNTESTABLE]) == UNTESTABLE


def test_values_between_points_lie_on_a_line_and_beyond_them_there_are_none():
    points = [(4.0, 3.4), (1.0, 3.6), (2.0, 3.5)]
    for depth, value in ((1.5, 3.55), (3.0, 3.45), (1.0, 3.6), (4.0, 3.4), (4.04, 3.398), (0.96, 3.604)):
        assert statistics.at_depth(points, depth) == pytest.approx(value)
    assert statistics.at_depth(points, 4.06) is None
    assert statistics.at_depth([(2.0, 1.0)], 2.0) == 1.0
    assert statistics.at_depth([], 2.0) is None


def test_exact_intervals_are_those_of_clopper_and_pearson():
    known = {(0, 3): (0.0, 0.7076), (3, 3): (0.2924, 1.0), (1, 3): (0.0084, 0.9057), (5, 10): (0.1871, 0.8129)}
    for (count, total), interval in known.items():
        assert statistics.exact_interval(count, total) == pytest.approx(interval, abs=1e-4)
