"""The section on depth on demand: needed depths, correlations from counts, fits and verdicts of made-up models."""

import pytest
from scipy.stats import spearmanr

from experiments import demand
from experiments.demand import Subject, depth_fit, needed_depths, rank_correlation
from experiments.statistics import FAILS, HOLDS, UNRESOLVED

QUESTIONS = [100, 100, 50, 50]


def fixed(k: int, *shares: float, seed: int = 0, method: str = "") -> Subject:
    result = {"needs": [1, 2, 3, 4], "questions": QUESTIONS, "at_depth": {str(k): list(shares)}}
    return Subject(f"{method}K = {k}", seed, k, False, result)


def halting(name: str, by_depth: list[list[int]], accuracy: list[float], full: list[float], seed: int = 0) -> Subject:
    depth = [sum(d * n for d, n in enumerate(row, 1)) / sum(row) for row in by_depth]
    result = {"needs": [1, 2, 3, 4], "questions": QUESTIONS, "at_depth": {"4": full}, "accuracy": accuracy}
    return Subject(name, seed, 4, True, result | {"depth": depth, "by_depth": by_depth})


SHARES = [(0.99, 0.3, 0.2, 0.2), (1.0, 0.96, 0.4, 0.3), (1.0, 1.0, 0.97, 0.5), (1.0, 1.0, 0.99, 0.96)]
SEPARATE = [fixed(k, *shares) for k, shares in enumerate(SHARES, 1)]
COUNTS = [[98, 2, 0, 0], [0, 95, 5, 0], [0, 0, 48, 2], [0, 0, 1, 49]]
FOLLOWS = halting("good", COUNTS, [0.99, 0.99, 0.98, 0.96], [1, 1, 0.99, 0.96])
FULL = halting("deep", [[0, 0, 0, n] for n in QUESTIONS], [1, 1, 0.99, 0.96], [1, 1, 0.99, 0.96])
LOST = halting("lost", [[n, 0, 0, 0] for n in QUESTIONS], [1, 0.3, 0.2, 0.2], [1, 0.6, 0.3, 0.2])


def test_the_least_depth_that_solves_each_need_over_seeds():
    assert needed_depths(SEPARATE) == [1, 2, 3, 4]
    assert needed_depths(SEPARATE[:3]) == [1, 2, 3, None]
    assert needed_depths([*SEPARATE, fixed(1, 0.8, 0.3, 0.2, 0.2, seed=1)]) == [2, 2, 3, 4]  # a mean of 0.895
    assert needed_depths([FOLLOWS]) == [None] * 4  # one that halts proves nothing about a depth
    assert needed_depths([]) == []
    # Another method that fails at K takes nothing from the one that does not, whichever comes first.
    slow = fixed(4, 0.9, 0.5, 0.5, 0.5, method="slow, ")
    assert needed_depths([*SEPARATE, slow]) == needed_depths([slow, *SEPARATE]) == [1, 2, 3, 4]


@pytest.mark.parametrize("needed", [[1, 2, 3, 4], [1, 1, 2, 3], [1, 2, 3, None]])
def test_correlations_from_counts_are_those_of_the_questions(needed):
    rows = [
        (need, depth)
        for need, counts in zip(needed, FOLLOWS.result["by_depth"], strict=True)
        for depth, count in enumerate(counts, 1)
        for _ in range(count)
        if need is not None
    ]
    expected = spearmanr([need for need, _ in rows], [depth for _, depth in rows]).statistic
    assert rank_correlation(FOLLOWS.result["by_depth"], needed) == pytest.approx(expected)
    assert rank_correlation(FULL.result["by_depth"], needed) is None, "no spread has no correlation"


def test_aims_of_models_that_follow_read_all_or_lose():
    good, full = depth_fit(FOLLOWS, [1, 2, 3, 4]), depth_fit(FULL, [1, 2, 3, 4])
    assert (good.rho > 0.9, good.lost <= 0.01, good.spare <= 0.25) == (True, True, True)
    assert good.spare == pytest.approx((2 + 5 + 2 - 1) / 300)
    assert good.lost == pytest.approx((100 * 0.01 + 100 * 0.01 + 50 * 0.01) / 300)
    assert (full.rho, full.lost, full.spare > 0.25) == (None, 0.0, True)
    assert depth_fit(LOST, [1, 2, 3, 4]).lost > 0.01
    assert depth_fit(FOLLOWS, [None] * 4).spare is None


def page(models: list[Subject]) -> str:
    return "\n".join(demand.tables(models))


def test_the_section_says_where_one_reading_fails_and_four_do_not():
    text = page([*SEPARATE, FULL, FOLLOWS])
    assert "| **needed depth** |  | **1** | **2** | **3** | **4** |" in text
    hard = "K = 1 fails where K = 4 succeeds: 2 hops 30.0 % against 100.0 %, 3 hops 20.0 % against 99.0 %"
    assert hard in text
    assert "99.0 % at 1.02" in text
    # Where three iterations are enough for all, one still fails where four succeed.
    text = page([*SEPARATE[:2], fixed(3, 1, 1, 1, 1), SEPARATE[3], FOLLOWS])
    assert "| **needed depth** |  | **1** | **2** | **3** | **3** |" in text
    assert hard in text
    text = page([fixed(1, 1, 1, 1, 1), fixed(4, 1, 1, 1, 1), LOST])
    assert "K = 1 fails where K = 4 succeeds: nowhere." in text
    assert "no model that halts solves them" in text
    assert page([FOLLOWS]) == ""


def test_aims_are_judged_over_all_seeds_of_a_setting():
    alone = page([*SEPARATE, FULL, FOLLOWS])
    assert "- good: the best of 2 settings that halt, by mean rank correlation. Over its seeds:" in alone
    assert alone.count(f"(seed 0 alone), aim 0.9: **{UNRESOLVED}**") == 1
    assert alone.count(f": **{UNRESOLVED}**") == 3, "one seed resolves nothing"

    def seeds(*result: Subject) -> str:
        same = (halting("same", m.result["by_depth"], m.result["accuracy"], m.full, i) for i, m in enumerate(result))
        return page([*SEPARATE, *same])

    assert seeds(FOLLOWS, FOLLOWS, FOLLOWS).count(f": **{HOLDS}**") == 3
    assert f"needed depth +0.000 [+0.000, +0.000] (seeds 0, 1, 2), aim 0.9: **{FAILS}**" in seeds(FULL, FULL, FULL)
    # One seed of three reads every token to the end: the best one says nothing about the others.
    assert seeds(FOLLOWS, FULL, FOLLOWS).count(f": **{UNRESOLVED}**") == 3
