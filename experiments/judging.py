"""Judges the claims by the records: one function for every kind of test in ``experiments/claims.yaml``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from adaponder.errors import InputError
from experiments import statistics
from experiments.evidence import Evidence
from experiments.statistics import FAILS, HOLDS, NOT_RUN, UNRESOLVED, UNTESTABLE, Estimate, estimate, paired

Test = Mapping[str, Any]
NONE = "–"


class Finding(NamedTuple):
    """The result of a test: its verdict, and its numbers as text."""

    verdict: str
    words: str


def find(evidence: Evidence, test: Test) -> Finding:
    """Runs one test."""
    return KINDS[kind_of(test)](evidence, test)


def judge(evidence: Evidence, tests: Sequence[Test]) -> tuple[str, list[Finding]]:
    """Returns the verdict on all tests together, and each test's finding."""
    findings = [find(evidence, test) for test in tests]
    return statistics.all_of([finding.verdict for finding in findings]), findings


def kind_of(test: Test) -> str:
    """Returns the kind of a test; raises unless it has exactly one that is known."""
    kinds = [kind for kind in KINDS if kind in test]
    if len(kinds) != 1:
        raise InputError(f"claims.yaml: {dict(test)}: a test has one of {', '.join(KINDS)}")
    return kinds[0]


def shown(value: Estimate | None, *, digits: int = 4, percent: bool = False) -> str:
    """Formats a difference with its interval and seeds."""
    if value is None:
        return NONE

    def number(x: float) -> str:
        return f"{100 * x:+.1f} %" if percent else f"{x:+.{digits}f}"

    seeds = ", ".join(map(str, value.values))
    if math.isinf(value.low):
        return f"{number(value.mean)} (seed {seeds} alone)"
    return f"{number(value.mean)} [{number(value.low)}, {number(value.high)}] (seeds {seeds})"


# --- kinds of tests -------------------------------------------------------------------------------------------------

_NAMES = {"depth": "iterations", "mflops": "inference FLOPs", "training": "training FLOPs", "ratio": "FLOPs"}
_AT = {
    "nll": "as it came out",
    "nll_at_depth_1": "every token at depth 1",
    "nll_at_full_depth": "every token at full depth",
}
# The accuracy of guessing: one of four answers; a last word out of the whole vocabulary.
_CHANCE = {"hellaswag": 0.25, "arc_easy": 0.25, "sciq": 0.25, "lambada_openai": 0.0}


def _lower(evidence: Evidence, test: Test) -> Finding:
    of = test.get("of", "loss")
    difference = paired(*(evidence.values(name, of) for name in test["lower"]))
    what = "" if of == "loss" else f" in {_NAMES[of]}"
    return Finding(statistics.lower(difference), f"{_versus(evidence, test['lower'])}{what}: {shown(difference)}")


def _equal(evidence: Evidence, test: Test) -> Finding:
    difference = paired(*map(evidence.values, test["equal"]))
    return Finding(statistics.equal(difference), f"{_versus(evidence, test['equal'])}: {shown(difference)}")


def _steadier(evidence: Evidence, test: Test) -> Finding:
    """Tests whether reruns of the first runs differ at most half as much as those of the second (root mean square)."""
    groups = test["steadier"]
    differences = [
        evidence.rerun_differences(names, weights)
        for names, weights in zip(groups, (test.get("weights", "final"), "final"), strict=True)
    ]
    if [*map(len, differences)] != [*map(len, groups)]:
        return Finding(NOT_RUN, NONE)
    first, second = (math.sqrt(sum(value**2 for value in values) / len(values)) for values in differences)
    words = f"reruns differ by {first:.4f}, against {second:.4f} ({len(differences[0])} pairs each)"
    return Finding(HOLDS if first <= second / 2 else FAILS, words)


def _saved(evidence: Evidence, test: Test) -> Finding:
    of = test.get("of", "depth")
    less, more = (evidence.values(name, of) for name in test["saved"])
    saved = estimate({seed: 1 - less[seed] / more[seed] for seed in sorted(less.keys() & more.keys())})
    verdict = statistics.within(saved, test["low"], test["high"])
    return Finding(verdict, f"{_NAMES[of]} saved: {shown(saved, percent=True)}")


def _below_curve(evidence: Evidence, test: Test) -> Finding:
    """Tests the loss, or at a ``depth`` that of the dial, against the lines between other runs."""
    of, curve = test.get("of", "depth"), test.get("against", evidence.claims["curve"])
    line = f"the lines between {'; '.join(map(evidence.title, curve))}," if "against" in test else "the curve"
    if "dial_below_curve" in test:
        name, at = test["dial_below_curve"], f" at {test['depth']:g}"
        over = evidence.dial_over_curve(name, curve, test["depth"], of)
    else:
        name, at = test["below_curve"], ""
        over = evidence.over_curve(name, curve, of)
    aimed = estimate({seed: value + test.get("by", 0.0) for seed, value in over.items()})
    words = f"{evidence.title(name)}{at} minus {line} at equal {_NAMES[of]}: {shown(estimate(over))}"
    return Finding(statistics.lower(aimed), words)


def _collapse(evidence: Evidence, test: Test) -> Finding:
    points = dict(sorted(evidence.points(test["collapse"]).items()))
    if not points:
        return Finding(NOT_RUN, NONE)
    cases = {seed: point.collapsed for seed, point in points.items()}
    count, total = sum(cases.values()), len(cases)
    low, high = statistics.exact_interval(count, total)
    seeds = f"{count} of {total} {'seed' if total == 1 else 'seeds'}"
    depths = ", ".join(f"{point.depth:.2f}" for point in points.values())
    words = f"{evidence.title(test['collapse'])}: {seeds}, exact interval of the share [{low:.2f}, {high:.2f}]"
    return Finding(statistics.often(cases), f"{words} (mean depth {depths})")


def _same_order(evidence: Evidence, test: Test) -> Finding:
    """Tests whether runs that differ by more than ``by`` keep their order after half of the training.

    A pair counts for a verdict where both of its differences are told from 0.
    """
    turned, seeds, verdicts = [], 3, []
    for (first, first_half), (second, second_half) in itertools.combinations(test["same_order"], 2):
        full = paired(evidence.values(first), evidence.values(second))
        half = paired(evidence.values(first_half), evidence.values(second_half))
        if full is None or half is None:
            return Finding(NOT_RUN, NONE)
        seeds = min(seeds, len(full.values), len(half.values))
        if abs(full.mean) <= test["by"]:
            continue
        same = full.mean * half.mean > 0
        resolved = statistics.UNRESOLVED not in (statistics.lower(full), statistics.lower(half))
        verdicts.append((HOLDS if same else FAILS) if resolved else UNRESOLVED)
        if not same:
            turned.append(f"{first} minus {second} is {full.mean:+.4f}, after half of the steps {half.mean:+.4f}")
    counts = f"{len(verdicts) - len(turned)} of {len(verdicts)}"
    words = f"{test['what']}: {counts} pairs that differ by more than {test['by']:g} do so in the same direction"
    words += " (one seed)" if seeds < 2 else ""
    return Finding(statistics.all_of(verdicts) if verdicts else UNRESOLVED, "; ".join([words, *turned]))


def _policy(evidence: Evidence, test: Test) -> Finding:
    compared = {seed: result["compared"] for seed, result in evidence.measured(test["run"], "policies").items()}
    losses = [{seed: result.get(name, {}).get("loss") for seed, result in compared.items()} for name in test["policy"]]
    difference = paired(*({seed: loss for seed, loss in by_seed.items() if loss is not None} for by_seed in losses))
    return Finding(statistics.lower(difference), f"{' minus '.join(test['policy'])}: {shown(difference)}")


def _check_mark(evidence: Evidence, test: Test) -> Finding:
    by_seed = {seed: result["nll"] for seed, result in evidence.measured(test["check_mark"], "steps").items()}
    if not by_seed:
        return Finding(NOT_RUN, NONE)
    # Without tokens that halt at every step there is no curve to have a shape.
    complete = {seed: losses for seed, losses in by_seed.items() if None not in losses}
    cases = {seed: min(losses) == losses[1] and max(losses) == losses[-1] for seed, losses in complete.items()}
    listed = "; ".join(
        f"seed {seed}: " + ", ".join("none" if loss is None else f"{loss:.2f}" for loss in losses)
        for seed, losses in by_seed.items()
    )
    seen = f"a check mark in {sum(cases.values())} of the {len(cases)} seeds in which tokens halt at every step"
    return Finding(statistics.often(cases) if cases else UNTESTABLE, f"loss by step, {listed} ({seen})")


def _easier(evidence: Evidence, test: Test) -> Finding:
    differences = {}
    for seed, result in evidence.measured(test["easier"], "steps").items():
        *early, (_, last) = zip(result["tokens"], result[test["at"]], strict=True)
        early = [(count, loss) for count, loss in early if loss is not None]
        if early and last is not None:
            differences[seed] = sum(count * loss for count, loss in early) / sum(count for count, _ in early) - last
    difference = estimate(differences)
    words = f"halted early minus the rest, {_AT[test['at']]}: {shown(difference, digits=2)}"
    return Finding(statistics.lower(difference), words)


def _gap(evidence: Evidence, test: Test) -> Finding:
    gaps = estimate({seed: result["gap"] for seed, result in evidence.measured(test["gap"], "reuse").items()})
    words = f"{evidence.title(test['gap'])}, skipping minus as trained: {shown(gaps)}"
    return Finding(statistics.higher(gaps), words)


def _faster(evidence: Evidence, test: Test) -> Finding:
    """Compares speeds, measured only where a run had the device to itself."""
    at = test["at"]
    first, second = (
        {seed: result[at]["tokens_per_second"] for seed, result in evidence.measured(name, "speed").items()}
        for name in test["faster"]
    )
    slower = estimate({seed: second[seed] / first[seed] - 1 for seed in sorted(first.keys() & second.keys())})
    over = " over ".join(map(evidence.title, test["faster"]))
    return Finding(statistics.lower(slower), f"{at}, time of {over}, less one: {shown(slower, percent=True)}")


def _above_chance(evidence: Evidence, test: Test) -> Finding:
    name = test["above_chance"]
    scores = {seed: _downstream(result) for seed, result in evidence.measured(name, "tasks").items()}
    if not scores:
        tried = [run.record.get("measured", {}).get("tasks") for runs in evidence.runs(name).values() for run in runs]
        why = next((result["missing"] for result in tried if result is not None), None)
        return Finding(NOT_RUN, NONE if why is None else f"could not be measured: {why}")
    over = estimate({seed: score - chance for seed, (score, chance) in scores.items()})
    verdict = statistics.higher(over)
    words = f"{evidence.title(name)}, mean accuracy minus guessing: {shown(over, percent=True)}"
    return Finding(UNTESTABLE if verdict == FAILS else verdict, words)


def _right(evidence: Evidence, test: Test) -> Finding:
    measured = (evidence.measured(name, "tasks") for name in test["right"])
    difference = paired(*({seed: _downstream(result)[0] for seed, result in scores.items()} for scores in measured))
    equal = statistics.equal(difference, test["within"]) if "within" in test else None
    words = f"{_versus(evidence, test['right'])} in mean accuracy: {shown(difference, percent=True)}"
    return Finding(equal or statistics.higher(difference), words)


def _downstream(measured: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (mean accuracy, mean chance level) over the sets."""
    scores = {task["task"]: task["metrics"]["acc"]["value"] for task in measured["tasks"]}
    return sum(scores.values()) / len(scores), sum(_CHANCE[name] for name in scores) / len(scores)


KINDS: Mapping[str, Callable[[Evidence, Test], Finding]] = {
    "lower": _lower,
    "equal": _equal,
    "saved": _saved,
    "steadier": _steadier,
    "below_curve": _below_curve,
    "dial_below_curve": _below_curve,
    "collapse": _collapse,
    "same_order": _same_order,
    "policy": _policy,
    "check_mark": _check_mark,
    "easier": _easier,
    "gap": _gap,
    "faster": _faster,
    "above_chance": _above_chance,
    "right": _right,
    "untestable": lambda evidence, test: Finding(UNTESTABLE, test["untestable"]),
}


def _versus(evidence: Evidence, names: Sequence[str]) -> str:
    return " minus ".join(map(evidence.title, names))
