"""Tabulates the queue's runs from their records: losses, depths and costs by setting and seed; reads the claims."""

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

# How far a measured depth may lie from the depth that a dial is compared at: budgets are 0.25 apart.
_NEAR = 0.15
# Windows that a cost is the mean of: enough for four digits.
_WINDOWS = 16
# A setting's noise is not pooled if in some seed more than this share of its tokens has one depth, unless all of them
# have in every seed (a fixed depth). The rule was fixed on 2026-11-19, after the runs on the mixed corpus.
ONE_DEPTH = 0.95


def _changes(experiment: Experiment) -> tuple[str, ...]:
    """Returns the changes that decide the model; runs that differ in training alone share them."""
    return tuple(change for change in experiment.changes if not change.startswith("train."))


@cache
def model_of(recipe: str, changes: tuple[str, ...]) -> tuple[AdaPonderConfig, Shape, int]:
    """Returns the config of a recipe's model, its shape and the length of a window."""
    loaded = load_recipe(recipe, changes)
    config = config_of(loaded)
    assert config is not None  # a backbone by its shape, not by the name of a checkpoint
    return config, shape_of(config), loaded.data.sequence


def costs(experiment: Experiment, shares: Sequence[float]) -> dict[str, float]:
    """Returns the compute of a run whose tokens have these shares of depths.

    ``mflops`` of one token at inference, halted tokens skipped; ``ratio`` of it to the plain decoder of the same shape;
    ``training``: PFLOP of the whole training: dense, forward and backward, nothing computed twice.
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

    ``loss`` is what the run is judged by, ``shares`` those of the validation tokens by depth 1 … K. ``gates_closed`` is
    the share of (token, gate) pairs in which the gate is closed or was not reached, ``most`` that of the most frequent
    depth among tokens.
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
    """All records by the setting and the seed of the queue's runs, and the content of ``claims.yaml``.

    Methods take the name of a setting, or its alias in the claims. ``noise_of`` says which noise intervals rest on:
    ``stable`` (pooled over settings that do not collapse), ``all`` (pooled over all), or ``pair`` (of each pair alone).
    """

    queue: Queue
    records: Sequence[Mapping[str, Any]]
    claims: Mapping[str, Any]
    noise_of: str = "stable"

    @cached_property
    def settings(self) -> dict[str, Experiment]:
        """Maps each setting's name to one of its runs."""
        return {run.setting: run for run in reversed(self.queue.experiments)}

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Returns one row per record that belongs to a run, first runs of a seed first; see :func:`row_of`."""
        seeds, rows = sorted({run.seed for run in self.queue.experiments}), []
        for run in self.settings.values():
            corpus = self.queue.corpora[run.corpus]
            for one in map(run.with_seed, seeds):
                rows += [row_of(one, record, corpus) for record in records_of(one, self.records, corpus)]
        return pd.DataFrame(rows)

    @cached_property
    def _first(self) -> dict[str, pd.DataFrame]:
        """Returns by setting the first run of each seed, indexed by seed."""
        first = self.runs.drop_duplicates(["setting", "seed"]).set_index("seed")
        return {str(setting): runs for setting, runs in first.groupby("setting")}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Maps each alias to a setting; of several settings, to the one with the lowest loss on the half ``choose``."""
        return {
            alias: self._best(setting) if isinstance(setting, list) else setting
            for alias, setting in self.claims["runs"].items()
        }

    def _best(self, settings: Sequence[str]) -> str:
        """Returns the best setting by its seed 0, or the first if none has run."""
        first = {name: self._first[name].record.get(0) for name in settings if name in self._first}
        known = {name: record["final"]["choose"] for name, record in first.items() if record and "final" in record}
        return min(known, key=lambda name: known[name]) if known else settings[0]

    def setting(self, name: str) -> str:
        """Returns the setting of an alias; raises if the queue has no such run."""
        setting = self.aliases.get(name, name)
        if setting not in self.settings:
            raise InputError(f"{setting}: no run of the queue is called so; python -m experiments list shows them")
        return setting

    def run(self, name: str) -> Experiment:
        """Returns one of the runs of a setting."""
        return self.settings[self.setting(name)]

    def parameters(self, name: str) -> Parameters:
        """Returns the parameters of a setting's model."""
        config, shape, _ = model_of(self.run(name).recipe, _changes(self.run(name)))
        return parameters_of(config, shape=shape)

    def points(self, name: str) -> pd.DataFrame:
        """Returns the first run of each seed of a setting, indexed by seed."""
        setting = self.setting(name)
        return self._first[setting] if setting in self._first else self.runs.iloc[:0].set_index("seed")

    def values(self, name: str, of: str = "loss") -> pd.Series:
        """Returns one number per seed, a column of :attr:`runs`."""
        return self.points(name).loc[:, of].astype(float)

    def mean(self, name: str, of: str) -> float:
        return float(self.values(name, of).mean())

    def noise(self, *names: str, pooled: str | None = None) -> Noise | None:
        """Returns the noise of a run on the corpus of these settings; ``None`` where it cannot be pooled."""
        corpora = {self.settings[self.setting(name)].corpus for name in names}
        noise_of = pooled or self.noise_of
        if noise_of == "pair" or len(corpora) != 1:
            return None
        noise, left_out = self.pools[corpora.pop()][noise_of]
        return None if left_out & {self.setting(name) for name in names} else noise

    @cached_property
    def pools(self) -> dict[str, dict[str, tuple[Noise | None, set[str]]]]:
        """Returns by corpus and by ``noise_of`` the noise, and the settings that it leaves out; see ``ONE_DEPTH``."""
        pools = {}
        for corpus in self.queue.corpora:
            first = self.runs[self.runs.corpus == corpus].drop_duplicates(["setting", "seed"])
            losses, most = first.pivot_table("loss", "setting", "seed"), first.groupby("setting").most
            collapsed = set(losses.index[(most.max() > ONE_DEPTH) & (most.min() < 1)])
            stable = losses.drop(index=list(collapsed))
            pools[corpus] = {"stable": (two_way(stable), collapsed), "all": (two_way(losses), set())}
        return pools

    def minus(self, first: str, second: str, of: str = "loss") -> Estimate | None:
        """Estimates the difference of two settings over the seeds that both have."""
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
        """Returns the title of an alias or recipe, with the changed fields, except the learning rate."""
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
        """Returns the first run of each seed that has a measurement whole, with it as the column ``result``."""
        runs = self.runs[self.runs.setting == self.setting(name)]
        results = runs.record.map(lambda record: record.get("measured", {}).get(measurement, {"missing": ""}))
        runs = runs.assign(result=results).loc[results.map(lambda result: "missing" not in result).astype(bool)]
        return runs.drop_duplicates("seed").set_index("seed").sort_index()

    def measured(self, name: str, measurement: str) -> dict[int, Mapping[str, Any]]:
        """Returns a measurement by seed, where it was made, from the first run that has it whole."""
        return dict(self._with(name, measurement).result.items())

    def rerun_differences(self, names: Sequence[str], weights: str) -> list[float]:
        """Returns the difference between the first two runs of seed 0 of each setting, on all documents."""
        runs = [self.runs[(self.runs.setting == self.setting(name)) & (self.runs.seed == 0)] for name in names]
        losses = [[record[weights]["loss"] for record in pair.record[:2]] for pair in runs if len(pair) > 1]
        return [second - first for first, second in losses]

    def over_curve(
        self, name: str, curve: Sequence[str], of: str = "depth", depth: float | None = None
    ) -> Estimate | None:
        """Estimates the loss minus the curve of separately trained models at equal ``depth``, ``mflops`` or ``ratio``.

        With ``depth`` the loss is that of the checkpoint turned to this mean depth. A seed counts where the curve's
        models on both sides have it. The error is that of a difference of two runs, since a point on a line has less
        noise; that of the dial, whose thresholds add their own, is of the seeds themselves.
        """
        points = self.points(name)
        spots = dict(zip(points.index, zip(points[of], points.loss, strict=True), strict=True))
        spots = spots if depth is None else self._turned(name, depth, of)
        values = {seed: (loss, self._on_curve(curve, seed, x, of)) for seed, (x, loss) in spots.items()}
        over = {seed: loss - value for seed, (loss, value) in values.items() if value is not None}
        return estimate(over, self.noise(name, *curve) if depth is None else None)

    def _on_curve(self, curve: Sequence[str], seed: Any, x: float, of: str) -> float | None:
        """Interpolates the curve's loss at ``x`` for this seed; ``None`` if a neighbour lacks the seed."""
        models = pd.concat([self.points(name) for name in curve])
        ends = sorted(models[of])
        around = [end for end in ends if end <= x][-1:] + [end for end in ends if end >= x][:1]
        own = models[models.index == seed]
        line = list(zip(own[of], own.loss, strict=True))
        return at_depth(line, x) if around and set(around) <= {end for end, _ in line} else None

    def dialled(self, name: str) -> dict[int, list[tuple[float, float, float]]]:
        """Returns by seed (mean depth, FLOPs ratio, loss) of one checkpoint turned by the dial.

        The dial is turned on a part of the validation's text; losses are that checkpoint's validation loss plus how far
        the dial is from its own depths there.
        """
        turned = {}
        for seed, run in self._with(name, "dial").iterrows():
            rows = [row for row in run.result["rows"] if row["budget"] is not None]
            shift = run.loss - run.result["own"]["loss"]
            turned[seed] = [(row["depth"], row["flops_ratio"], row["loss"] + shift) for row in rows]
        return turned

    def _turned(self, name: str, depth: float, of: str) -> dict[int, tuple[float, float]]:
        """Returns by seed ``of`` and the loss of the checkpoint turned to ``depth``, where the dial came near it.

        Some jump: no threshold gives PonderNet a mean between one and two iterations.
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
