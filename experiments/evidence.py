"""Tabulates losses, depths and costs of the runs in ``queue.yaml`` from their records, and reads ``claims.yaml``."""

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
from experiments.runner import record_of, records_of
from experiments.statistics import Estimate, Noise, at_depth, estimate, two_way

# A checkpoint is compared at a depth if the dial reached a mean depth this near to it: its budgets are 0.25 apart.
_NEAR = 0.15
# Sequences over which the cost per token is averaged: enough for four digits.
_WINDOWS = 16
# A setting has collapsed if in some seed more than this share of the tokens has one depth, unless in every seed all
# tokens have (a fixed depth). The rule was fixed on 2026-11-19, after the runs on the mixed corpus.
ONE_DEPTH = 0.95


@cache
def _model(recipe: str, changes: tuple[str, ...]) -> tuple[AdaPonderConfig, Shape, int]:
    """Returns the config and the shape of a recipe's model, and the number of tokens per sequence."""
    loaded = load_recipe(recipe, [change for change in changes if not change.startswith("train.")])
    config = config_of(loaded)
    assert config is not None  # a backbone by its shape, not by the name of a checkpoint
    return config, shape_of(config), loaded.data.sequence


@cache
def costs(experiment: Experiment, shares: tuple[float, ...]) -> dict[str, float]:
    """Returns the compute of a run; ``shares[d - 1]`` is the share of tokens with depth d.

    ``mflops``: MFLOP per token at inference, which skips halted tokens; ``ratio``: those MFLOP divided by the plain
    decoder's; ``training``: PFLOP of the dense training, forward and backward, without recomputation.
    """
    config, shape, length = _model(experiment.recipe, experiment.changes)
    # Depths with these shares at positions that multiples of the golden ratio spread evenly over the windows.
    spread = torch.arange(_WINDOWS * length, dtype=torch.float64) * 0.6180339887498949 % 1.0
    bounds = itertools.accumulate(round(share, 4) for share in shares[:-1])
    depths = sum(((spread >= bound).long() for bound in bounds), torch.ones(len(spread), dtype=torch.long))
    skipping = cost_of(depths.view(_WINDOWS, length), config, shape=shape)
    training = training_flops(config, sequence=length, shape=shape)
    if config.exit_threshold == 1.0 and not config.exit_prior_weight:
        # Exits are never taken: the loss needs only the logits of the last iteration.
        scored = method_class(config.method).states_scored(config.iterations)
        training -= 3 * (scored - 1) * 2 * shape.vocabulary * shape.hidden
    mflops, per_token = skipping.flops / len(depths) / 1e6, training / 1e6
    return {"mflops": mflops, "ratio": skipping.ratio, "training": per_token * experiment.tokens / 1e9}


def row_of(experiment: Experiment, record: Mapping[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Returns the row of the table :attr:`Evidence.runs` that describes a record.

    ``loss`` is the validation loss that ``corpus.loss`` selects; ``shares`` are the shares of validation tokens with
    depth 1 … K, ``most`` the largest of them. ``gates_closed``: closed or unreached gates, as a share of all.
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
        **costs(experiment.with_seed(0), shares),  # a seed changes no cost
        "record": record,
    }


@dataclass(frozen=True)
class Evidence:
    """The queue, all records and the content of ``claims.yaml``; methods take the name of a setting or an alias.

    ``noise_of`` selects the settings whose noise gives confidence intervals: ``stable`` (those of the corpus that have
    not collapsed, see ``ONE_DEPTH``), ``all`` (those of the corpus), or ``pair`` (only the two compared settings).
    """

    queue: Queue
    records: Sequence[Mapping[str, Any]]
    claims: Mapping[str, Any]
    noise_of: str = "stable"

    @cached_property
    def settings(self) -> dict[str, Experiment]:
        """Maps the name of each setting to its first run in the queue."""
        return {run.setting: run for run in reversed(self.queue.experiments)}

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Returns one row (:func:`row_of`) per record of a run in the queue; reruns follow the first run."""
        seeds = sorted({run.seed for run in self.queue.experiments})
        runs = [run.with_seed(seed) for run in self.settings.values() for seed in seeds]
        corpora = self.queue.corpora
        pairs = ((run, record) for run in runs for record in records_of(run, self.records, corpora[run.corpus]))
        return pd.DataFrame([row_of(run, record, corpora[run.corpus]) for run, record in pairs])

    @cached_property
    def _first(self) -> dict[str, pd.DataFrame]:
        """Maps each setting to its rows of :attr:`runs`, indexed by seed, without reruns."""
        first = self.runs.drop_duplicates(["setting", "seed"]).set_index("seed")
        return {str(setting): runs for setting, runs in first.groupby("setting")}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Maps each alias to the name of its setting, or of the best of its settings (:meth:`_best`)."""
        return {
            alias: self._best(setting) if isinstance(setting, list) else setting
            for alias, setting in self.claims["runs"].items()
        }

    def _best(self, settings: Sequence[str]) -> str:
        """Returns the setting with the lowest loss of seed 0 on the half ``choose``; the first, if none has a loss."""
        first = {name: self._first[name].record.get(0) for name in settings if name in self._first}
        known = {name: record["final"]["choose"] for name, record in first.items() if record and "final" in record}
        return min(known, key=lambda name: known[name]) if known else settings[0]

    def setting(self, name: str) -> str:
        """Returns the name of a setting, given its name or an alias; raises if the queue has no such setting."""
        setting = self.aliases.get(name, name)
        if setting not in self.settings:
            raise InputError(f"{setting}: no such setting in the queue; python -m experiments list shows all")
        return setting

    def run(self, name: str) -> Experiment:
        """Returns the setting's first run in the queue, whether or not it has a record."""
        return self.settings[self.setting(name)]

    def parameters(self, name: str) -> Parameters:
        config, shape, _ = _model(self.run(name).recipe, self.run(name).changes)
        return parameters_of(config, shape=shape)

    def points(self, name: str) -> pd.DataFrame:
        """Returns the first run of each seed of a setting: rows of :attr:`runs`, indexed by seed."""
        setting = self.setting(name)
        return self._first[setting] if setting in self._first else self.runs.iloc[:0].set_index("seed")

    def values(self, name: str, column: str = "loss") -> pd.Series:
        """Returns a column of the table :meth:`points`, as floats by seed."""
        return self.points(name).loc[:, column].astype(float)

    def mean(self, name: str, column: str) -> float:
        return float(self.values(name, column).mean())

    def noise(self, *names: str) -> Noise | None:
        """Returns the pooled noise of the corpus of these settings.

        Returns ``None`` if ``noise_of`` is ``pair``, if the corpora differ, or if the pool leaves out a setting.
        """
        corpora = {self.settings[self.setting(name)].corpus for name in names}
        if self.noise_of == "pair" or len(corpora) != 1:
            return None
        noise, left_out = self.pools[corpora.pop()][self.noise_of]
        return None if left_out & {self.setting(name) for name in names} else noise

    @cached_property
    def pools(self) -> dict[str, dict[str, tuple[Noise | None, set[str]]]]:
        """Returns ``{corpus: {noise_of: (pooled noise, collapsed settings left out)}}``; see ``ONE_DEPTH``."""
        pools = {}
        for corpus in self.queue.corpora:
            first = self.runs[self.runs.corpus == corpus].drop_duplicates(["setting", "seed"])
            losses, most = first.pivot_table("loss", "setting", "seed"), first.groupby("setting").most
            collapsed = set(losses.index[(most.max() > ONE_DEPTH) & (most.min() < 1)])
            stable = losses.drop(index=list(collapsed))
            pools[corpus] = {"stable": (two_way(stable), collapsed), "all": (two_way(losses), set())}
        return pools

    def minus(self, first: str, second: str, column: str = "loss") -> Estimate | None:
        """Estimates ``column`` of the first setting minus ``column`` of the second, over their common seeds."""
        noise = self.noise(first, second) if column == "loss" else None
        return estimate(self.values(first, column) - self.values(second, column), noise)

    def has_all(self, experiment: Experiment) -> bool:
        """Returns whether the run has a record with all measurements that its claim needs."""
        return record_of(experiment, self.records, self.queue.corpora[experiment.corpus]) is not None

    @cached_property
    def done(self) -> set[str]:
        """Returns the labels of runs whose records hold all measurements of every claim."""
        waiting = {run.label for run in self.queue.experiments if not self.has_all(run)}
        return {run.label for run in self.queue.experiments} - waiting

    def title(self, name: str) -> str:
        """Returns a setting's title in the claims, or else its recipe and its changes except the learning rate."""
        return self.claims["titles"].get(name) or self._in_words(self.run(name))

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

    def _runs_with(self, name: str, measurement: str) -> pd.DataFrame:
        """Returns the first run of each seed that completed ``measurement``, by seed, with the column ``result``."""
        runs = self.runs[self.runs.setting == self.setting(name)]
        results = runs.record.map(lambda record: record.get("measured", {}).get(measurement, {"missing": ""}))
        runs = runs.assign(result=results).loc[results.map(lambda result: "missing" not in result).astype(bool)]
        return runs.drop_duplicates("seed").set_index("seed").sort_index()

    def measured(self, name: str, measurement: str) -> dict[int, Mapping[str, Any]]:
        """Returns ``{seed: result}`` of a measurement, from the first run of each seed that completed it."""
        return dict(self._runs_with(name, measurement).result.items())

    def rerun_differences(self, names: Sequence[str], weights: str) -> list[float]:
        """Returns, per setting, the rerun's loss minus the first run's (seed 0, ``final`` or ``averaged`` weights)."""
        runs = [self.runs[(self.runs.setting == self.setting(name)) & (self.runs.seed == 0)] for name in names]
        losses = [[record[weights]["loss"] for record in pair.record[:2]] for pair in runs if len(pair) > 1]
        return [second - first for first, second in losses]

    def over_curve(
        self, name: str, curve: Sequence[str], column: str = "depth", depth: float | None = None
    ) -> Estimate | None:
        """Estimates a setting's loss minus the curve's at an equal ``column``: ``depth``, ``mflops`` or ``ratio``.

        With ``depth``, the dial first tunes the checkpoints to this mean depth. Seeds that a neighbouring model on the
        curve lacks are left out. The standard error is that of a difference of two runs, although an interpolated loss
        has less noise; with ``depth``, it comes from the spread over seeds, because the dial adds noise.
        """
        if depth is None:
            runs = self.points(name)
            points = dict(zip(runs.index, zip(runs[column], runs.loss, strict=True), strict=True))
        else:
            points = self._tuned_to(name, depth, column)
        differences = {}
        for seed, (x, loss) in points.items():
            if (on_curve := self._on_curve(curve, seed, x, column)) is not None:
                differences[seed] = loss - on_curve
        return estimate(differences, self.noise(name, *curve) if depth is None else None)

    def _on_curve(self, curve: Sequence[str], seed: Any, x: float, column: str) -> float | None:
        """Interpolates a seed's loss on the curve where ``column`` is ``x``; ``None`` if a neighbour lacks the seed."""
        models = pd.concat([self.points(name) for name in curve])
        below, above = models[column][models[column] <= x], models[column][models[column] >= x]
        neighbours = {*below.nlargest(1), *above.nsmallest(1)}
        same_seed = models[models.index == seed]
        line = list(zip(same_seed[column], same_seed.loss, strict=True))
        return at_depth(line, x) if neighbours and neighbours <= {*same_seed[column]} else None

    def dialled(self, name: str) -> dict[int, list[tuple[float, float, float]]]:
        """Returns by seed a (mean depth, FLOPs ratio, loss) for each depth to which the checkpoint was tuned.

        The dial is measured on a part of the validation text, so its losses are shifted by the loss in :attr:`runs`
        minus the loss on that part, both with the trained threshold.
        """
        tuned = {}
        for seed, run in self._runs_with(name, "dial").iterrows():
            rows = [row for row in run.result["rows"] if row["budget"] is not None]
            shift = run.loss - run.result["own"]["loss"]
            tuned[seed] = [(row["depth"], row["flops_ratio"], row["loss"] + shift) for row in rows]
        return tuned

    def _tuned_to(self, name: str, depth: float, column: str) -> dict[int, tuple[float, float]]:
        """Returns by seed (``column``, loss) of the checkpoints tuned to ``depth``, if their depth came near it.

        Some depths are out of reach: no threshold gives PonderNet a mean between one and two iterations.
        """
        points = {}
        for seed, tuned in self.dialled(name).items():
            if any(abs(measured - depth) <= _NEAR for measured, _, _ in tuned):
                loss = at_depth([(measured, loss) for measured, _, loss in tuned], depth)
                x = depth if column == "depth" else at_depth([(measured, ratio) for measured, ratio, _ in tuned], depth)
                if loss is not None and x is not None:
                    points[seed] = (x, loss)
        return points


_FIELDS = {"runs", "statements", "titles", "changes", "against", "questions"}
_FIELDS |= {"tables", "curve", "frontier", "dials", "full", "leaderboard", "line"}
_STATEMENT = {"claim", "where", "says", "paper", "fixed", "tests"}


def read_claims(path: Path) -> Mapping[str, Any]:
    """Reads ``claims.yaml`` (statements with their tests, rows of tables); raises if it is incomplete."""
    claims = read_yaml(path, InputError)
    missing = [*sorted(_FIELDS - claims.keys())]
    missing += [field for statement in claims.get("statements", ()) for field in sorted(_STATEMENT - statement.keys())]
    if missing:
        raise InputError(f"{path}: {missing[0]} is missing; see experiments/claims.yaml")
    return claims
