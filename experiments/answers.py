"""Questions to the paper, answered by the records or by "not run yet"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.claims import Question
from experiments.evidence import costs
from experiments.judging import Judge, shown
from experiments.statistics import NOT_RUN, paired
from experiments.tables import four_numbers, learning_rates, markdown, prose, spread_of_seeds


def answers(judge: Judge) -> list[str]:
    """Returns every question with its answer."""
    lines: list[str] = []
    for each in judge.claims.questions:
        lines += ["", f"**{each.asks}**", ""]
        if each.answer:
            lines += [*prose(each.answer), ""]
        if each.show is not None:
            lines += SHOWN[each.show](judge) or [f"{NOT_RUN.capitalize()}."]
        lines += _tested(judge, each)
    return lines


def _tested(judge: Judge, question: Question) -> list[str]:
    findings = [judge.find(test) for test in question.tests]
    if findings and all(finding.verdict == NOT_RUN for finding in findings):
        return [f"Here: {NOT_RUN}."]
    return [f"- {finding.words}: **{finding.verdict}**" for finding in findings]


def _four(judge: Judge) -> list[str]:
    *halting, base = judge.claims.rows["savings"]
    table = four_numbers(judge, halting, base)
    words = f"Saved are iterations and FLOPs of {judge.title(base)}; the gates' own FLOPs count."
    return [*table, "", words] if table else []


def _true_cost(judge: Judge) -> list[str]:
    rows = []
    for alias in judge.claims.rows["true-cost"]:
        recipe = judge.evidence.settings[judge.claims.runs[alias]].resolved()
        iterations = recipe.model.iterations or 1
        cost = costs(recipe, [0.0] * (iterations - 1) + [1.0])
        rows.append([judge.title(alias), f"{iterations}x", f"{cost.ratio:.2f}x", f"{cost.training:.1f}"])
    words = prose(
        "No. Iterations are equal; but an expectation over the vocabulary costs two heads, and attention",
        "over pauses four",
        "times the keys. At this size, by formula:",
    )
    return [*words, "", *markdown(["every token at full depth", "iterations", "FLOPs", "training PFLOP"], rows)]


def _resolution(judge: Judge) -> list[str]:
    table, smallest = spread_of_seeds(judge, judge.claims.rows["seeds"])
    if not table:
        return []
    words = "Three paired seeds tell apart, half of the time or more, what exceeds the last column"
    effect = 0.003
    said = (
        "so an effect of 0.003 cannot be told from chance here"
        if smallest > effect
        else "so an effect of 0.003 can be seen"
    )
    return [*table, "", f"{words}, {smallest:.4f} at the least: {said}."]


def _tuning(judge: Judge) -> list[str]:
    plain, second = judge.claims.rows["curve"][:2]
    lines = []
    for title, tried in learning_rates(judge)[1].items():
        first = {rate: points[0].loss for rate, points in tried.items() if 0 in points}
        if 0.001 in first and len(first) > 1:
            worth = first[0.001] - min(first.values())
            lines.append(f"- {title}: the best rate is worth {worth:.3f} over 0.001 (seed 0)")
    scaled = paired(judge.values(plain), judge.values("vanilla-unscaled"))
    iterated = paired(judge.values(second), judge.values(plain))
    if scaled is not None:
        lines.append(f"- embedding scale 16 instead of 1, {judge.title(plain)} at 0.004: {shown(scaled)}")
    if iterated is not None:
        lines.append(f"- a second iteration, both tuned: {shown(iterated)}")
    return lines


SHOWN: Mapping[str, Callable[[Judge], list[str]]] = {
    "four-numbers": _four,
    "true-cost": _true_cost,
    "resolution": _resolution,
    "tuning": _tuning,
}
