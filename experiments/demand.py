"""Compares models of fixed depth and models that halt on puzzles, by the number of hops that a question takes.

The needed depth of n hops is the smallest K at which a model of fixed depth answers a share of at least ``SOLVED`` of
the questions of n hops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from adaponder.analysis.tables import spearman
from adaponder.methods import method_class
from adaponder.terminal import counted
from experiments.evidence import Evidence
from experiments.judging import NONE, shown
from experiments.statistics import estimate, within
from experiments.tables import markdown

CLAIM, MEASURE = "hops", "demand"
# The share of right answers from which n hops count as solved. This and the three aims were fixed before the runs.
SOLVED = 0.95
_RHO, _POINT, _SPARE = 0.9, 0.01, 0.25
Needed = Sequence[int | None]


class Subject(NamedTuple):
    """A trained model that a claim compares; ``result`` is its :class:`adaponder.analysis.demand.Demand` as a dict."""

    title: str
    seed: int
    iterations: int
    halts: bool
    result: Mapping[str, Any]

    @property
    def full(self) -> Sequence[float]:
        """Returns the accuracy by number of hops if no token halts before depth K."""
        return self.result["at_depth"][str(self.iterations)]


def subjects(evidence: Evidence) -> list[Subject]:
    """Returns the measured models of the claim ``hops``, in the order of the queue."""
    models = []
    for run in evidence.queue.of_claim(CLAIM):
        if (result := evidence.measured(run.setting, MEASURE).get(run.seed)) is not None:
            halts = method_class(run.shaped.model.method).halts
            models.append(Subject(evidence.title(run.setting), run.seed, run.shaped.model.iterations, halts, result))
    return models


def mean_accuracy(models: Iterable[Subject]) -> pd.DataFrame:
    """Returns the accuracy at full depth, averaged over seeds: a row per (K, title), a column per number of hops."""
    rows = {(model.iterations, model.title, model.seed): model.full for model in models}
    index = pd.MultiIndex.from_tuples(rows, names=["K", "title", "seed"])
    return pd.DataFrame([*rows.values()], index).groupby(["K", "title"], sort=False).agg("mean")


def fixed_depths(models: Sequence[Subject]) -> dict[int, list[float]]:
    """Returns ``{K: accuracy by number of hops}`` of models that do not halt, for each K the best over methods."""
    fixed = [model for model in models if not model.halts]
    return mean_accuracy(fixed).groupby(level=0).max().T.to_dict("list") if fixed else {}


def needed_depths(models: Sequence[Subject]) -> list[int | None]:
    """Returns the needed depth of each number of hops; ``None`` if no model of fixed depth reaches ``SOLVED``."""
    fixed = fixed_depths(models)
    needs = range(len(models[0].result["needs"]) if models else 0)
    return [next((k for k in fixed if fixed[k][i] >= SOLVED), None) for i in needs]


def rank_correlation(by_depth: Sequence[Sequence[int]], needed: Needed) -> float | None:
    """Returns Spearman's correlation of depth and needed depth over questions; ``None`` if either is constant."""
    rows = zip(needed, by_depth, strict=True)
    cells = [(need, depth, n) for need, counts in rows if need is not None for depth, n in enumerate(counts, 1)]
    return spearman(*np.array(cells).T) if cells else None


class DepthFit(NamedTuple):
    """Measures how well a model's depth follows the needed depth; the claim has a target for each number.

    Attributes:
        rho: rank correlation of depth and needed depth.
        lost: accuracy at full depth minus accuracy under the model's own policy.
        spare: mean depth minus needed depth.
    """

    rho: float | None
    lost: float
    spare: float | None


def depth_fit(model: Subject, needed: Needed) -> DepthFit:
    """Computes ``lost`` over all questions, ``rho`` and ``spare`` over those whose needed depth is known."""
    result, questions = model.result, model.result["questions"]
    lost = np.average(model.full, weights=questions) - np.average(result["accuracy"], weights=questions)
    excess = [(depth - need, n) for depth, need, n in zip(result["depth"], needed, questions, strict=True) if need]
    spare = float(np.average([depth for depth, _ in excess], weights=[n for _, n in excess])) if excess else None
    return DepthFit(rank_correlation(result["by_depth"], needed), float(lost), spare)


def tables(models: Sequence[Subject]) -> list[str]:
    """Returns a table of models of fixed depth and, if some models halt, their table and verdicts; [] if all halt."""
    fixed, halting = [model for model in models if not model.halts], [model for model in models if model.halts]
    if not fixed:
        return []
    needed, needs = needed_depths(models), [counted(need, "hop") for need in fixed[0].result["needs"]]
    rows = [[model.title, model.seed, *map(_percent, model.full)] for model in fixed]
    rows.append(["**needed depth**", "", *(NONE if depth is None else f"**{depth}**" for depth in needed)])
    lines = markdown(["every token read K times", "seed", *needs], rows)
    if not halting:
        return lines
    rows = []
    for model in halting:
        pairs = zip(model.result["accuracy"], model.result["depth"], strict=True)
        rho, lost, spare = depth_fit(model, needed)
        cells = [f"{_percent(share)} at {depth:.2f}" for share, depth in pairs]
        cells += [NONE if rho is None else f"{rho:.3f}", f"{100 * lost:+.1f} points"]
        rows.append([model.title, model.seed, *cells, NONE if spare is None else f"{spare:+.2f}"])
    measures = ["rank correlation", "accuracy lost to full depth", "iterations over need"]
    halting_table = markdown(["models that halt", "seed", *needs, *measures], rows)
    return [*lines, "", *halting_table, "", *_verdicts(models, halting, needed)]


def _verdicts(models: Sequence[Subject], halting: Sequence[Subject], needed: Needed) -> list[str]:
    by_depth = fixed_depths(models)
    least, most = min(by_depth), max(by_depth)
    hard = [
        f"{counted(need, 'hop')} {_percent(low)} against {_percent(high)}"
        for need, low, high in zip(models[0].result["needs"], by_depth[least], by_depth[most], strict=True)
        if low < SOLVED <= high
    ]
    lines = [f"- K = {least} fails where K = {most} succeeds: {', '.join(hard) if hard else 'nowhere'}."]
    accuracy = mean_accuracy(halting)
    solving = set(accuracy.index[accuracy.min(axis=1) >= SOLVED].get_level_values("title"))
    solved = [model for model in halting if model.title in solving]
    if not solved:
        return [*lines, "- Depth follows need: no model that halts solves them."]
    index = [[model.title for model in solved], [model.seed for model in solved]]
    measured = pd.DataFrame([depth_fit(model, needed) for model in solved], index, dtype=float).fillna({"rho": 0.0})
    title = measured.rho.groupby(level=0, sort=False).mean().idxmax()
    rho, lost, spare = (estimate(column) for _, column in measured.loc[title].items())
    verdicts = {
        f"rank correlation with the needed depth {shown(rho, digits=3)}, aim {_RHO}": within(rho, _RHO, math.inf),
        f"accuracy lost to full depth {shown(lost, percent=True)}, aim {_POINT:.0%}": within(lost, -math.inf, _POINT),
        f"iterations over need {shown(spare, digits=2)}, aim {_SPARE}": within(spare, -math.inf, _SPARE),
    }
    best = f"{title}: the best of {len(accuracy)} settings that halt, by mean rank correlation"
    judged = [f"    - {what}: **{verdict}**" for what, verdict in verdicts.items()]
    return [*lines, f"- {best}. Over its seeds:", *judged]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
