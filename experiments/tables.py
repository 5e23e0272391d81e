"""The tables of the results page, as lines of Markdown made from the records."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from experiments.evidence import Evidence, Point, costs, model_parameters
from experiments.judging import NONE, shown
from experiments.queue import Experiment
from experiments.statistics import NOT_RUN, estimate, paired, t_quantile

_RATE = "train.lr="
Points = Mapping[int, Point]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Formats a Markdown table; a bar inside a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def prose(*sentences: str) -> list[str]:
    """Wraps a paragraph."""
    return textwrap.wrap(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)


def _mean(points: Points, of: str) -> float:
    return statistics.fmean(point.get(of) for point in points.values()) if points else math.nan


def _losses(points: Points) -> str:
    return ", ".join(f"{points[seed].loss:.4f}" for seed in sorted(points))


# --- learning rates -------------------------------------------------------------------------------------------------


def learning_rates(evidence: Evidence) -> dict[str, dict[float, Points]]:
    """Returns by setting without its rate the points of each rate that was tried."""
    tried: dict[str, dict[float, Points]] = {}
    for run in evidence.queue.of_claim("lr"):
        if (rate := rate_of(run)) is not None:
            tried.setdefault(evidence.title(run.setting), {})[rate] = evidence.points(run.setting)
    return tried


def rate_of(experiment: Experiment) -> float | None:
    """Returns the learning rate that a run sets, if any."""
    given = [change.removeprefix(_RATE) for change in experiment.changes if change.startswith(_RATE)]
    return float(json.loads(given[0])) if given else None


def lr_table(evidence: Evidence) -> list[str]:
    """Returns the loss of seed 0 by learning rate, the best of each row bold, with mean depths where tokens halt."""
    tried = learning_rates(evidence)
    rates = sorted({rate for by_rate in tried.values() for rate in by_rate})
    rows = []
    for title, by_rate in tried.items():
        first = {rate: points[0] for rate, points in by_rate.items() if 0 in points}
        best = min(first, key=lambda rate: first[rate].loss) if len(first) > 1 else None
        cells = [title]
        for rate in rates:
            if rate not in first:
                cells.append("" if rate in by_rate else NONE)
                continue
            bold = "**" if rate == best else ""
            depth = f" ({first[rate].depth:.2f})" if first[rate].halted > 0 else ""
            cells.append(f"{bold}{first[rate].loss:.4f}{bold}{depth}")
        rows.append(cells)
    return markdown(["", *(f"{rate:g}" for rate in rates)], rows)


# --- Table 1 and the frontier ---------------------------------------------------------------------------------------


def main_table(evidence: Evidence, names: Sequence[str]) -> list[str]:
    """Returns losses by seed, the paired difference to the first row, perplexity, iterations, costs and parameters."""
    base = names[0]
    seeds = sorted({seed for name in names for seed in evidence.points(name)})
    plain = _mean(evidence.points(base), "mflops")
    head = ["", *(f"loss, seed {seed}" for seed in seeds), f"minus {evidence.title(base)}", "PPL", "iterations"]
    head += ["inference MFLOP/token", "x plain", "training PFLOP", "parameters", "of them added", "tokens/s"]
    rows = []
    for name in names:
        points = evidence.points(name)
        parameters = model_parameters(evidence.settings[evidence.aliases[name]])
        size = [f"{parameters.total / 1e6:.2f}M", f"{parameters.added:,}" if parameters.added else NONE]
        losses = [f"{points[seed].loss:.4f}" if seed in points else "" for seed in seeds]
        if not points:
            rows.append([evidence.title(name), *losses, NOT_RUN, *[NONE] * 5, *size, NONE])
            continue
        difference = NONE if name == base else shown(paired(evidence.values(name), evidence.values(base)))
        mean = {of: _mean(points, of) for of in ("loss", "depth", "mflops", "training")}
        cells = [f"{math.exp(mean['loss']):.2f}", f"{mean['depth']:.2f}", f"{mean['mflops']:.1f}"]
        cells += [f"{mean['mflops'] / plain:.2f}", f"{mean['training']:.1f}"]
        rows.append([evidence.title(name), *losses, difference, *cells, *size, speed(points.values())])
    return markdown(head, rows)


def speed(points: Iterable[Point]) -> str:
    """Returns training tokens per second of runs that had the device to themselves."""
    alone = [p.record["tokens_per_second"] for p in points if not p.record["shared_device_with"]]
    return f"{statistics.median(alone):,.0f}" if alone else "shared"


def readme_table(evidence: Evidence) -> list[str]:
    """Returns README's table: depth, FLOPs, losses, and the paired difference to the first row."""
    names = [name for name in evidence.claims["readme"] if evidence.points(name)]
    rows = []
    for name in names:
        points, difference = evidence.points(name), paired(evidence.values(name), evidence.values(names[0]))
        brief = NONE if name == names[0] or difference is None else shown(difference)
        brief = f"{brief.partition(' (')[0]} (one seed)" if brief.endswith("alone)") else brief.partition(" (")[0]
        depth, ratio = _mean(points, "depth"), _mean(points, "ratio")
        rows.append([evidence.title(name), f"{depth:.2f}", f"{ratio:.2f}x", _losses(points), brief])
    missing = [evidence.title(name) for name in evidence.claims["readme"] if name not in names]
    head = ["", "mean depth", "FLOPs", "validation loss, seeds 0, 1, …", "minus vanilla [95 % over seeds]"]
    return [*markdown(head, rows), *(["", f"Not run yet: {'; '.join(missing)}."] if missing else [])]


def frontier_table(evidence: Evidence) -> list[str]:
    """Returns every model on or against the curve: iterations, FLOPs, losses, and distance from the curve."""
    curve = evidence.claims["curve"]
    rows = []
    for name in (*curve, *evidence.claims["frontier"]):
        points = evidence.points(name)
        if not points:
            rows.append([evidence.title(name), NONE, NONE, NOT_RUN, NONE, NONE])
            continue
        over = ["on the curve"] * 2
        if name not in curve:
            over = [shown(estimate(evidence.over_curve(name, curve, of))) for of in ("depth", "mflops")]
        depth, ratio = _mean(points, "depth"), _mean(points, "ratio")
        rows.append([evidence.title(name), f"{depth:.2f}", f"{ratio:.2f}", _losses(points), *over])
    head = ["", "iterations", "FLOPs, x plain", "loss by seed", "minus the curve at equal iterations", "at equal FLOPs"]
    return markdown(head, rows)


def dial_table(evidence: Evidence, depths: Sequence[float] = (1.25, 1.5, 2.0, 2.5, 3.0, 3.5)) -> list[str]:
    """Returns dialled checkpoints minus the curve at equal iterations and at equal FLOPs; empty without any."""
    curve, rows = evidence.claims["curve"], []
    for name in evidence.claims["dials"]:
        for depth in depths:
            over = [estimate(evidence.dial_over_curve(name, curve, depth, of)) for of in ("depth", "ratio")]
            if any(over):
                rows.append([evidence.title(name), f"{depth:g}", *map(shown, over)])
    head = ["turned by the dial", "to iterations", "minus the curve at equal iterations", "at equal FLOPs"]
    return markdown(head, rows) if rows else []


# --- the runs and measurements of a claim ---------------------------------------------------------------------------


def claim_table(evidence: Evidence, claim: str) -> list[str]:
    """Returns every setting of a claim whose records hold its measurements; empty without any.

    Losses and depths by seed, and where tokens halted. Where the claim's settings are held against one run: their
    paired differences from it at its learning rate, and in how many seeds practically all tokens had one depth.
    """
    by_setting: dict[str, dict[int, Point]] = {}
    for run in evidence.queue.of_claim(claim):
        if (point := evidence.point(run)) is not None:
            by_setting.setdefault(run.setting, {}).setdefault(run.seed, point)
    base = evidence.claims["against"].get(claim)
    rows = []
    for setting, unordered in by_setting.items():
        points = dict(sorted(unordered.items()))
        rate = rate_of(evidence.settings[setting])
        cells = [evidence.title(setting), NONE if rate is None else f"{rate:g}", ", ".join(map(str, points))]
        cells += [_losses(points), ", ".join(f"{point.depth:.2f}" for point in points.values())]
        cells.append(", ".join(map(_shares, points.values())) if len(next(iter(points.values())).shares) > 1 else NONE)
        if base is not None:
            comparable = setting != evidence.aliases[base] and rate == rate_of(
                evidence.settings[evidence.aliases[base]]
            )
            losses = {seed: point.loss for seed, point in points.items()}
            cells.append(shown(paired(losses, evidence.values(base))) if comparable else NONE)
            cells.append(f"{sum(point.collapsed for point in points.values())} of {len(points)}")
        rows.append(cells)
    head = ["", "lr", "seeds", "loss by seed", "iterations by seed", "% of tokens at depth 1/…/K by seed"]
    head += [] if base is None else [f"minus {evidence.title(base)}", "99 % of tokens at one depth, in seeds"]
    return markdown(head, rows) if rows else []


def _shares(point: Point) -> str:
    """Formats percent of tokens by depth of one seed; a mean over seeds would describe no model."""
    return "/".join(f"{100 * share:.0f}" for share in point.shares)


def measured_tables(evidence: Evidence, claim: str) -> list[str]:
    """Returns tables of a claim's measurements, one row per setting and seed."""
    lines: list[str] = []
    experiments = evidence.queue.of_claim(claim)
    for name in dict.fromkeys(name for run in experiments for name in run.measures if name in _MEASURED):
        rows: list[list[str]] = []
        head: Sequence[str] = ()
        for setting in dict.fromkeys(run.setting for run in experiments):
            for seed, result in evidence.measured(setting, name).items():
                head, cells = _MEASURED[name](result)
                rows += [[evidence.title(setting), str(seed), *row] for row in cells]
        if rows:
            lines += ["", *markdown(["", "seed", *head], rows)]
    return lines


Cells = tuple[Sequence[str], list[list[str]]]


def _number(value: float | None, digits: int = 4) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _steps(result: Mapping[str, Any]) -> Cells:
    head = ["halted at step", "tokens", "loss", "at forced depth 1", "at full depth"]
    columns = zip(result["tokens"], result["nll"], result["nll_at_depth_1"], result["nll_at_full_depth"], strict=True)
    rows = [
        [str(step), f"{tokens:,}", *(_number(loss, 3) for loss in losses)]
        for step, (tokens, *losses) in enumerate(columns, 1)
    ]
    return head, rows


def _policies(result: Mapping[str, Any]) -> Cells:
    """Returns one row per loss: with one gate several policies halt the same tokens."""
    learned = result["compared"]["learned gate"]["loss"]
    alike: dict[tuple[float | None, bool], list[str]] = {}
    for name, policy in result["compared"].items():
        alike.setdefault((policy["loss"], policy["causal"]), []).append(name)
    rows = []
    for (loss, causal), names in sorted(alike.items(), key=lambda pair: pair[0][0] or math.inf):
        gap = NONE if loss is None or learned is None else f"{loss - learned:+.4f}"
        rows.append(["; ".join(names), "yes" if causal else "no", f"{result['depth']:.3f}", _number(loss), gap])
    return ["policy", "causal", "iterations", "loss", "minus learned gate"], rows


def _reuse(result: Mapping[str, Any]) -> Cells:
    losses = [_number(result["as"][rule]["loss"]) for rule in ("state", "kv", "none")]
    head = ["trained with reuse of", "loss, state reused (skipping)", "keys and values alone", "nothing", "gap"]
    return head, [[result["trained"], *losses, f"{result['gap']:+.4f}"]]


def _speed(result: Mapping[str, Any]) -> Cells:
    cells = [
        text
        for stage in (result["prefill"], result["decode"])
        for text in (_number(stage["tokens_per_second"], 0), f"{stage['depth']:.2f}")
    ]
    decode = f"decode tokens/s, {result['decode']['lanes']} lanes"
    return ["prefill tokens/s", "its iterations", decode, "its iterations"], [cells]


def _tasks(result: Mapping[str, Any]) -> Cells:
    rows = [
        [task["task"], f"{task['items']:,}", _number(task["metrics"]["acc"]["value"], 3)] for task in result["tasks"]
    ]
    return ["set", "items", "accuracy"], rows


_MEASURED: Mapping[str, Callable[[Mapping[str, Any]], Cells]] = {
    "steps": _steps,
    "policies": _policies,
    "reuse": _reuse,
    "speed": _speed,
    "tasks": _tasks,
}


# --- answers to questions -------------------------------------------------------------------------------------------


def four_numbers(evidence: Evidence) -> list[str]:
    """Returns tokens halted early, gates closed, iterations and FLOPs saved: four different numbers."""
    *halting, base = evidence.claims["savings"]
    full = evidence.points(base)
    rows = []
    for name in halting:
        if points := evidence.points(name):
            values = [_mean(points, "halted"), _mean(points, "gates_closed")]
            values += [1 - _mean(points, of) / _mean(full, of) for of in ("depth", "mflops")]
            cells = [NONE if math.isnan(value) else f"{100 * value:.1f} %" for value in values]
            rows.append([evidence.title(name), ", ".join(map(str, sorted(points))), *cells])
    head = ["", "seeds", "tokens halted early", "gates closed", "iterations saved", "FLOPs saved"]
    words = f"Saved are iterations and FLOPs of {evidence.title(base)}; the gates' own FLOPs count."
    return [*markdown(head, rows), "", words] if rows else []


def true_cost(evidence: Evidence) -> list[str]:
    """Returns iterations and FLOPs of methods that read every token to full depth."""
    rows = []
    for name in evidence.claims["true-cost"]:
        run = evidence.settings[evidence.aliases[name]]
        iterations = run.shaped.model.iterations or 1
        cost = costs(run, [0.0] * (iterations - 1) + [1.0])
        rows.append([evidence.title(name), f"{iterations}x", f"{cost.ratio:.2f}x", f"{cost.training:.1f}"])
    return markdown(["every token at full depth", "iterations", "FLOPs", "training PFLOP"], rows)


def resolution(evidence: Evidence) -> list[str]:
    """Returns deviations of losses and paired differences over seeds, and what three seeds can resolve."""
    rows, least = [], math.inf
    for before, after in pairwise(evidence.claims["seeds"]):
        difference = paired(evidence.values(after), evidence.values(before))
        if difference is None or len(difference.values) < 2:
            continue
        deviation = statistics.stdev(difference.values.values())
        smallest = t_quantile(2) * deviation / math.sqrt(3)
        least = min(least, smallest)
        losses = [evidence.values(after)[seed] for seed in difference.values]
        cells = [f"{statistics.stdev(losses):.4f}", f"{deviation:.4f}", f"{smallest:.4f}"]
        title = f"{evidence.title(after)} minus {evidence.title(before)}"
        rows.append([title, str(len(difference.values)), *cells])
    head = ["", "seeds", "deviation of a loss", "of a paired difference", "told apart from 0 by three seeds"]
    words = f"Three paired seeds tell apart, half of the time or more, what exceeds the last column, {least:.4f} at the"
    seen = "cannot be told from chance here" if least > 0.003 else "can be seen"
    return [*markdown(head, rows), "", f"{words} least: so an effect of 0.003 {seen}."] if rows else []


def tuning(evidence: Evidence) -> list[str]:
    """Returns the gains of the learning rate and of the embedding scale."""
    plain, second = evidence.claims["curve"][:2]
    lines = []
    for title, tried in learning_rates(evidence).items():
        first = {rate: points[0].loss for rate, points in tried.items() if 0 in points}
        if 0.001 in first and len(first) > 1:
            gain = first[0.001] - min(first.values())
            lines.append(f"- {title}: the best rate is worth {gain:.3f} over 0.001 (seed 0)")
    for words, name, other in (
        (f"embedding scale 16 instead of 1, {evidence.title(plain)} at 0.004", plain, "vanilla-unscaled"),
        ("a second iteration, both tuned", second, plain),
    ):
        if (difference := paired(evidence.values(name), evidence.values(other))) is not None:
            lines.append(f"- {words}: {shown(difference)}")
    return lines


def reruns(evidence: Evidence) -> list[str]:
    """Returns runs that were trained more than once with one seed, and their largest difference."""
    rows = []
    for setting in evidence.settings:
        for seed, points in sorted(evidence.runs(setting).items()):
            if len(points) > 1:
                losses = [point.loss for point in points]
                listed = ", ".join(f"{loss:.4f}" for loss in losses)
                rows.append([evidence.title(setting), str(seed), listed, f"{max(losses) - min(losses):.4f}"])
    return markdown(["", "seed", "losses", "largest difference"], rows) if rows else []
