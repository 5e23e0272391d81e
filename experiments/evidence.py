"""Tabulates the losses, depths and costs of the queue's runs from their records; reads ``claims.yaml``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from adaponder.backbones.shape import Shape, shape_of
from adaponder.config import AdaPonderConfig
from adaponder.errors import InputError
from adaponder.files import read_yaml
from adaponder.methods import method_class
from adaponder.methods.cost import Parameters, cost_of, parameters_of, training_flops
from adaponder.recipes import load_recipe
from adaponder.training.build import config_of
from experiments.queue import Corpus, Experiment, Queue
from experiments.records import record_of, records_of
from experiments.statistics import Estimate, Noise, at_depth, estimate, two_way

# The dial is compared at a depth if a measured depth is this near: measured budgets are 0.25 apart.
_NEAR = 0.15
# Sequences over which a cost is averaged: enough for four digits.
_WINDOWS = 16
# A setting's noise is not pooled if in some seed more than this share of its tokens has one depth, unless all of them
# have in every seed (a fixed depth). The rule was fixed on 2026-11-19, after the runs on the mixed corpus.
ONE_DEPTH = 0.95


def _changes(experiment: Experiment) -> tuple[str, ...]:
    """Returns the recipe overrides that affect the model, which are all but those of ``train.*`` fields."""
    return tuple(change for change in experiment.changes if not change.startswith("train."))


@cache
def model_of(recipe: str, changes: tuple[str, ...]) -> tuple[AdaPonderConfig, Shape, int]:
    """Returns the config of a recipe's model, its shape and the tokens per sequence."""
    loaded = load_recipe(recipe, changes)
    config = config_of(loaded)
    assert config is not None  # a backbone by its shape, not by the name of a checkpoint
    return config, shape_of(config), loaded.data.sequence


def costs(experiment: Experiment, shares: Sequence[float]) -> dict[str, float]:
    """Returns the compute of a run; ``shares[d - 1]`` is the share of tokens with depth d.

    ``mflops``: MFLOP per token at inference, which skips halted tokens; ``ratio``: the same over the plain decoder's;
    ``training``: PFLOP of the whole dense training, forward and backward, without recomputation.
    """
    mflops, ratio, training = _costs(experiment.recipe, _changes(experiment), tuple(round(x, 4) for x in shares))
    return {"mflops": mflops, "ratio": ratio, "training": training * experiment.tokens / 1e9}


@cache
def _costs(recipe: str, changes: tuple[str, ...], shares: tuple[float, ...]) -> tuple[float, float, float]:
    """Returns (MFLOP per token, ratio to the plain decoder, MFLOP per token of a training step)."""
    config, shape, length = model_of(recipe, changes)
    # Depths in these shares, spread evenly over the windows: a multiple of the golden ratio visits all parts alike.
    place = torch.arange(_WINDOWS * length, dtype=torch.float64) * 0.6180339887498949 % 1.0
    bounds = itertools.accumulate(shares[:-1])
    depths = sum(((place >= bound).long() for bound in bounds), torch.ones(len(place), dtype=torch.long))
    skipping = cost_of(depths.view(_WINDOWS, length), config, shape=shape)
    training = training_flops(config, sequence=length, shape=shape)
    if config.exit_threshold == 1.0 and not config.exit_prior_weight:
        # Exits stay closed: the loss needs the logits of the last iteration alone.
        scored = method_class(config.method).states_scored(config.iterations)
        training -= 3 * (scored - 1) * 2 * shape.vocabulary * shape.hidden
    return skipping.flops / len(depths) / 1e6, skipping.ratio, training / 1e6


def row_of(experiment: Experiment, record: Mapping[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Returns a row of :attr:`Evidence.runs`.

    ``loss`` is the one that ``corpus.loss`` selects; ``shares`` are the shares of validation tokens with depth 1 … K,
    and ``most`` is the largest. ``gates_closed`` is the share of (token, gate) pairs with a closed or unreached gate.
    """
    last = record["validation"][-1]
    shares = tuple(after - before for before, after in pairwise([0.0, *last["validation_halted"], 1.0]))
    gates = len(shares) - 1
    closed = sum(share * (gates - i) for i, share in enumerate(shares)) / gates if gates else 0.0
    return {
        "setting": experiment.setting,
        "seed": experiment.seed,
        "corpus": experiment.corpus,
        "loss": record[corpus.loss]["report"] if corpus.loss else last["validation_loss"],
        "depth": last["validation_depth"],
        "shares": shares,
        "halted": 1.0 - shares[-1],
        "most": max(shares),
        "gates_closed": closed,
        **costs(experiment, shares),
        "record": record,
    }


@dataclass(frozen=True)
class Evidence:
    """The queue, all records and the content of ``claims.yaml``; methods take a setting's name, or its alias there.

    ``noise_of`` selects the noise that gives confidence intervals: ``stable`` (pooled over settings that do not
    collapse to one depth), ``all`` (pooled over all settings), or ``pair`` (each compared pair by itself).
    """

    queue: Queue
    records: Sequence[Mapping[str, Any]]
    claims: Mapping[str, Any]
    noise_of: str = "stable"

    @cached_property
    def settings(self) -> dict[str, Experiment]:
        """Maps each setting's name to its first run in the queue."""
        return {run.setting: run for run in reversed(self.queue.experiments)}

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Returns one row per record of a setting (:func:`row_of`); repetitions come after the first run of a seed."""
        seeds, rows = sorted({run.seed for run in self.queue.experiments}), []
        for run in self.settings.values():
            corpus = self.queue.corpora[run.corpus]
            for one in map(run.with_seed, seeds):
                rows += [row_of(one, record, corpus) for record in records_of(one, self.records, corpus)]
        return pd.DataFrame(rows)

    @cached_property
    def _first(self) -> dict[str, pd.DataFrame]:
        """Maps each setting to its rows of :attr:`runs`, indexed by seed, without repetitions."""
        first = self.runs.drop_duplicates(["setting", "seed"]).set_index("seed")
        return {str(setting): runs for setting, runs in first.groupby("setting")}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Maps each alias to a setting; an alias of several settings, to the best of them."""
        return {
            alias: self._best(setting) if isinstance(setting, list) else setting
            for alias, setting in self.claims["runs"].items()
        }

    def _best(self, settings: Sequence[str]) -> str:
        """Returns the setting whose seed 0 has the lowest loss on the half ``choose``; the first if none has run."""
        first = {name: self._first[name].record.get(0) for name in settings if name in self._first}
        known = {name: record["final"]["choose"] for name, record in first.items() if record and "final" in record}
        return min(known, key=lambda name: known[name]) if known else settings[0]

    def setting(self, name: str) -> str:
        """Returns the setting that ``name`` names or is an alias of; raises if the queue does not have it."""
        setting = self.aliases.get(name, name)
        if setting not in self.settings:
            raise InputError(f"{setting}: no run of the queue is called so; python -m experiments list shows them")
        return setting

    def run(self, name: str) -> Experiment:
        """Returns the setting's first run in the queue, whether or not it has a record."""
        return self.settings[self.setting(name)]

    def parameters(self, name: str) -> Parameters:
        config, shape, _ = model_of(self.run(name).recipe, _changes(self.run(name)))
        return parameters_of(config, shape=shape)

    def points(self, name: str) -> pd.DataFrame:
        """Returns the setting's rows of :attr:`runs`, indexed by seed, without repetitions."""
        setting = self.setting(name)
        return self._first[setting] if setting in self._first else self.runs.iloc[:0].set_index("seed")

    def values(self, name: str, of: str = "loss") -> pd.Series:
        """Returns the column ``of`` of :meth:`points`."""
        return self.points(name).loc[:, of].astype(float)

    def mean(self, name: str, of: str) -> float:
        return float(self.values(name, of).mean())

    def noise(self, *names: str, pooled: str | None = None) -> Noise | None:
        """Returns the noise of one run, pooled over the corpus of the settings ``names``; ``None`` if no pool fits."""
        corpora = {self.settings[self.setting(name)].corpus for name in names}
        noise_of = pooled or self.noise_of
        if noise_of == "pair" or len(corpora) != 1:
            return None
        noise, left_out = self.pools[corpora.pop()][noise_of]
        return None if left_out & {self.setting(name) for name in names} else noise

    @cached_property
    def pools(self) -> dict[str, dict[str, tuple[Noise | None, set[str]]]]:
        """Returns ``{corpus: {noise_of: (noise, settings left out of the pool)}}``; see ``ONE_DEPTH``."""
        pools = {}
        for corpus in self.queue.corpora:
            first = self.runs[self.runs.corpus == corpus].drop_duplicates(["setting", "seed"])
            losses, most = first.pivot_table("loss", "setting", "seed"), first.groupby("setting").most
            collapsed = set(losses.index[(most.max() > ONE_DEPTH) & (most.min() < 1)])
            stable = losses.drop(index=list(collapsed))
            pools[corpus] = {"stable": (two_way(stable), collapsed), "all": (two_way(losses), set())}
        return pools

    def minus(self, first: str, second: str, of: str = "loss") -> Estimate | None:
        """Estimates the column ``of`` of the first setting minus that of the second, over their common seeds."""
        noise = self.noise(first, second) if of == "loss" else None
        return estimate(self.values(first, of) - self.values(second, of), noise)

    def has_all(self, experiment: Experiment) -> bool:
        """Returns whether the run has a record with all measurements of its claim."""
        return record_of(experiment, self.records, self.queue.corpora[experiment.corpus]) is not None

    @cached_property
    def done(self) -> set[str]:
        """Returns the labels of runs whose records hold all measurements of every claim."""
        waiting = {run.label for run in self.queue.experiments if not self.has_all(run)}
        return {run.label for run in self.queue.experiments} - waiting

    def title(self, name: str) -> str:
        """Returns a setting in words: its title in the claims, or else its recipe and changes without learning rate."""
        titles = self.claims["titles"]
        return titles[name] if name in titles else self._in_words(self.settings[self.aliases.get(name, name)])

    def _in_words(self, run: Experiment) -> str:
        words = [self.claims["titles"].get(run.recipe, run.recipe)]
        for change in run.changes:
            field, _, value = change.replace('"', "").partition("=")
            if field == "model.iterations" and "K = " in words[0]:
                words[0] = re.sub(r"K = \d+", f"K = {value}", words[0])
            elif field != "train.lr":
                form = self.claims["changes"].get(field, "{name} {value}")
                words.append(form.format(name=field.partition(".")[2], value=value))
        if run.source is not None:
            words.append(f"continued from {self._in_words(run.source)}")
        return ", ".join(words)

    def _with(self, name: str, measurement: str) -> pd.DataFrame:
        """Returns each seed's first run that completed ``measurement``, with the column ``result``; indexed by seed."""
        runs = self.runs[self.runs.setting == self.setting(name)]
        results = runs.record.map(lambda record: record.get("measured", {}).get(measurement, {"missing": ""}))
        runs = runs.assign(result=results).loc[results.map(lambda result: "missing" not in result).astype(bool)]
        return runs.drop_duplicates("seed").set_index("seed").sort_index()

    def measured(self, name: str, measurement: str) -> dict[int, Mapping[str, Any]]:
        """Returns ``{seed: result}`` of a measurement, from the first run of each seed that completed it."""
        return dict(self._with(name, measurement).result.items())

    def rerun_differences(self, names: Sequence[str], weights: str) -> list[float]:
        """Returns, for each setting with two runs of seed 0, the second's loss minus the first's, on all documents."""
        runs = [self.runs[(self.runs.setting == self.setting(name)) & (self.runs.seed == 0)] for name in names]
        losses = [[record[weights]["loss"] for record in pair.record[:2]] for pair in runs if len(pair) > 1]
        return [second - first for first, second in losses]

    def over_curve(
        self, name: str, curve: Sequence[str], of: str = "depth", depth: float | None = None
    ) -> Estimate | None:
        """Estimates a setting's loss minus the loss of ``curve`` at equal ``of``: ``depth``, ``mflops`` or ``ratio``.

        With ``depth`` the dial turns the checkpoints to this mean depth. A seed counts if the neighbouring models of
        the curve have run with it. The standard error is that of a difference of two runs (a point on a line has less
        noise); with ``depth``, that of the spread over seeds, since the dial adds noise of its own.
        """
        points = self.points(name)
        spots = dict(zip(points.index, zip(points[of], points.loss, strict=True), strict=True))
        spots = spots if depth is None else self._turned(name, depth, of)
        values = {seed: (loss, self._on_curve(curve, seed, x, of)) for seed, (x, loss) in spots.items()}
        over = {seed: loss - value for seed, (loss, value) in values.items() if value is not None}
        return estimate(over, self.noise(name, *curve) if depth is None else None)

    def _on_curve(self, curve: Sequence[str], seed: Any, x: float, of: str) -> float | None:
        """Interpolates a seed's loss on the curve at ``of = x``; ``None`` if a neighbour lacks the seed."""
        models = pd.concat([self.points(name) for name in curve])
        ends = sorted(models[of])
        around = [end for end in ends if end <= x][-1:] + [end for end in ends if end >= x][:1]
        own = models[models.index == seed]
        line = list(zip(own[of], own.loss, strict=True))
        return at_depth(line, x) if around and set(around) <= {end for end, _ in line} else None

    def dialled(self, name: str) -> dict[int, list[tuple[float, float, float]]]:
        """Returns by seed (mean depth, FLOPs ratio, loss) of the checkpoint at each depth to which the dial turned it.

        The dial is measured on a part of the validation text. Its losses are shifted so that the checkpoint without the
        dial has the loss of :attr:`runs`.
        """
        turned = {}
        for seed, run in self._with(name, "dial").iterrows():
            rows = [row for row in run.result["rows"] if row["budget"] is not None]
            shift = run.loss - run.result["own"]["loss"]
            turned[seed] = [(row["depth"], row["flops_ratio"], row["loss"] + shift) for row in rows]
        return turned

    def _turned(self, name: str, depth: float, of: str) -> dict[int, tuple[float, float]]:
        """Returns by seed (``of``, loss) of the checkpoint turned to ``depth``; only seeds whose dial came near it.

        Some depths are out of reach: no threshold gives PonderNet a mean between one and two iterations.
        """
        spots = {}
        for seed, turned in self.dialled(name).items():
            if any(abs(at - depth) <= _NEAR for at, _, _ in turned):
                loss = at_depth([(at, value) for at, _, value in turned], depth)
                x = depth if of == "depth" else at_depth([(at, ratio) for at, ratio, _ in turned], depth)
                spots |= {} if loss is None or x is None else {seed: (x, loss)}
        return spots


_FIELDS = {"runs", "statements", "titles", "changes", "against", "questions"}
_FIELDS |= {"tables", "curve", "frontier", "dials", "full", "leaderboard", "line"}
_STATEMENT = {"claim", "where", "says", "paper", "fixed", "tests"}


def read_claims(path: Path) -> Mapping[str, Any]:
    """Reads ``claims.yaml``: the statements of the paper and ours, their tests, and the rows of the tables."""
    claims = read_yaml(path, InputError)
    problems = [f"{field} is missing" for field in sorted(_FIELDS - claims.keys())]
    for statement in claims.get("statements", ()):
        problems += [f"statements: {field} is missing" for field in sorted(_STATEMENT - statement.keys())]
    if not problems:
        lists = [table["rows"] for table in claims["tables"].values()]
        lists += [claims[field] for field in ("curve", "frontier", "dials", "leaderboard", "line")]
        named = {alias for rows in lists for alias in rows} | {*claims["against"].values(), claims["full"]}
        problems = [f"{alias}: no such alias under runs" for alias in sorted(named - set(claims["runs"]))]
    if problems:
        raise InputError(f"{path}: {problems[0]}; see experiments/claims.yaml")
    return claims
