"""Depth on demand: accuracy and depth by need, of separately trained depths and of models that halt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from adaponder.methods import method_class
from experiments.evidence import Evidence
from experiments.judging import NONE, shown
from experiments.statistics import estimate, within
from experiments.tables import markdown

CLAIM, MEASURE = "hops", "demand"
# Other forms of the puzzle, whose tables follow.
OTHERS = ("hops-ends", "hops-capitals")
# A need counts as solved from this share of right answers on. This and the three aims were fixed beforehand.
SOLVED = 0.95
_RHO, _POINT, _SPARE = 0.9, 0.01, 0.25
Needed = Sequence[int | None]


class Subject(NamedTuple):
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


def subjects(evidence: Evidence, claim: str = CLAIM) -> list[Subject]:
    """Returns every measured model of the claim, in the order of the queue."""
    found = []
    for run in dict.fromkeys(evidence.queue.of_claim(claim)):
        if (made := evidence.measured(run.setting, MEASURE).get(run.seed)) is not None:
            model = run.shaped.model
            halts = method_class(model.method).halts
            found.append(Subject(evidence.title(run.setting), run.seed, model.iterations, halts, made))
    return found


def fixed_depths(models: Sequence[Subject]) -> dict[int, list[float]]:
    """Returns accuracy by need for each separately trained K: the seed mean of the best method at that need."""
    best: dict[int, list[float]] = {}
    for seeds in _settings([model for model in models if not model.halts]):
        k, means = seeds[0].iterations, _means(model.full for model in seeds)
        best[k] = [max(pair) for pair in zip(means, best.get(k, means), strict=True)]
    return dict(sorted(best.items()))


def needed_depths(models: Sequence[Subject]) -> list[int | None]:
    """Returns the smallest separately trained K that solves each need."""
    fixed = fixed_depths(models)
    needs = range(len(models[0].made["needs"]) if models else 0)
    return [next((k for k in fixed if fixed[k][i] >= SOLVED), None) for i in needs]


def rank_correlation(by_depth: Sequence[Sequence[int]], needed: Needed) -> float | None:
    """Returns Spearman's correlation of needed depth and depth over questions; ``None`` without spread."""
    cells = [
        (need, depth, count)
        for need, counts in zip(needed, by_depth, strict=True)
        for depth, count in enumerate(counts, 1)
        if need is not None
    ]
    questions = np.repeat([cell[:2] for cell in cells], [cell[2] for cell in cells], axis=0) if cells else []
    ranks = pd.DataFrame(questions, columns=["need", "depth"]).rank()
    return float(ranks["need"].corr(ranks["depth"])) if (ranks.nunique() > 1).all() else None


class Aims(NamedTuple):
    """Measures of a model that halts: rank correlation, accuracy lost to full depth, iterations over need."""

    rho: float | None
    lost: float
    spare: float | None


def aims(model: Subject, needed: Needed) -> Aims:
    """Computes a model's measures over all questions; iterations over need only where the needed depth is known."""
    made = model.made
    lost = np.average(model.full, weights=made["questions"]) - np.average(made["accuracy"], weights=made["questions"])
    known = [i for i, need in enumerate(needed) if need is not None]
    spare = None
    if known:
        over = [made["depth"][i] - (needed[i] or 0) for i in known]
        spare = float(np.average(over, weights=[made["questions"][i] for i in known]))
    return Aims(rank_correlation(made["by_depth"], needed), float(lost), spare)


def followed(model: Subject, needed: Needed) -> float:
    """Returns the rank correlation of depth and need; 0 where all tokens have one depth."""
    return rank_correlation(model.made["by_depth"], needed) or 0.0


def best_of(halting: Sequence[Subject], needed: Needed) -> Subject | None:
    """Returns the run with the best rank correlation among those that solve every need at full depth."""
    solved = (model for model in halting if min(model.full) >= SOLVED)
    return max(solved, key=lambda model: followed(model, needed), default=None)


def section(evidence: Evidence, command: str) -> list[str]:
    """Returns the tables of the puzzles and of their other forms."""
    lines = tables(subjects(evidence)) or ["Not run yet."]
    for claim in OTHERS:
        if other := tables(subjects(evidence, claim)):
            lines += ["", f"**{evidence.queue.claims[claim]}** `{command.replace(CLAIM, claim)}`", "", *other]
    return lines


def tables(models: Sequence[Subject]) -> list[str]:
    """Returns the tables of fixed depths and of models that halt, with verdicts; empty without fixed depths."""
    fixed, halting = [model for model in models if not model.halts], [model for model in models if model.halts]
    if not fixed:
        return []
    needed, needs = needed_depths(models), [_hops(need) for need in fixed[0].made["needs"]]
    rows = [[model.title, str(model.seed), *map(_percent, model.full)] for model in fixed]
    rows.append(["**needed depth**", "", *(NONE if depth is None else f"**{depth}**" for depth in needed)])
    lines = markdown(["every token read K times", "seed", *needs], rows)
    if not halting:
        return lines
    rows = []
    for model in halting:
        pairs = zip(model.made["accuracy"], model.made["depth"], strict=True)
        rho, lost, spare = aims(model, needed)
        cells = [
            *(f"{_percent(share)} at {depth:.2f}" for share, depth in pairs),
            NONE if rho is None else f"{rho:.3f}",
        ]
        cells += [f"{100 * lost:+.1f} points", NONE if spare is None else f"{spare:+.2f}"]
        rows.append([model.title, str(model.seed), *cells])
    head = ["models that halt", "seed", *needs]
    head += ["rank correlation", "accuracy lost to full depth", "iterations over need"]
    return [*lines, "", *markdown(head, rows), "", *_verdicts(fixed, halting, needed)]


def _verdicts(fixed: Sequence[Subject], halting: Sequence[Subject], needed: Needed) -> list[str]:
    by_depth = fixed_depths(fixed)
    least, most = min(by_depth), max(by_depth)
    hard = [
        f"{_hops(need)} {_percent(low)} against {_percent(high)}"
        for need, low, high in zip(fixed[0].made["needs"], by_depth[least], by_depth[most], strict=True)
        if low < SOLVED <= high
    ]
    lines = [f"- K = {least} fails where K = {most} succeeds: {', '.join(hard) if hard else 'nowhere'}."]
    settings = _settings(halting)
    solved = [seeds for seeds in settings if min(_means(model.full for model in seeds)) >= SOLVED]
    if not solved:
        return [*lines, "- Depth follows need: no model that halts solves them."]
    seeds = max(solved, key=lambda seeds: statistics.fmean(followed(model, needed) for model in seeds))
    measures = {model.seed: aims(model, needed) for model in seeds}
    rho = estimate({seed: made.rho or 0.0 for seed, made in measures.items()})
    lost = estimate({seed: made.lost for seed, made in measures.items()})
    spare = estimate({seed: made.spare for seed, made in measures.items() if made.spare is not None})
    verdicts = {
        f"rank correlation with the needed depth {shown(rho, digits=3)}, aim {_RHO}": within(rho, _RHO, math.inf),
        f"accuracy lost to full depth {shown(lost, percent=True)}, aim {_POINT:.0%}": within(lost, -math.inf, _POINT),
        f"iterations over need {shown(spare, digits=2)}, aim {_SPARE}": within(spare, -math.inf, _SPARE),
    }
    chosen = f"{seeds[0].title}: the best of {len(settings)} settings that halt, by mean rank correlation"
    return [*lines, f"- {chosen}. Over its seeds:", *(f"    - {what}: **{said}**" for what, said in verdicts.items())]


def figure_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the figure's points: accuracy by need of each fixed depth and of the best model that halts."""
    models = subjects(evidence)
    best = best_of([model for model in models if model.halts], needed_depths(models))
    fixed = fixed_depths(models)
    if best is None or not fixed:
        return ()
    made = best.made
    return made["needs"], fixed, f"{best.title}, seed {best.seed}", made["accuracy"], made["by_depth"]


def _settings(models: Sequence[Subject]) -> list[list[Subject]]:
    """Groups models by setting, so that all seeds of one are together."""
    return [[model for model in models if model.title == title] for title in dict.fromkeys(m.title for m in models)]


def _means(rows: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def _hops(need: int) -> str:
    return f"{need} hop{'s' if need > 1 else ''}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
