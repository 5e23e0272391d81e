"""Intervals over seeds and verdicts: each rule at its edges."""

from __future__ import annotations

import math

import pytest

from experiments.statistics import (
    FAILS,
    HOLDS,
    NOT_RUN,
    UNRESOLVED,
    UNTESTABLE,
    Estimate,
    all_of,
    at_depth,
    equal,
    estimate,
    exact_interval,
    lower,
    often,
    paired,
)


def between(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, {})


def test_an_interval_is_of_differences_within_a_seed_and_leaves_out_who_has_no_partner():
    first, second = {0: 3.50, 1: 3.60, 2: 3.70, 7: 1.0}, {2: 3.73, 1: 3.62, 0: 3.51, 9: 2.0}
    found = paired(first, second)
    assert found is not None
    assert list(found.values) == [0, 1, 2]
    assert found.mean == pytest.approx(-0.02)
    half = 4.30265 * 0.01 / math.sqrt(3)  # the standard deviation of 0.01, 0.02, 0.03 is 0.01
    assert (found.low, found.high) == pytest.approx((-0.02 - half, -0.02 + half), abs=1e-6)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_resolves_nothing():
    one = estimate({0: -0.5})
    assert one is not None
    assert (lower(one), equal(one)) == (UNRESOLVED, UNRESOLVED)
    assert (lower(None), equal(None), often({})) == (NOT_RUN, NOT_RUN, NOT_RUN)


@pytest.mark.parametrize(
    ("low", "high", "difference", "equality"),
    [
        (-0.03, -0.001, HOLDS, UNRESOLVED),
        (0.001, 0.03, FAILS, UNRESOLVED),
        (-0.03, 0.0, UNRESOLVED, UNRESOLVED),
        (-0.004, 0.005, UNRESOLVED, HOLDS),
        (0.001, 0.004, FAILS, HOLDS),  # a small difference is equality, even if it is told from 0
        (-0.004, 0.006, UNRESOLVED, UNRESOLVED),
        (0.0051, 0.02, FAILS, FAILS),
        (-0.02, -0.0051, HOLDS, FAILS),
    ],
)
def test_verdicts_need_the_whole_interval(low, high, difference, equality):
    assert (lower(between(low, high)), equal(between(low, high))) == (difference, equality)


def test_what_happens_often_needs_three_seeds():
    assert often({0: True, 1: True}) == UNRESOLVED
    assert often({0: True, 1: True, 2: False}) == HOLDS
    assert often({0: True, 1: False, 2: False}) == UNRESOLVED
    assert often(dict.fromkeys(range(3), False)) == FAILS


def test_several_statements_hold_together_or_not_at_all():
    assert all_of([HOLDS, HOLDS]) == HOLDS
    assert all_of([HOLDS, UNRESOLVED]) == UNRESOLVED
    assert all_of([NOT_RUN, HOLDS, UNRESOLVED]) == NOT_RUN
    assert all_of([NOT_RUN, FAILS]) == FAILS
    assert all_of([HOLDS, UNTESTABLE]) == UNTESTABLE


def test_values_between_points_lie_on_a_line_and_beyond_them_there_are_none():
    points = [(4.0, 3.4), (1.0, 3.6), (2.0, 3.5)]
    assert at_depth(points, 1.5) == pytest.approx(3.55)
    assert at_depth(points, 3.0) == pytest.approx(3.45)
    assert at_depth(points, 1.0) == 3.6
    assert at_depth(points, 4.0) == pytest.approx(3.4)
    assert at_depth(points, 4.04) == pytest.approx(3.398)
    assert at_depth(points, 0.96) == pytest.approx(3.604)
    assert at_depth(points, 4.06) is None
    assert at_depth([(2.0, 1.0)], 2.0) == 1.0
    assert at_depth([], 2.0) is None


def test_exact_intervals_are_those_of_clopper_and_pearson():
    known = {(0, 3): (0.0, 0.7076), (3, 3): (0.2924, 1.0), (1, 3): (0.0084, 0.9057), (5, 10): (0.1871, 0.8129)}
    for (count, total), interval in known.items():
        assert exact_interval(count, total) == pytest.approx(interval, abs=1e-4)
