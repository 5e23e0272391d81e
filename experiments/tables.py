"""Formats the tables of the results page as lines of Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from adaponder.terminal import number
from experiments import statistics as stats
from experiments.evidence import Evidence
from experiments.judging import NONE, judge, shown
from experiments.queue import Experiment


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Formats a Markdown table, with bars inside cells escaped; returns no lines if there are no rows."""

    def line(cells: Sequence[Any]) -> str:
        return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"

    lines = [*map(line, rows)]
    return [line(head), "|" + "---|" * len(head), *lines] if lines else []


def rate_of(experiment: Experiment) -> float | None:
    """Returns the learning rate that the queue sets for a run; ``None`` if the run keeps the recipe's learning rate."""
    rates = [float(change.partition("=")[2]) for change in experiment.changes if change.startswith("train.lr=")]
    return rates[0] if rates else None


def _by_seed(values: Iterable[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


def _shares(points: pd.DataFrame) -> str:
    """Formats the percentages of tokens at depth 1/…/K, one group per seed; a mean over seeds would hide collapses."""
    by_seed = ["/".join(f"{100 * share:.0f}" for share in shares) for shares in points.shares]
    return ", ".join(by_seed) if len(points.shares.iloc[0]) > 1 else NONE


def _mean(column: str, form: str) -> Cell:
    return lambda e, name, points: number(points[column].to_numpy().mean(), form)


def _relative(column: str, base: Callable[[Mapping[str, Any]], str], form: Callable[[float], str]) -> Cell:
    """Returns a cell function: a setting's mean of ``column`` divided by that of the setting ``base(claims)``."""
    return lambda e, name, points: form(points[column].to_numpy().mean() / e.mean(base(e.claims), column))


def _over_curve(column: str) -> Cell:
    def cell(evidence: Evidence, name: str, points: pd.DataFrame) -> str:
        curve = evidence.claims["curve"]
        return "on the curve" if name in curve else shown(evidence.over_curve(name, curve, column), seeds=False)

    return cell


def _saved(share: float) -> str:
    return f"{100 * (1 - share):.1f} %"


def _mixed(evidence: Evidence, name: str, points: pd.DataFrame) -> str:
    """Formats the difference on the mixed corpus between vanilla and the method that ``open-…`` names."""
    method = name.removeprefix("open-")
    known = method in evidence.aliases and method != "vanilla"
    return shown(evidence.minus(method, "vanilla"), seeds=False) if known else NONE


# Formats a cell from the evidence, a setting's name and its :meth:`Evidence.points`.
Cell = Callable[[Evidence, str, pd.DataFrame], str]
CELLS: Mapping[str, Cell] = {
    "lr": lambda e, name, points: number(rate_of(e.run(name)), "g"),
    "seeds": lambda e, name, points: ", ".join(map(str, points.index)),
    "loss by seed": lambda e, name, points: _by_seed(points.loss, ".4f"),
    "loss": _mean("loss", ".4f"),
    "passes": _mean("depth", ".2f"),
    "inference FLOPs": lambda e, name, points: f"{CELLS['x vanilla'](e, name, points)}x",
    "iterations by seed": lambda e, name, points: _by_seed(points.depth, ".2f"),
    "iterations saved": _relative("depth", lambda claims: claims["full"], _saved),
    "FLOPs saved": _relative("mflops", lambda claims: claims["full"], _saved),
    "tokens halted early": _mean("halted", ".1%"),
    "gates closed": _mean("gates_closed", ".1%"),
    "% of tokens at depth 1/…/K by seed": lambda e, name, points: _shares(points),
    "99 % of tokens at one depth, in seeds": lambda e, name, points: f"{sum(points.most > 0.99)} of {len(points)}",
    "MFLOP/token": _mean("mflops", ".1f"),
    "x vanilla": _relative("mflops", lambda claims: claims["curve"][0], "{:.2f}".format),
    "training PFLOP": _mean("training", ".1f"),
    "parameters": lambda e, name, points: f"{e.parameters(name).total / 1e6:.2f}M",
    "of them added": lambda e, name, points: f"{e.parameters(name).added:,}",
    "the same on the mixed corpus": _mixed,
    "minus the curve at equal iterations": _over_curve("depth"),
    "minus the curve at equal FLOPs": _over_curve("mflops"),
}


def settings_table(evidence: Evidence, rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Returns a table with a row per setting; columns are keys of ``CELLS`` or ``minus NAME`` (loss minus NAME's)."""

    def cell(name: str, column: str, points: pd.DataFrame) -> str:
        if points.empty:
            return stats.NOT_RUN if column == columns[0] else NONE
        if column in CELLS:
            return CELLS[column](evidence, name, points)
        base = column.removeprefix("minus ")
        same = evidence.setting(name) == evidence.setting(base)
        return NONE if same else shown(evidence.minus(name, base), seeds=False)

    head = [c if c in CELLS else f"minus {evidence.title(c.removeprefix('minus '))}" for c in columns]
    cells = ([evidence.title(name), *(cell(name, c, evidence.points(name)) for c in columns)] for name in rows)
    return markdown(["", *head], cells)


def leaderboard(evidence: Evidence, tracks: Sequence[float] = (1.6, 2.7)) -> list[str]:
    """Returns the leaderboard's entries that have run, lowest loss first, with their rank in each track.

    A track is the highest permitted ratio of inference FLOPs to vanilla's.
    """
    rows, ranks = [], Counter[float]()
    names = [name for name in evidence.claims["leaderboard"] if not evidence.points(name).empty]
    for name in sorted(names, key=lambda name: evidence.mean(name, "loss")):
        points = evidence.points(name)
        cells = [CELLS[column](evidence, name, points) for column in ("loss", "seeds", "x vanilla", "parameters")]
        allowed = [track for track in tracks if float(cells[2]) <= track]
        ranks.update(allowed)
        record = points.record.iloc[-1]
        source = [record["date"], f"`{record['commit'][:12]}`", f"[record](records/{record['file']})"]
        places = [str(ranks[track]) if track in allowed else NONE for track in tracks]
        rows.append([*places, evidence.title(name), *cells, *source, evidence.claims["leaderboard"][name]])
    head = [*(f"at {track:g}x" for track in tracks), "entry", "loss", "seeds", "x vanilla", "parameters", "date"]
    return markdown([*head, "commit", "record", "what was new"], rows)


def claim_table(evidence: Evidence, claim: str) -> list[str]:
    """Returns the lines of a table with a row for each setting of the claim that has a complete run; else no lines."""
    names = dict.fromkeys(run.setting for run in evidence.queue.of_claim(claim) if evidence.has_all(run))
    columns = ["lr", "seeds", "loss by seed", "iterations by seed", "% of tokens at depth 1/…/K by seed"]
    if claim in evidence.claims["against"]:
        columns += [f"minus {evidence.claims['against'][claim]}", "99 % of tokens at one depth, in seeds"]
    return settings_table(evidence, list(names), columns)


def lr_table(evidence: Evidence) -> list[str]:
    """Returns the losses of seed 0 by learning rate, the lowest in bold; with the mean depth if tokens halt."""
    tried: dict[str, dict[float, dict[str, Any] | None]] = {}
    for run in evidence.queue.of_claim("lr"):
        if (rate := rate_of(run)) is not None:
            by_seed = evidence.points(run.setting).to_dict("index")
            tried.setdefault(evidence.title(run.setting), {})[rate] = by_seed.get(0)

    def cell(run: Mapping[str, Any] | None, best: float) -> str:
        if run is None:
            return ""
        loss = f"**{run['loss']:.4f}**" if run["loss"] == best else f"{run['loss']:.4f}"
        return loss + (f" ({run['depth']:.2f})" if run["halted"] > 0 else "")

    rates, rows = sorted({rate for by_rate in tried.values() for rate in by_rate}), []
    for title, by_rate in tried.items():
        losses = [run["loss"] for run in by_rate.values() if run is not None]
        best = min(losses) if len(losses) > 1 else math.nan
        rows.append([title, *(cell(by_rate[rate], best) if rate in by_rate else NONE for rate in rates)])
    return markdown(["", *(f"{rate:g}" for rate in rates)], rows)


def dial_table(evidence: Evidence, depths: Sequence[float] = (1.25, 1.5, 2.0, 2.5, 3.0, 3.5)) -> list[str]:
    """Returns losses of checkpoints tuned by the dial to ``depths`` minus the curve's, at equal depth and FLOPs."""
    curve, rows = evidence.claims["curve"], []
    for name in evidence.claims["dials"]:
        for depth in depths:
            over = [evidence.over_curve(name, curve, column, depth) for column in ("depth", "ratio")]
            rows += [[evidence.title(name), f"{depth:g}", *map(shown, over)]] if any(over) else []
    head = ["turned by the dial", "to iterations", "minus the curve at equal iterations", "at equal FLOPs"]
    return markdown(head, rows)


def measured_tables(evidence: Evidence, claim: str) -> list[str]:
    """Returns a table for each kind of measurement of a claim, with rows for every setting and seed."""
    lines: list[str] = []
    experiments = evidence.queue.of_claim(claim)
    for name in dict.fromkeys(name for run in experiments for name in run.measures if name in _MEASURED):
        rows = [
            {"": evidence.title(setting), "seed": str(seed), **row}
            for setting in dict.fromkeys(run.setting for run in experiments)
            for seed, result in evidence.measured(setting, name).items()
            for row in _MEASURED[name](result)
        ]
        lines += ["", *markdown([*rows[0]], [[*row.values()] for row in rows])] if rows else []
    return lines


Rows = list[dict[str, str]]


def _steps(result: Mapping[str, Any]) -> Rows:
    losses = {"loss": "nll", "at forced depth 1": "nll_at_depth_1", "at full depth": "nll_at_full_depth"}
    return [
        {"halted at step": str(i + 1), "tokens": f"{tokens:,}"}
        | {head: number(result[name][i], ",.3f") for head, name in losses.items()}
        for i, tokens in enumerate(result["tokens"])
    ]


def _policies(result: Mapping[str, Any]) -> Rows:
    """Returns a row per (loss, causal), because with a single gate several policies halt the same tokens."""
    learned = result["compared"]["learned gate"]["loss"]
    alike: dict[tuple[float | None, bool], list[str]] = {}
    for name, policy in result["compared"].items():
        alike.setdefault((policy["loss"], policy["causal"]), []).append(name)
    return [
        {"policy": "; ".join(names), "causal": "yes" if causal else "no", "iterations": f"{result['depth']:.3f}"}
        | {"loss": number(loss, ".4f")}
        | {"minus learned gate": NONE if None in (loss, learned) else f"{loss - learned:+.4f}"}
        for (loss, causal), names in sorted(alike.items(), key=lambda pair: pair[0][0] or math.inf)
    ]


def _reuse(result: Mapping[str, Any]) -> Rows:
    rules = {"loss, state reused (skipping)": "state", "keys and values alone": "kv", "nothing": "none"}
    losses = {head: number(result["as"][rule]["loss"], ".4f") for head, rule in rules.items()}
    return [{"trained with reuse of": result["trained"], **losses, "gap": f"{result['gap']:+.4f}"}]


def _speed(result: Mapping[str, Any]) -> Rows:
    stages = {"prefill": result["prefill"], f"decode, {result['decode']['lanes']} lanes,": result["decode"]}
    row: dict[str, str] = {}
    for name, stage in stages.items():
        row |= {f"{name} tokens/s": f"{stage['tokens_per_second']:,.0f}", f"{name} iterations": f"{stage['depth']:.2f}"}
    return [row]


_MEASURED = {"steps": _steps, "policies": _policies, "reuse": _reuse, "speed": _speed}


def noise_table(evidence: Evidence) -> list[str]:
    """Returns the noise of each corpus, without and with settings that collapse, and the power of three seeds."""
    rows, seeds = [], 3
    for corpus in evidence.queue.corpora:
        for pool, what in (("stable", "without settings that collapse"), ("all", "with them")):
            noise = evidence.pools[corpus][pool][0]
            if noise is not None:
                error = noise.error(seeds)
                cells = [f"{noise.deviation:.4f}", str(noise.freedom), f"{stats.detectable(error, noise.freedom):.4f}"]
                cells += [f"{stats.power_of_equality(error, noise.freedom):.2f}", str(stats.seeds_for_equality(noise))]
                rows.append([f"{corpus or 'mixed'}, {what}", *cells, str(stats.seeds_for(0.003, noise))])
    head = ["corpus", "residual deviation", "degrees of freedom", f"difference found with probability {stats.POWER:g}"]
    head += [f"power of “equal within {stats.MARGIN:g}”", "seeds that equality needs", "seeds that 0.003 needs"]
    return markdown(head, rows)


def analyses_table(evidence: Evidence) -> list[str]:
    """Counts statements by verdict for each ``Evidence.noise_of``, and lists the statements whose verdicts change."""
    rows, before = [], []
    for noise_of, what in (
        ("stable", "pooled, without settings that collapse (used here)"),
        ("all", "pooled over all settings"),
        ("pair", "each pair by its own seeds"),
    ):
        other = replace(evidence, noise_of=noise_of)
        verdicts = [judge(other, statement["tests"])[0] for statement in evidence.claims["statements"]]
        before = before or verdicts
        changed = [f"{i}: {new}" for i, (old, new) in enumerate(zip(before, verdicts, strict=True), 1) if old != new]
        counts = [str(verdicts.count(verdict)) for verdict in (stats.HOLDS, stats.FAILS, stats.UNRESOLVED)]
        rows.append([what, *counts, "; ".join(changed) or NONE])
    return markdown(["noise", stats.HOLDS, stats.FAILS, stats.UNRESOLVED, "statements (by number) that change"], rows)


def reruns(evidence: Evidence) -> list[str]:
    """Returns a table of runs that were trained more than once, with the largest difference of their losses."""
    rows = []
    for (setting, seed), losses in evidence.runs.groupby(["setting", "seed"], sort=False).loss:
        if len(losses) > 1:
            largest = f"{losses.max() - losses.min():.4f}"
            rows.append([evidence.title(setting), str(seed), _by_seed(losses, ".4f"), largest])
    return markdown(["", "seed", "losses", "largest difference"], rows)
