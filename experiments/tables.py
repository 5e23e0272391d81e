"""The tables of the results page, as lines of Markdown made from the records."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from experiments.claims import title_of
from experiments.evidence import Point, model_parameters
from experiments.judging import Judge, shown
from experiments.queue import Experiment
from experiments.statistics import estimate, paired, t_quantile

NONE = "–"
_WIDTH = 120
_RATE = "train.lr="


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Formats a Markdown table; a bar inside a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def prose(*sentences: str) -> list[str]:
    """Wraps a paragraph."""
    return textwrap.wrap(" ".join(sentences), _WIDTH, break_long_words=False, break_on_hyphens=False)


def learning_rates(judge: Judge) -> tuple[list[float], dict[str, dict[float, dict[int, Point]]]]:
    """Returns the rates tried, and by setting without its rate the points of each rate by seed."""
    found: dict[str, dict[float, dict[int, Point]]] = {}
    for each in judge.evidence.queue.of_claim("lr"):
        rate = rate_of(each)
        if rate is None:
            continue
        title = title_of(judge.claims, judge.evidence, each.setting)
        found.setdefault(title, {})[rate] = judge.evidence.points(each.setting)
    return sorted({rate for rates in found.values() for rate in rates}), found


def rate_of(experiment: Experiment) -> float | None:
    """Returns the learning rate that a run sets, if any."""
    given = [change.removeprefix(_RATE) for change in experiment.changes if change.startswith(_RATE)]
    return float(json.loads(given[0])) if given else None


def lr_table(judge: Judge) -> list[str]:
    """Returns the loss of seed 0 by learning rate, the best of each row bold, with mean depths where tokens halt."""
    rates, found = learning_rates(judge)
    rows = []
    for title, tried in found.items():
        first = {rate: points[0] for rate, points in tried.items() if 0 in points}
        best = min(first, key=lambda rate: first[rate].loss) if first else None
        cells = []
        for rate in rates:
            if rate not in first:
                cells.append("" if rate in tried else NONE)
                continue
            point = first[rate]
            loss = f"**{point.loss:.4f}**" if rate == best and len(first) > 1 else f"{point.loss:.4f}"
            cells.append(loss + (f" ({point.depth:.2f})" if point.halted > 0 else ""))
        rows.append([title, *cells])
    return markdown(["", *(f"{rate:g}" for rate in rates)], rows)


def _seeds(judge: Judge, aliases: Sequence[str]) -> list[int]:
    return sorted({seed for alias in aliases for seed in judge.values(alias)})


def main_table(judge: Judge, aliases: Sequence[str]) -> list[str]:
    """Returns losses by seed, the paired difference to the first row, perplexity, iterations, costs and parameters."""
    base = aliases[0]
    seeds = _seeds(judge, aliases)
    plain = statistics.fmean(judge.values(base, "mflops").values()) if judge.values(base) else math.nan
    head = ["", *(f"loss, seed {seed}" for seed in seeds), f"minus {judge.title(base)}", "PPL", "iterations"]
    head += ["inference MFLOP/token", "x plain", "training PFLOP", "parameters", "of them added", "tokens/s"]
    rows = []
    for alias in aliases:
        points = judge.evidence.points(judge.claims.runs[alias])
        parameters = model_parameters(judge.evidence.settings[judge.claims.runs[alias]])
        size = [f"{parameters.total / 1e6:.2f}M", f"{parameters.added:,}" if parameters.added else NONE]
        losses = [f"{points[seed].loss:.4f}" if seed in points else "" for seed in seeds]
        if not points:
            rows.append([judge.title(alias), *losses, "not run yet", *[NONE] * 5, *size, NONE])
            continue
        difference = NONE if alias == base else shown(paired(judge.values(alias), judge.values(base)))
        mean = {name: statistics.fmean(getattr(p, name) for p in points.values()) for name in _MEANS}
        cells = [f"{math.exp(mean['loss']):.2f}", f"{mean['depth']:.2f}", f"{mean['mflops']:.1f}"]
        cells += [f"{mean['mflops'] / plain:.2f}", f"{mean['training']:.1f}"]
        rows.append([judge.title(alias), *losses, difference, *cells, *size, speed(points.values())])
    return markdown(head, rows)


_MEANS = ("loss", "depth", "mflops", "training")


def speed(points: Iterable[Point]) -> str:
    """Returns training tokens per second of runs that had the device to themselves."""
    alone = [p.record["tokens_per_second"] for p in points if not p.record["shared_device_with"]]
    return f"{statistics.median(alone):,.0f}" if alone else "shared"


def frontier_table(judge: Judge) -> list[str]:
    """Returns every model on or against the curve: iterations, FLOPs, losses, and distance from the curve."""
    curve = [judge.claims.runs[alias] for alias in judge.claims.rows["curve"]]
    aliases = [*judge.claims.rows["curve"], *judge.claims.rows["frontier"]]
    rows = []
    for alias in aliases:
        setting = judge.claims.runs[alias]
        points = judge.evidence.points(setting)
        if not points:
            rows.append([judge.title(alias), NONE, NONE, "not run yet", NONE, NONE])
            continue
        over = ["on the curve"] * 2
        if setting not in curve:
            over = [shown(estimate(judge.evidence.over_curve(setting, curve, of))) for of in ("depth", "mflops")]
        losses = ", ".join(f"{points[seed].loss:.4f}" for seed in sorted(points))
        depth, ratio = (statistics.fmean(getattr(p, of) for p in points.values()) for of in ("depth", "ratio"))
        rows.append([judge.title(alias), f"{depth:.2f}", f"{ratio:.2f}", losses, *over])
    head = ["", "iterations", "FLOPs, x plain", "loss by seed", "minus the curve at equal iterations", "at equal FLOPs"]
    return markdown(head, rows)


def dial_table(judge: Judge, depths: Sequence[float] = (1.25, 1.5, 2.0, 2.5, 3.0, 3.5)) -> list[str]:
    """Returns dialled checkpoints minus the curve at equal iterations and at equal FLOPs; empty without any."""
    curve = [judge.claims.runs[alias] for alias in judge.claims.rows["curve"]]
    rows = []
    for alias in judge.claims.rows["dials"]:
        for depth in depths:
            over = [
                estimate(judge.evidence.dial_over_curve(judge.claims.runs[alias], curve, depth, of))
                for of in ("depth", "ratio")
            ]
            if any(over):
                rows.append([judge.title(alias), f"{depth:g}", *map(shown, over)])
    head = ["turned by the dial", "to iterations", "minus the curve at equal iterations", "at equal FLOPs"]
    return markdown(head, rows) if rows else []


def measured_tables(judge: Judge, claim: str) -> list[str]:
    """Returns tables of a claim's measurements, one row per setting and seed."""
    lines: list[str] = []
    experiments = judge.evidence.queue.of_claim(claim)
    for name in dict.fromkeys(name for each in experiments for name in each.measures):
        rows: list[list[str]] = []
        head: Sequence[str] = ()
        for setting in dict.fromkeys(each.setting for each in experiments):
            title = title_of(judge.claims, judge.evidence, setting)
            for seed, made in sorted(judge.evidence.measured(setting, name).items()):
                if name in _MEASURED:
                    head, cells = _MEASURED[name](made)
                    rows += [[title, str(seed), *each] for each in cells]
        if rows:
            lines += ["", *markdown(["", "seed", *head], rows)]
    return lines


Cells = tuple[Sequence[str], list[list[str]]]


def _number(value: float | None, digits: int = 4) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _steps(made: Mapping[str, Any]) -> Cells:
    head = ["halted at step", "tokens", "loss", "at forced depth 1", "at full depth"]
    columns = zip(made["tokens"], made["nll"], made["nll_at_depth_1"], made["nll_at_full_depth"], strict=True)
    return head, [
        [str(step), f"{tokens:,}", *(_number(loss, 3) for loss in losses)]
        for step, (tokens, *losses) in enumerate(columns, 1)
    ]


def _policies(made: Mapping[str, Any]) -> Cells:
    """Returns one row per loss: with one gate several policies halt the same tokens."""
    learned = made["compared"]["learned gate"]["loss"]
    rows: list[list[str]] = []
    alike: dict[tuple[float | None, bool], list[str]] = {}
    for name, each in made["compared"].items():
        alike.setdefault((each["loss"], each["causal"]), []).append(name)
    for (loss, causal), names in sorted(alike.items(), key=lambda pair: pair[0][0] or math.inf):
        gap = None if loss is None or learned is None else loss - learned
        rows.append(["; ".join(names), "yes" if causal else "no", f"{made['depth']:.3f}", _number(loss)])
        rows[-1].append(NONE if gap is None else f"{gap:+.4f}")
    return ["policy", "causal", "iterations", "loss", "minus learned gate"], rows


def _reuse(made: Mapping[str, Any]) -> Cells:
    losses = [_number(made["as"][rule]["loss"]) for rule in ("state", "kv", "none")]
    head = ["trained with reuse of", "loss, state reused (skipping)", "keys and values alone", "nothing", "gap"]
    return head, [[made["trained"], *losses, f"{made['gap']:+.4f}"]]


def _speed(made: Mapping[str, Any]) -> Cells:
    parts = [made["prefill"], made["decode"]]
    cells = [text for part in parts for text in (_number(part["tokens_per_second"], 0), f"{part['depth']:.2f}")]
    return [
        "prefill tokens/s",
        "its iterations",
        f"decode tokens/s, {made['decode']['lanes']} lanes",
        "its iterations",
    ], [cells]


def _tasks(made: Mapping[str, Any]) -> Cells:
    rows = [[each["task"], f"{each['items']:,}", _number(each["metrics"]["acc"]["value"], 3)] for each in made["tasks"]]
    return ["set", "items", "accuracy"], rows


_MEASURED: Mapping[str, Callable[[Mapping[str, Any]], Cells]] = {
    "steps": _steps,
    "policies": _policies,
    "reuse": _reuse,
    "speed": _speed,
    "tasks": _tasks,
}


def claim_table(judge: Judge, claim: str) -> list[str]:
    """Returns every setting of a claim whose records hold its measurements; empty without any.

    Losses and depths by seed, and where tokens halted. Where the claim's settings are held against one run: their
    paired differences from it at its learning rate, and in how many seeds practically all tokens had one depth.
    """
    found: dict[str, dict[int, Point]] = {}
    for each in judge.evidence.queue.of_claim(claim):
        point = judge.evidence.point(each)
        if point is not None:
            found.setdefault(each.setting, {}).setdefault(each.seed, point)
    base = judge.claims.against.get(claim)
    rows = []
    for setting, unordered in found.items():
        points = dict(sorted(unordered.items()))
        rate = rate_of(judge.evidence.settings[setting])
        cells = [title_of(judge.claims, judge.evidence, setting), NONE if rate is None else f"{rate:g}"]
        cells.append(", ".join(map(str, points)))
        cells.append(", ".join(f"{point.loss:.4f}" for point in points.values()))
        cells.append(", ".join(f"{point.depth:.2f}" for point in points.values()))
        cells.append(", ".join(map(_shares, points.values())) if len(next(iter(points.values())).shares) > 1 else NONE)
        if base is not None:
            collapsed = sum(point.collapsed for point in points.values())
            cells += [_against(judge, base, setting, points), f"{collapsed} of {len(points)}"]
        rows.append(cells)
    head = ["", "lr", "seeds", "loss by seed", "iterations by seed", "% of tokens at depth 1/…/K by seed"]
    head += [] if base is None else [f"minus {judge.title(base)}", "99 % of tokens at one depth, in seeds"]
    return markdown(head, rows) if rows else []


def _shares(point: Point) -> str:
    """Formats percent of tokens by depth of one seed; a mean over seeds would describe no model."""
    return "/".join(f"{100 * share:.0f}" for share in point.shares)


def _against(judge: Judge, base: str, setting: str, points: Mapping[int, Point]) -> str:
    """Returns a setting's losses minus those of ``base`` at the same learning rate."""
    held = judge.claims.runs[base]
    rates = [rate_of(judge.evidence.settings[each]) for each in (held, setting)]
    if setting == held or rates[0] != rates[1]:
        return NONE
    return shown(paired({seed: point.loss for seed, point in points.items()}, judge.values(base)))


def four_numbers(judge: Judge, aliases: Sequence[str], base: str) -> list[str]:
    """Returns tokens halted early, gates closed, iterations and FLOPs saved: four different numbers."""
    rows = []
    for alias in aliases:
        points = judge.evidence.points(judge.claims.runs[alias])
        full = judge.evidence.points(judge.claims.runs[base])
        if not points:
            continue
        deep, flops = (
            statistics.fmean(getattr(p, of) for p in full.values()) if full else math.nan for of in ("depth", "mflops")
        )
        values = [
            statistics.fmean(p.halted for p in points.values()),
            statistics.fmean(p.gates_closed for p in points.values()),
            1 - statistics.fmean(p.depth for p in points.values()) / deep,
            1 - statistics.fmean(p.mflops for p in points.values()) / flops,
        ]
        cells = [NONE if math.isnan(value) else f"{100 * value:.1f} %" for value in values]
        rows.append([judge.title(alias), ", ".join(map(str, sorted(points))), *cells])
    head = ["", "seeds", "tokens halted early", "gates closed", "iterations saved", "FLOPs saved"]
    return markdown(head, rows) if rows else []


def spread_of_seeds(judge: Judge, aliases: Sequence[str]) -> tuple[list[str], float]:
    """Returns deviations of losses and paired differences over seeds, and what three seeds can resolve.

    Returns the table and the smallest difference in it that three seeds can tell from 0.
    """
    rows, least = [], math.inf
    for before, after in pairwise(aliases):
        difference = paired(judge.values(after), judge.values(before))
        if difference is None or len(difference.values) < 2:
            continue
        deviation = statistics.stdev(difference.values.values())
        smallest = t_quantile(2) * deviation / math.sqrt(3)
        least = min(least, smallest)
        losses = [judge.values(after)[seed] for seed in difference.values]
        cells = [f"{statistics.stdev(losses):.4f}", f"{deviation:.4f}", f"{smallest:.4f}"]
        rows.append([f"{judge.title(after)} minus {judge.title(before)}", str(len(difference.values)), *cells])
    head = ["", "seeds", "deviation of a loss", "of a paired difference", "told apart from 0 by three seeds"]
    return (markdown(head, rows) if rows else []), least


def twice(judge: Judge) -> list[str]:
    """Returns runs that were trained more than once with one seed, and their largest difference."""
    rows = []
    for setting in judge.evidence.settings:
        for seed, points in sorted(judge.evidence.runs(setting).items()):
            if len(points) > 1:
                losses = [point.loss for point in points]
                listed = ", ".join(f"{loss:.4f}" for loss in losses)
                title = title_of(judge.claims, judge.evidence, setting)
                rows.append([title, str(seed), listed, f"{max(losses) - min(losses):.4f}"])
    return markdown(["", "seed", "losses", "largest difference"], rows) if rows else []


def apart(records: Mapping[str, str]) -> list[str]:
    """Records that nothing on the page is compared with, and why."""
    return markdown(["record", "why"], [[f"`{name}`", why] for name, why in sorted(records.items())]) if records else []
