"""Judges the claims by the records, with one function for each kind of test in ``experiments/claims.yaml``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from adaponder.errors import InputError
from experiments import statistics
from experiments.evidence import Evidence
from experiments.statistics import FAILS, HOLDS, NOT_RUN, UNTESTABLE, Estimate, estimate

Test = Mapping[str, Any]
NONE = "–"


class Finding(NamedTuple):
    """The verdict of a test, and the numbers behind it as text."""

    verdict: str
    words: str


def find(evidence: Evidence, test: Test) -> Finding:
    """Judges one test of ``claims.yaml``."""
    return Finding(*KINDS[kind_of(test)](evidence, test))


def judge(evidence: Evidence, tests: Sequence[Test]) -> tuple[str, list[Finding]]:
    """Returns the combined verdict of ``tests``, and the finding of each."""
    findings = [find(evidence, test) for test in tests]
    return statistics.all_of([finding.verdict for finding in findings]), findings


def kind_of(test: Test) -> str:
    """Returns the kind of a test (a key of ``KINDS``); raises unless the test has exactly one."""
    kinds = [kind for kind in KINDS if kind in test]
    if len(kinds) != 1:
        raise InputError(f"claims.yaml: {dict(test)}: a test has one of {', '.join(KINDS)}")
    return kinds[0]


def shown(value: Estimate | None, *, digits: int = 4, percent: bool = False, seeds: bool = True) -> str:
    """Formats an estimate with its interval and, with ``seeds``, the list of its seeds."""
    if value is None:
        return NONE

    def number(x: float) -> str:
        return f"{100 * x:+.1f} %" if percent else f"{x:+.{digits}f}"

    interval = "" if math.isinf(value.half) else f" [{number(value.low)}, {number(value.high)}]"
    listed = ", ".join(map(str, value.values))
    if len(value.values) == 1:
        suffix = f" (seed {listed} alone)" if seeds else " (one seed)"
    else:
        suffix = f" (seeds {listed})" if seeds else ""
    return f"{number(value.mean)}{interval}{suffix}"


_NAMES = {"depth": "iterations", "mflops": "inference FLOPs", "training": "training FLOPs", "ratio": "FLOPs"}
_AT = {
    "nll": "as it came out",
    "nll_at_depth_1": "every token at depth 1",
    "nll_at_full_depth": "every token at full depth",
}
_Result = tuple[str, str]  # the fields of a Finding


def _difference(evidence: Evidence, test: Test) -> _Result:
    """Tests whether the loss, or the column ``of``, is lower in the first of two settings, or equal in both."""
    kind, column = kind_of(test), test.get("of", "loss")
    difference = evidence.minus(*test[kind], column)
    words = " minus ".join(map(evidence.title, test[kind])) + ("" if column == "loss" else f" in {_NAMES[column]}")
    verdict = statistics.lower(difference) if kind == "lower" else statistics.equal(difference)
    return verdict, f"{words}: {shown(difference)}"


def _steadier(evidence: Evidence, test: Test) -> _Result:
    """Tests whether the RMS difference of reruns in the first group of settings is at most half of the second's."""
    groups = test["steadier"]
    differences = [
        evidence.rerun_differences(names, weights)
        for names, weights in zip(groups, (test.get("weights", "final"), "final"), strict=True)
    ]
    if [*map(len, differences)] != [*map(len, groups)]:
        return NOT_RUN, NONE
    first, second = (math.sqrt(sum(value**2 for value in values) / len(values)) for values in differences)
    words = f"reruns differ by {first:.4f}, against {second:.4f} ({len(differences[0])} pairs each)"
    return HOLDS if first <= second / 2 else FAILS, words


def _saved(evidence: Evidence, test: Test) -> _Result:
    """Tests whether the first setting saves a share from ``low`` to ``high`` of the second setting's depth or cost."""
    column = test.get("of", "depth")
    less, more = (evidence.values(name, column) for name in test["saved"])
    saved = estimate(1 - less / more)
    verdict = statistics.within(saved, test["low"], test["high"])
    return verdict, f"{_NAMES[column]} saved: {shown(saved, percent=True)}"


def _below_curve(evidence: Evidence, test: Test) -> _Result:
    """Tests whether a setting, tuned by the dial to ``depth`` if given, has a loss more than ``by`` below a curve."""
    column, depth = test.get("of", "depth"), test.get("depth")
    curve = test.get("against", evidence.claims["curve"])
    line = f"the lines between {'; '.join(map(evidence.title, curve))}," if "against" in test else "the curve"
    name, at = test[kind_of(test)], "" if depth is None else f" at {depth:g}"
    over = evidence.over_curve(name, curve, column, depth)
    shifted = over and over._replace(mean=over.mean + test.get("by", 0.0))
    words = f"{evidence.title(name)}{at} minus {line} at equal {_NAMES[column]}: {shown(over)}"
    return statistics.lower(shifted), words


def _collapse(evidence: Evidence, test: Test) -> _Result:
    """Tests whether, in at least half of a setting's seeds, over 99 % of the tokens have the same depth."""
    points = evidence.points(test["collapse"])
    if points.empty:
        return NOT_RUN, NONE
    cases = dict((points.most > 0.99).items())
    count, total = sum(cases.values()), len(cases)
    low, high = statistics.exact_interval(count, total)
    seeds = f"{count} of {total} {'seed' if total == 1 else 'seeds'}"
    depths = ", ".join(f"{depth:.2f}" for depth in points.depth)
    words = f"{evidence.title(test['collapse'])}: {seeds}, exact interval of the share [{low:.2f}, {high:.2f}]"
    return statistics.often(cases), f"{words} (mean depth {depths})"


def _policy(evidence: Evidence, test: Test) -> _Result:
    """Tests whether the first of two halting policies of one model has a lower loss than the second at equal depth."""
    compared = {seed: result["compared"] for seed, result in evidence.measured(test["run"], "policies").items()}
    first, second = (
        pd.Series({seed: losses.get(name, {}).get("loss") for seed, losses in compared.items()}, dtype=float)
        for name in test["policy"]
    )
    difference = estimate(first - second)
    return statistics.lower(difference), f"{' minus '.join(test['policy'])}: {shown(difference)}"


def _check_mark(evidence: Evidence, test: Test) -> _Result:
    """Tests whether, in half of the seeds, the loss by halting step is lowest at the second and highest at the last."""
    by_seed = {seed: result["nll"] for seed, result in evidence.measured(test["check_mark"], "steps").items()}
    if not by_seed:
        return NOT_RUN, NONE
    # If no token halts at some step, the curve has a gap there and no shape can be judged.
    complete = {seed: losses for seed, losses in by_seed.items() if None not in losses}
    cases = {seed: min(losses) == losses[1] and max(losses) == losses[-1] for seed, losses in complete.items()}
    listed = "; ".join(
        f"seed {seed}: " + ", ".join("none" if loss is None else f"{loss:.2f}" for loss in losses)
        for seed, losses in by_seed.items()
    )
    seen = f"a check mark in {sum(cases.values())} of the {len(cases)} seeds in which tokens halt at every step"
    return statistics.often(cases) if cases else UNTESTABLE, f"loss by step, {listed} ({seen})"


def _easier(evidence: Evidence, test: Test) -> _Result:
    """Tests whether tokens that halt early have a lower loss than tokens of full depth."""

    def early_minus_last(result: Mapping[str, Any]) -> float | None:
        *early, (_, last) = zip(result["tokens"], result[test["at"]], strict=True)
        early = [(count, loss) for count, loss in early if loss is not None]
        if not early or last is None:
            return None
        return sum(count * loss for count, loss in early) / sum(count for count, _ in early) - last

    difference = estimate(_by_seed(evidence, test["easier"], "steps", early_minus_last))
    words = f"halted early minus the rest, {_AT[test['at']]}: {shown(difference, digits=2)}"
    return statistics.lower(difference), words


def _gap(evidence: Evidence, test: Test) -> _Result:
    """Tests whether skipping halted tokens raises the loss of a model that was trained without skipping them."""
    gaps = _by_seed(evidence, test["gap"], "reuse", lambda result: result["gap"])
    words = f"{evidence.title(test['gap'])}, skipping minus as trained: {shown(estimate(gaps))}"
    return statistics.lower(estimate(-gaps)), words


def _faster(evidence: Evidence, test: Test) -> _Result:
    """Tests whether the first setting is faster; speed is measured only in runs that do not share the device."""
    stage = test["at"]
    first, second = (
        _by_seed(evidence, name, "speed", lambda result: result[stage]["tokens_per_second"]) for name in test["faster"]
    )
    slower, over = estimate(second / first - 1), " over ".join(map(evidence.title, test["faster"]))
    return statistics.lower(slower), f"{stage}, time of {over}, less one: {shown(slower, percent=True)}"


def _unaffordable(evidence: Evidence, test: Test) -> _Result:
    """Reports the number of runs that a test would need: ``runs``, or enough to detect a difference of ``effect``."""
    noise, _ = evidence.pools[""]["stable"]
    runs = test.get("runs") or (2 * statistics.seeds_for(test["effect"], noise) if noise else None)
    return statistics.UNAFFORDABLE, f"{test['unaffordable']}: {runs or 'unknown'} runs"


def _by_seed(
    evidence: Evidence, name: str, measurement: str, number: Callable[[Mapping[str, Any]], float | None]
) -> pd.Series:
    """Applies ``number`` to the result of a measurement in each seed; ``None`` becomes NaN."""
    results = evidence.measured(name, measurement)
    return pd.Series({seed: number(result) for seed, result in results.items()}, dtype=float)


KINDS: Mapping[str, Callable[[Evidence, Test], _Result]] = {
    "lower": _difference,
    "equal": _difference,
    "saved": _saved,
    "steadier": _steadier,
    "below_curve": _below_curve,
    "dial_below_curve": _below_curve,
    "collapse": _collapse,
    "policy": _policy,
    "check_mark": _check_mark,
    "easier": _easier,
    "gap": _gap,
    "faster": _faster,
    "untestable": lambda evidence, test: (UNTESTABLE, test["untestable"]),
    "unaffordable": _unaffordable,
}
