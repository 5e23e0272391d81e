"""Depth on demand: accuracy and depth by need, of separately trained depths and of models that halt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaponder.methods import method_class
from experiments.claims import title_of
from experiments.judging import Judge, shown
from experiments.statistics import estimate, within
from experiments.tables import NONE, markdown, prose

CLAIM, MEASURE = "hops", "demand"
# Other forms of the puzzle, whose tables stand below.
OTHERS = ("hops-ends", "hops-capitals")
# A need counts as solved from this share of right answers on. This and the three aims were fixed beforehand.
SOLVED = 0.95
_RHO, _POINT, _SPARE = 0.9, 0.01, 0.25


@dataclass(frozen=True)
class Subject:
    """One model of the claim and what was measured on it (see :class:`adaponder.analysis.demand.Demand`)."""

    title: str
    seed: int
    iterations: int
    halts: bool
    made: Mapping[str, Any]

    @property
    def full(self) -> Sequence[float]:
        """Returns accuracy by need with every token read K times."""
        return self.made["at_depth"][str(self.iterations)]

    @property
    def by_depth(self) -> Sequence[Sequence[int]]:
        return self.made["by_depth"]


def subjects(judge: Judge, claim: str = CLAIM) -> list[Subject]:
    """Returns every measured model of the claim, in the order of the queue."""
    found = []
    for each in dict.fromkeys(judge.evidence.queue.of_claim(claim)):
        made = judge.evidence.measured(each.setting, MEASURE).get(each.seed)
        if made is not None:
            model = each.resolved().model
            halts = method_class(model.method).halts
            title = title_of(judge.claims, judge.evidence, each.setting)
            found.append(Subject(title, each.seed, model.iterations, halts, made))
    return found


def fixed_depths(found: Sequence[Subject]) -> dict[int, list[float]]:
    """Returns accuracy by need for each separately trained K: the seed mean of the best method at that need."""
    best: dict[int, list[float]] = {}
    for seeds in _settings([each for each in found if not each.halts]):
        k, means = seeds[0].iterations, _means(each.full for each in seeds)
        best[k] = [max(pair) for pair in zip(means, best.get(k, means), strict=True)]
    return dict(sorted(best.items()))


def needed_depths(found: Sequence[Subject]) -> list[int | None]:
    """Returns the smallest separately trained K that solves each need."""
    fixed = fixed_depths(found)
    needs = range(len(found[0].made["needs"])) if found else range(0)
    return [next((k for k in sorted(fixed) if fixed[k][i] >= SOLVED), None) for i in needs]


def rank_correlation(by_depth: Sequence[Sequence[int]], needed: Sequence[int | None]) -> float | None:
    """Returns Spearman's correlation of needed depth and depth over questions; ``None`` without spread."""
    cells = [
        (need, depth, count)
        for need, counts in zip(needed, by_depth, strict=True)
        for depth, count in enumerate(counts, 1)
        if need is not None and count
    ]
    total = sum(count for _, _, count in cells)
    ranks = [_mean_ranks(cells, place) for place in (0, 1)]
    middle = (total + 1) / 2
    moments = [0.0, 0.0, 0.0]
    for need, depth, count in cells:
        x, y = ranks[0][need] - middle, ranks[1][depth] - middle
        moments = [moments[0] + count * x * x, moments[1] + count * y * y, moments[2] + count * x * y]
    spread = math.sqrt(moments[0] * moments[1])
    return moments[2] / spread if spread else None


def _mean_ranks(cells: Sequence[tuple[int, int, int]], place: int) -> dict[int, float]:
    """Returns the mean rank of each value at index ``place`` of the cells; their last entry counts questions."""
    counts: dict[int, int] = {}
    for cell in cells:
        counts[cell[place]] = counts.get(cell[place], 0) + cell[2]
    before, found = 0, {}
    for value in sorted(counts):
        found[value] = before + (counts[value] + 1) / 2
        before += counts[value]
    return found


@dataclass(frozen=True)
class Aims:
    """Measures of a model that halts: rank correlation, accuracy lost to full depth, iterations over need."""

    rho: float | None
    lost: float
    spare: float | None


def aims(subject: Subject, needed: Sequence[int | None]) -> Aims:
    """Computes a model's measures over all questions; iterations over need only where the needed depth is known."""
    made = subject.made
    total = sum(made["questions"])

    def mean(values: Sequence[float]) -> float:
        return sum(count * value for count, value in zip(made["questions"], values, strict=True)) / total

    known = [
        (count, depth - need)
        for count, depth, need in zip(made["questions"], made["depth"], needed, strict=True)
        if need is not None
    ]
    spare = sum(count * over for count, over in known) / sum(count for count, _ in known) if known else None
    lost = mean(subject.full) - mean(made["accuracy"])
    return Aims(rank_correlation(subject.by_depth, needed), lost, spare)


def section(judge: Judge, command: str) -> list[str]:
    """Returns the section of the tables' page; empty where nothing was measured."""
    tables = _tables(subjects(judge))
    others = {claim: made for claim in OTHERS if (made := _tables(subjects(judge, claim)))}
    if not tables and not others:
        return []
    lines = [
        "## Depth on demand: puzzles whose needed depth is known",
        "",
        *prose(
            f"`{command}`. A letter leads to another, that one to the next, until one leads nowhere; a question names",
            "the first and wants the last, and nothing says how many hops there are. Two layers, d 128; share of right",
            "answers to questions that were held out. The *needed depth* of a number of hops is the least K of",
            f"separately trained models (of any method) that answers {SOLVED:.0%} of its questions.",
            "The last question of a document is left out: one end is left that has not been answered as often as it",
            "is written, so the answer can be told without a hop.",
        ),
        "",
        *(tables or ["Not run yet."]),
    ]
    for claim, made in others.items():
        says = judge.evidence.queue.claims[claim]
        lines += ["", f"**{says}** `{command.replace(CLAIM, claim)}`", "", *made]
    return lines


def _tables(found: Sequence[Subject]) -> list[str]:
    """Returns the tables of fixed depths and of models that halt, with verdicts; empty without fixed depths."""
    fixed, halting = [each for each in found if not each.halts], [each for each in found if each.halts]
    if not fixed:
        return []
    needs, needed = fixed[0].made["needs"], needed_depths(found)
    lines = markdown(
        ["every token read K times", "seed", *(f"{need} hop{'s' if need > 1 else ''}" for need in needs)],
        [[each.title, str(each.seed), *(_percent(share) for share in each.full)] for each in fixed]
        + [["**needed depth**", "", *(NONE if depth is None else f"**{depth}**" for depth in needed)]],
    )
    if halting:
        lines += ["", *_halting(halting, needs, needed), "", *_verdicts(fixed, halting, needed)]
    return lines


def _halting(halting: Sequence[Subject], needs: Sequence[int], needed: Sequence[int | None]) -> list[str]:
    head = ["models that halt", "seed", *(f"{need} hop{'s' if need > 1 else ''}" for need in needs)]
    head += ["rank correlation", "accuracy lost to full depth", "iterations over need"]
    rows = []
    for each in halting:
        cells = [
            f"{_percent(share)} at {depth:.2f}"
            for share, depth in zip(each.made["accuracy"], each.made["depth"], strict=True)
        ]
        reached = aims(each, needed)
        cells += [NONE if reached.rho is None else f"{reached.rho:.3f}", f"{100 * reached.lost:+.1f} points"]
        rows.append([each.title, str(each.seed), *cells, NONE if reached.spare is None else f"{reached.spare:+.2f}"])
    return markdown(head, rows)


def _verdicts(fixed: Sequence[Subject], halting: Sequence[Subject], needed: Sequence[int | None]) -> list[str]:
    by_depth = fixed_depths(fixed)
    least, most = min(by_depth), max(by_depth)
    hard = [
        f"{need} hop{'s' if need > 1 else ''} {_percent(low)} against {_percent(high)}"
        for need, low, high in zip(fixed[0].made["needs"], by_depth[least], by_depth[most], strict=True)
        if low < SOLVED <= high
    ]
    lines = [f"- K = {least} fails where K = {most} succeeds: {', '.join(hard) if hard else 'nowhere'}."]
    settings = _settings(halting)
    solved = [seeds for seeds in settings if min(_means(each.full for each in seeds)) >= SOLVED]
    if not solved:
        return [*lines, "- Depth follows need: no model that halts solves them."]
    seeds = max(solved, key=lambda seeds: statistics.fmean(_followed(each, needed) for each in seeds))
    rho = estimate({each.seed: _followed(each, needed) for each in seeds})
    lost = estimate({each.seed: aims(each, needed).lost for each in seeds})
    spare = estimate({each.seed: over for each in seeds if (over := aims(each, needed).spare) is not None})
    said = {
        f"rank correlation with the needed depth {shown(rho, digits=3)}, aim {_RHO}": within(rho, _RHO, math.inf),
        f"accuracy lost to full depth {shown(lost, percent=True)}, aim {_POINT:.0%}": within(lost, -math.inf, _POINT),
        f"iterations over need {shown(spare, digits=2)}, aim {_SPARE}": within(spare, -math.inf, _SPARE),
    }
    chosen = f"{seeds[0].title}: the best of {len(settings)} settings that halt, by mean rank correlation"
    return [*lines, f"- {chosen}. Over its seeds:", *(f"    - {what}: **{verdict}**" for what, verdict in said.items())]


def _settings(found: Sequence[Subject]) -> list[list[Subject]]:
    """Groups models by setting, so that all seeds of one are together."""
    by_title: dict[str, list[Subject]] = {}
    for each in found:
        by_title.setdefault(each.title, []).append(each)
    return list(by_title.values())


def _means(rows: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def _followed(subject: Subject, needed: Sequence[int | None]) -> float:
    """Returns the rank correlation of depth and need; 0 where all tokens have one depth."""
    return aims(subject, needed).rho or 0.0


def best_of(halting: Sequence[Subject], needed: Sequence[int | None]) -> Subject | None:
    """Returns the run with the best rank correlation among those that solve every need at full depth."""
    solved = (each for each in halting if min(each.full) >= SOLVED)
    return max(solved, key=lambda each: _followed(each, needed), default=None)


def figure_points(judge: Judge) -> tuple[Any, ...]:
    """Returns the figure's points: accuracy by need of each fixed depth and of the best model that halts."""
    found = subjects(judge)
    needed = needed_depths(found)
    best = best_of([each for each in found if each.halts], needed)
    fixed = fixed_depths(found)
    if best is None or not fixed:
        return ()
    made = best.made
    return made["needs"], fixed, f"{best.title}, seed {best.seed}", made["accuracy"], made["by_depth"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
