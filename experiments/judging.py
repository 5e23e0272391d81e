"""Judges the claims by the records: one function for every kind of test in ``experiments/claims.yaml``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from adaponder.errors import InputError
from experiments import statistics
from experiments.claims import Claims, Test, read_claims, title_of
from experiments.evidence import Evidence
from experiments.statistics import Estimate, estimate, paired


class Finding(NamedTuple):
    """The result of a test: its verdict, and its numbers as text."""

    verdict: str
    words: str


@dataclass(frozen=True)
class Judge:
    """Tests claims by evidence."""

    claims: Claims
    evidence: Evidence

    def verdict(self, tests: Sequence[Test]) -> tuple[str, list[Finding]]:
        """Returns the verdict on all tests together, and each test's finding."""
        findings = [self.find(test) for test in tests]
        return statistics.all_of([each.verdict for each in findings]), findings

    def find(self, test: Test) -> Finding:
        """Runs one test."""
        return KINDS[_kind(test)](self, test)

    def title(self, alias: str) -> str:
        return title_of(self.claims, self.evidence, alias)

    def values(self, alias: str, of: str = "loss") -> dict[int, float]:
        return self.evidence.values(self.claims.runs[alias], of)

    def measured(self, alias: str, name: str) -> dict[int, Mapping[str, Any]]:
        return self.evidence.measured(self.claims.runs[alias], name)


def read_judge(path: Path, evidence: Evidence) -> Judge:
    """Reads the claims in a YAML file; raises for a test of an unknown kind."""
    claims = read_claims(path)
    runs = {alias: evidence.best(names) if isinstance(names, list) else names for alias, names in claims.runs.items()}
    judge = Judge(replace(claims, runs=runs), evidence)
    for each in (*judge.claims.statements, *judge.claims.questions):
        for test in each.tests:
            try:
                _kind(test)
            except (TypeError, ValueError) as error:
                raise InputError(f"{path}: {error}; see experiments/claims.yaml") from None
    return judge


def shown(value: Estimate | None, *, digits: int = 4, percent: bool = False) -> str:
    """Formats a difference with its interval and seeds."""
    if value is None:
        return "–"

    def number(x: float) -> str:
        return f"{100 * x:+.1f} %" if percent else f"{x:+.{digits}f}"

    seeds = ", ".join(map(str, value.values))
    if math.isinf(value.low):
        return f"{number(value.mean)} (seed {seeds} alone)"
    return f"{number(value.mean)} [{number(value.low)}, {number(value.high)}] (seeds {seeds})"


# --- kinds of tests -------------------------------------------------------------------------------------------------


def _lower(judge: Judge, test: Test) -> Finding:
    first, second = test["lower"]
    of = test.get("of", "loss")
    difference = paired(judge.values(first, of), judge.values(second, of))
    what = "" if of == "loss" else f" in {_NAMES[of]}"
    return Finding(statistics.lower(difference), f"{_versus(judge, first, second)}{what}: {shown(difference)}")


def _equal(judge: Judge, test: Test) -> Finding:
    first, second = test["equal"]
    difference = paired(judge.values(first), judge.values(second))
    return Finding(statistics.equal(difference), f"{_versus(judge, first, second)}: {shown(difference)}")


def _steadier(judge: Judge, test: Test) -> Finding:
    """Tests whether reruns of the first runs differ at most half as much as those of the second (root mean square)."""
    differences = [
        judge.evidence.rerun_differences([judge.claims.runs[alias] for alias in aliases], weights)
        for aliases, weights in zip(test["steadier"], (test.get("weights", "final"), "final"), strict=True)
    ]
    if any(len(found) < len(aliases) for found, aliases in zip(differences, test["steadier"], strict=True)):
        return Finding(statistics.NOT_RUN, "–")
    first, second = (math.sqrt(sum(value**2 for value in found) / len(found)) for found in differences)
    words = f"reruns differ by {first:.4f}, against {second:.4f} ({len(differences[0])} pairs each)"
    return Finding(statistics.HOLDS if first <= second / 2 else statistics.FAILS, words)


def _saved(judge: Judge, test: Test) -> Finding:
    first, second = test["saved"]
    of = test.get("of", "depth")
    less, more = judge.values(first, of), judge.values(second, of)
    saved = estimate({seed: 1 - less[seed] / more[seed] for seed in sorted(less.keys() & more.keys())})
    verdict = statistics.within(saved, test["low"], test["high"])
    return Finding(verdict, f"{_NAMES[of]} saved: {shown(saved, percent=True)}")


def _below_curve(judge: Judge, test: Test) -> Finding:
    alias, of = test["below_curve"], test.get("of", "depth")
    curve, name = _curve(judge, test)
    over = estimate(judge.evidence.over_curve(judge.claims.runs[alias], curve, of))
    words = f"{judge.title(alias)} minus {name} at equal {_NAMES[of]}: {shown(over)}"
    return Finding(statistics.lower(over), words)


def _dial_below_curve(judge: Judge, test: Test) -> Finding:
    alias, of, depth, by = test["dial_below_curve"], test.get("of", "depth"), test["depth"], test.get("by", 0.0)
    curve, name = _curve(judge, test)
    over = estimate(judge.evidence.dial_over_curve(judge.claims.runs[alias], curve, depth, of))
    aimed = None if over is None else estimate({seed: value + by for seed, value in over.values.items()})
    words = f"{judge.title(alias)} at {depth:g} minus {name} at equal {_NAMES[of]}: {shown(over)}"
    return Finding(statistics.lower(aimed), words)


def _curve(judge: Judge, test: Test) -> tuple[list[str], str]:
    """Returns the settings of the curve (``against``, or the default) and the curve's name."""
    aliases = test.get("against", judge.claims.rows["curve"])
    name = f"the lines between {'; '.join(map(judge.title, aliases))}," if "against" in test else "the curve"
    return [judge.claims.runs[each] for each in aliases], name


def _collapse(judge: Judge, test: Test) -> Finding:
    alias = test["collapse"]
    points = judge.evidence.points(judge.claims.runs[alias])
    cases = {seed: point.collapsed for seed, point in sorted(points.items())}
    depths = ", ".join(f"{points[seed].depth:.2f}" for seed in cases)
    seeds = "seed" if len(cases) == 1 else "seeds"
    low, high = statistics.exact_interval(sum(cases.values()), len(cases)) if cases else (0.0, 1.0)
    words = f"{judge.title(alias)}: {sum(cases.values())} of {len(cases)} {seeds}, exact interval of the share"
    words += f" [{low:.2f}, {high:.2f}] (mean depth {depths})"
    return Finding(statistics.often(cases), words if cases else "–")


def _same_order(judge: Judge, test: Test) -> Finding:
    """Tests whether runs that differ by more than ``by`` keep their order after half of the training.

    A pair counts for a verdict where both of its differences are told from 0.
    """
    by, kept, turned, seeds, verdicts = test["by"], 0, [], 3, []
    for (first, first_half), (second, second_half) in itertools.combinations(test["same_order"], 2):
        full = paired(judge.values(first), judge.values(second))
        half = paired(judge.values(first_half), judge.values(second_half))
        if full is None or half is None:
            return Finding(statistics.NOT_RUN, "–")
        seeds = min(seeds, len(full.values), len(half.values))
        if abs(full.mean) <= by:
            continue
        same = full.mean * half.mean > 0
        told = statistics.UNRESOLVED not in (statistics.lower(full), statistics.lower(half))
        verdicts.append((statistics.HOLDS if same else statistics.FAILS) if told else statistics.UNRESOLVED)
        if same:
            kept += 1
        else:
            turned.append(f"{first} minus {second} is {full.mean:+.4f}, after half of the steps {half.mean:+.4f}")
    words = f"{kept} of {kept + len(turned)} pairs that differ by more than {by:g} do so in the same direction"
    if seeds < 2:
        words = f"{words} (one seed)"
    verdict = statistics.all_of(verdicts) if verdicts else statistics.UNRESOLVED
    return Finding(verdict, "; ".join([f"{test['what']}: {words}", *turned]))


def _policy(judge: Judge, test: Test) -> Finding:
    first, second = test["policy"]
    found = {
        seed: [made["compared"].get(name, {}).get("loss") for name in (first, second)]
        for seed, made in judge.measured(test["run"], "policies").items()
    }
    known = {seed: a - b for seed, (a, b) in sorted(found.items()) if a is not None and b is not None}
    difference = estimate(known)
    return Finding(statistics.lower(difference), f"{first} minus {second}: {shown(difference)}")


def _check_mark(judge: Judge, test: Test) -> Finding:
    alias = test["check_mark"]
    by_seed = {seed: made["nll"] for seed, made in sorted(judge.measured(alias, "steps").items())}
    if not by_seed:
        return Finding(statistics.NOT_RUN, "–")
    # Without tokens that halt at every step there is no curve to have a shape.
    whole = {seed: losses for seed, losses in by_seed.items() if None not in losses}
    cases = {seed: min(losses) == losses[1] and max(losses) == losses[-1] for seed, losses in whole.items()}
    listed = "; ".join(
        f"seed {seed}: " + ", ".join("none" if loss is None else f"{loss:.2f}" for loss in losses)
        for seed, losses in by_seed.items()
    )
    seen = f"a check mark in {sum(cases.values())} of the {len(cases)} seeds in which tokens halt at every step"
    return Finding(statistics.often(cases) if cases else statistics.UNTESTABLE, f"loss by step, {listed} ({seen})")


def _easier(judge: Judge, test: Test) -> Finding:
    alias, at = test["easier"], test["at"]
    known = {}
    for seed, made in sorted(judge.measured(alias, "steps").items()):
        groups = list(zip(made["tokens"], made[at], strict=True))
        early = [(count, loss) for count, loss in groups[:-1] if loss is not None]
        if early and groups[-1][1] is not None:
            known[seed] = sum(count * loss for count, loss in early) / sum(count for count, _ in early) - groups[-1][1]
    difference = estimate(known)
    return Finding(
        statistics.lower(difference), f"halted early minus the rest, {_AT[at]}: {shown(difference, digits=2)}"
    )


def _gap(judge: Judge, test: Test) -> Finding:
    alias = test["gap"]
    gaps = estimate({seed: made["gap"] for seed, made in sorted(judge.measured(alias, "reuse").items())})
    verdict = statistics.lower(None if gaps is None else estimate({k: -v for k, v in gaps.values.items()}))
    return Finding(verdict, f"{judge.title(alias)}, skipping minus as trained: {shown(gaps)}")


def _faster(judge: Judge, test: Test) -> Finding:
    """Compares speeds, measured only where a run had the device to itself."""
    (first, second), at = test["faster"], test["at"]
    speeds = [
        {seed: made[at]["tokens_per_second"] for seed, made in judge.measured(alias, "speed").items()}
        for alias in (first, second)
    ]
    slower = estimate({seed: speeds[1][seed] / speeds[0][seed] - 1 for seed in sorted(speeds[0].keys() & speeds[1])})
    words = f"{at}, time of {judge.title(first)} over {judge.title(second)}, less one: {shown(slower, percent=True)}"
    return Finding(statistics.lower(slower), words)


def _above_chance(judge: Judge, test: Test) -> Finding:
    alias = test["above_chance"]
    made = judge.measured(alias, "tasks")
    if not made:
        runs = judge.evidence.runs(judge.claims.runs[alias])
        tried = [point.record.get("measured", {}).get("tasks") for points in runs.values() for point in points]
        why = next((each["missing"] for each in tried if each is not None), None)
        return Finding(statistics.NOT_RUN, "–" if why is None else f"could not be measured: {why}")
    scores = {seed: _downstream(each) for seed, each in sorted(made.items())}
    over = estimate({seed: score - chance for seed, (score, chance) in scores.items()})
    verdict = statistics.lower(None if over is None else estimate({k: -v for k, v in over.values.items()}))
    words = f"{judge.title(alias)}, mean accuracy minus guessing: {shown(over, percent=True)}"
    return Finding(statistics.UNTESTABLE if verdict == statistics.FAILS else verdict, words)


# What guessing reaches: one of four answers; a last word out of the whole vocabulary.
_CHANCE = {"hellaswag": 0.25, "arc_easy": 0.25, "sciq": 0.25, "lambada_openai": 0.0}


def _right(judge: Judge, test: Test) -> Finding:
    first, second = test["right"]
    scores = [{seed: _downstream(made)[0] for seed, made in judge.measured(a, "tasks").items()} for a in test["right"]]
    difference = paired(*scores)
    words = f"{_versus(judge, first, second)} in mean accuracy: {shown(difference, percent=True)}"
    if "within" in test:
        return Finding(statistics.equal(difference, test["within"]), words)
    verdict = statistics.lower(None if difference is None else paired(scores[1], scores[0]))
    return Finding(verdict, words)


def _downstream(measured: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (mean accuracy, mean chance level) over the sets."""
    scores = {each["task"]: each["metrics"]["acc"]["value"] for each in measured["tasks"]}
    return sum(scores.values()) / len(scores), sum(_CHANCE[name] for name in scores) / len(scores)


def _untestable(judge: Judge, test: Test) -> Finding:
    return Finding(statistics.UNTESTABLE, test["untestable"])


KINDS: Mapping[str, Callable[[Judge, Test], Finding]] = {
    "lower": _lower,
    "equal": _equal,
    "saved": _saved,
    "steadier": _steadier,
    "below_curve": _below_curve,
    "dial_below_curve": _dial_below_curve,
    "collapse": _collapse,
    "same_order": _same_order,
    "policy": _policy,
    "check_mark": _check_mark,
    "easier": _easier,
    "gap": _gap,
    "faster": _faster,
    "above_chance": _above_chance,
    "right": _right,
    "untestable": _untestable,
}
_NAMES = {"depth": "iterations", "mflops": "inference FLOPs", "training": "training FLOPs", "ratio": "FLOPs"}
_AT = {
    "nll": "as it came out",
    "nll_at_depth_1": "every token at depth 1",
    "nll_at_full_depth": "every token at full depth",
}


def _kind(test: Test) -> str:
    kinds = [kind for kind in KINDS if kind in test]
    if len(kinds) != 1:
        raise ValueError(f"{dict(test)}: a test has one of {', '.join(KINDS)}")
    return kinds[0]


def _versus(judge: Judge, first: str, second: str) -> str:
    return f"{judge.title(first)} minus {judge.title(second)}"
