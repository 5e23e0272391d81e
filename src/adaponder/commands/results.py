"""adaponder reproduce --results: writes the results page, its figures and README's table from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaponder.errors import InputError
from adaponder.files import read_json, write_whole
from adaponder.reproduction.claims import Judge, read_claims
from adaponder.reproduction.evidence import Evidence
from adaponder.reproduction.page import BEGIN, END, readme_part, results_page
from adaponder.reproduction.queue import Queue
from adaponder.reproduction.tables import learning_rates
from adaponder.terminal import console, line

LEARNING_RATE, FRONTIER = "loss-by-learning-rate", "loss-against-iterations"
CAPTIONS = {
    LEARNING_RATE: "Validation loss by learning rate, seed 0; the best rate of each method is ringed.",
    FRONTIER: "Loss minus the plain model's of the same seed, against mean iterations and against true FLOPs: "
    "separately trained depths (line), and AdaPonder.",
}


def run(queue: Queue, records: Sequence[Mapping[str, Any]], experiments: Path) -> int:
    """Writes everything beside the folder ``experiments``: ``docs/results.md``, ``docs/figures``, ``README.md``."""
    from adaponder.analysis import results_figures as figures

    root = experiments.parent
    judge = judge_of(queue, records, experiments)
    page, readme = page_of(judge, experiments), readme_of(judge, (root / "README.md").read_text())
    points = figure_points(judge)
    drawings = {LEARNING_RATE: figures.learning_rates(points[LEARNING_RATE])}
    drawings[FRONTIER] = figures.frontier(*points[FRONTIER])
    for name, figure in drawings.items():
        figures.save(figure, root / "docs" / "figures" / f"{name}.png", points[name])
    write_whole(root / "docs" / "results.md", page.encode())
    write_whole(root / "README.md", readme.encode())
    console.print(line("→ ", (root / "docs" / "results.md", "bold"), f", {len(drawings)} figures, and README's table"))
    return 0


def judge_of(queue: Queue, records: Sequence[Mapping[str, Any]], experiments: Path) -> Judge:
    """The claims in the folder ``experiments`` and all that the records say about them."""
    return Judge(read_claims(experiments / "claims.yaml"), Evidence(queue, records))


def page_of(judge: Judge, experiments: Path) -> str:
    """The text of ``docs/results.md``."""
    return results_page(judge, figures=CAPTIONS, others=_apart(judge, experiments / "records"))


def readme_of(judge: Judge, readme: str) -> str:
    """README with its table of results made anew."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"README.md: the lines {BEGIN} and {END} mark where its table goes; one of them is missing")
    return before + readme_part(judge) + after


def _apart(judge: Judge, folder: Path) -> dict[str, str]:
    """Why each record of the folder that no run of the queue has is not compared."""
    known = {record["file"]: record for record in judge.evidence.records}
    hashes = {corpus.hash for corpus in judge.evidence.queue.corpora.values()}
    why = {}
    for path in sorted(folder.glob("*.json")):
        if path.name in judge.evidence.used:
            continue
        if path.name not in known:
            named = read_json(path, InputError).get("data")
            why[path.name] = "no single run of the queue" if named is None else "from before there was a queue"
        elif known[path.name]["data"] not in hashes:
            why[path.name] = f"other data: hash `{known[path.name]['data']}`"
        else:
            why[path.name] = "the queue has no such run"
    return why


# --- what figures show ----------------------------------------------------------------------------------------------


def figure_points(judge: Judge) -> dict[str, Any]:
    """What each figure shows, by its name."""
    return {LEARNING_RATE: _learning_rate_points(judge), FRONTIER: _frontier_points(judge)}


def _learning_rate_points(judge: Judge) -> Any:
    from adaponder.analysis.results_figures import Curve

    curves = []
    for title, tried in learning_rates(judge)[1].items():
        points = {rate: {0: found[0].loss} for rate, found in sorted(tried.items()) if 0 in found}
        if points:
            curves.append(Curve(title, points))
    return curves


def _frontier_points(judge: Judge) -> Any:
    from adaponder.analysis.results_figures import Group, Spot

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
    """Checkpoints turned to several depths by the dial."""
    from adaponder.analysis.results_figures import Group, Spot

    found = []
    for seed, turned in judge.evidence.dialled(judge.claims.runs[alias]).items():
        if seed in plain:
            spots = [Spot(seed, depth, ratio, loss - plain[seed]) for depth, ratio, loss in turned]
            found.append(Group(f"{judge.title(alias)}, dial, seed {seed}", spots))
    return found
