"""Writes the results page, its tables and figures and README's table from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaponder.errors import InputError
from adaponder.files import read_json, write_whole
from adaponder.terminal import console, line
from experiments import demand
from experiments.evidence import Evidence
from experiments.judging import Judge, read_judge
from experiments.page import BEGIN, END, readme_part, results_page, tables_page
from experiments.queue import Queue
from experiments.tables import learning_rates

LEARNING_RATE, FRONTIER = "loss-by-learning-rate", "loss-against-iterations"
STEPS, POLICIES, DEMAND = "loss-by-halting-step", "policies-at-equal-depth", "depth-on-demand"
CAPTIONS = {
    LEARNING_RATE: "Validation loss by learning rate, seed 0; the best rate of each method is ringed.",
    FRONTIER: "Loss minus the plain model's of the same seed, against mean iterations and against true FLOPs: "
    "separately trained depths (line, grey every seed), models that halt, and their checkpoints turned by the dial "
    "(dotted; what leaves the figure rises further, see the table).",
    STEPS: "Mean loss by the step that AdaPonder's tokens halted at: as it came out, and of the same tokens with every "
    "token at depth 1 and at full depth.",
    POLICIES: "Loss of each policy minus the learned gate's, on AdaPonder's checkpoints, at equal realised depth: a "
    "point per seed, a bar at the mean.",
    DEMAND: "Left: share of right answers by the hops that a question needs, of models that read every token K times "
    "and of the run that halts with the best rank correlation. Right: how often that one reads the token that answers, "
    "in % of the questions.",
}


def write(queue: Queue, records: Sequence[Mapping[str, Any]], experiments: Path) -> None:
    """Writes ``tables.md`` in the folder ``experiments``, and beside it ``docs`` and ``README.md``."""
    from experiments import figures

    root = experiments.parent
    judge = judge_of(queue, records, experiments)
    page, readme = page_of(judge), readme_of(judge, (root / "README.md").read_text())
    points = figure_points(judge)
    draw = {LEARNING_RATE: figures.learning_rates, FRONTIER: figures.frontier}
    draw |= {STEPS: figures.steps, POLICIES: figures.policies, DEMAND: figures.demand}
    for name, shown in points.items():
        figures.save(draw[name](*shown), root / "docs" / "figures" / f"{name}.png", shown)
    write_whole(root / "docs" / "results.md", page.encode())
    write_whole(experiments / "tables.md", tables_of(judge, experiments).encode())
    write_whole(root / "README.md", readme.encode())
    console.print(line("→ ", (root / "docs" / "results.md", "bold"), f", {len(points)} figures, and README's table"))


def judge_of(queue: Queue, records: Sequence[Mapping[str, Any]], experiments: Path) -> Judge:
    """Builds the judge of the claims in the folder ``experiments``."""
    return read_judge(experiments / "claims.yaml", Evidence(queue, records))


def page_of(judge: Judge) -> str:
    """Returns the text of ``docs/results.md``."""
    return results_page(judge, figures={name: CAPTIONS[name] for name in figure_points(judge)})


def tables_of(judge: Judge, experiments: Path) -> str:
    """Returns the text of ``experiments/tables.md``."""
    return tables_page(judge, others=_apart(judge, experiments / "records"))


def readme_of(judge: Judge, readme: str) -> str:
    """Returns README with its results table replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"README.md: the lines {BEGIN} and {END} mark where its table goes; one of them is missing")
    return before + readme_part(judge) + after


def _apart(judge: Judge, folder: Path) -> dict[str, str]:
    """Returns why each record that belongs to no run of the queue is not compared."""
    known = {record["file"]: record for record in judge.evidence.records}
    hashes = {corpus.hash for corpus in judge.evidence.queue.corpora.values()}
    why = {}
    for path in sorted(folder.glob("*.json")):
        if path.name in judge.evidence.used:
            continue
        if path.name not in known:
            named = read_json(path, InputError).get("data")
            why[path.name] = "from before there was a queue" if isinstance(named, str) else "no single run of the queue"
        elif known[path.name]["data"] not in hashes:
            why[path.name] = f"other data: hash `{known[path.name]['data']}`"
        else:
            why[path.name] = "the queue has no such run"
    return why


# --- what figures show ----------------------------------------------------------------------------------------------


def figure_points(judge: Judge) -> dict[str, Any]:
    """Returns the points of each figure by name; figures without measurements are left out."""
    points = {LEARNING_RATE: (_learning_rate_points(judge),), FRONTIER: _frontier_points(judge)}
    points |= {STEPS: _step_points(judge)} if judge.measured(_ANALYSED, "steps") else {}
    points |= {POLICIES: (gaps,)} if (gaps := _policy_points(judge)) else {}
    return points | ({DEMAND: shown} if (shown := demand.figure_points(judge)) else {})


# The run whose traces and policies are drawn.
_ANALYSED = "ada"
_WAYS = {"nll": "as it came out", "nll_at_depth_1": "every token at depth 1", "nll_at_full_depth": "at full depth"}


def _step_points(judge: Judge) -> Any:
    from experiments.figures import Curve

    by_seed = judge.measured(_ANALYSED, "steps")
    count = len(next(iter(by_seed.values()))["tokens"])
    lines = []
    for way, name in _WAYS.items():
        at = {
            i + 1: {seed: made[way][i] for seed, made in by_seed.items() if made[way][i] is not None}
            for i in range(count)
        }
        lines.append(Curve(name, {step: values for step, values in at.items() if values}))
    total = sum(sum(made["tokens"]) for made in by_seed.values())
    shares = {i + 1: sum(made["tokens"][i] for made in by_seed.values()) / total for i in range(count)}
    return lines, shares


def _policy_points(judge: Judge) -> dict[str, dict[int, float]]:
    """Gaps to the learned gate by policy and seed."""
    gaps: dict[str, dict[int, float]] = {}
    for seed, made in sorted(judge.measured(_ANALYSED, "policies").items()):
        learned = made["compared"]["learned gate"]["loss"]
        for name, each in made["compared"].items():
            if each["loss"] is not None and learned is not None and name != "learned gate" and "oracle" not in name:
                gaps.setdefault(name, {})[seed] = each["loss"] - learned
    return gaps


def _learning_rate_points(judge: Judge) -> Any:
    from experiments.figures import Curve

    curves = []
    for title, tried in learning_rates(judge)[1].items():
        points = {rate: {0: found[0].loss} for rate, found in sorted(tried.items()) if 0 in found}
        if points:
            curves.append(Curve(title, points))
    return curves


def _frontier_points(judge: Judge) -> Any:
    from experiments.figures import Group, Spot

    rows = judge.claims.rows
    plain = judge.values(rows["curve"][0])

    def group(alias: str) -> Group | None:
        points = judge.evidence.points(judge.claims.runs[alias])
        spots = [
            Spot(seed, p.depth, p.ratio, p.loss - plain[seed]) for seed, p in sorted(points.items()) if seed in plain
        ]
        return Group(judge.title(alias), spots) if spots else None

    curve = [found for alias in rows["curve"] if (found := group(alias))]
    others = [found for alias in rows["frontier"] if (found := group(alias))]
    dials = [found for alias in rows["dials"] for found in _dials(judge, alias, plain)]
    return curve, others, dials


def _dials(judge: Judge, alias: str, plain: Mapping[int, float]) -> list[Any]:
    """Checkpoints turned to several depths by the dial, one group per seed."""
    from experiments.figures import Group, Spot

    found = []
    for seed, turned in judge.evidence.dialled(judge.claims.runs[alias]).items():
        if seed in plain:
            spots = [Spot(seed, depth, ratio, loss - plain[seed]) for depth, ratio, loss in turned]
            found.append(Group(judge.title(alias), spots))
    return found
