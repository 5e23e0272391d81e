"""Losses, depths and costs of the queue's runs by setting and seed, from the records, and the claims they test."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adaponder.backbones.shape import Shape, shape_of
from adaponder.config import AdaPonderConfig
from adaponder.errors import InputError
from adaponder.files import read_yaml
from adaponder.methods.cost import Parameters, cost_of, parameters_of, training_flops
from adaponder.recipes import load_recipe
from adaponder.training.build import config_of
from experiments.queue import Corpus, Experiment, Queue
from experiments.records import record_of, records_of
from experiments.statistics import at_depth

# How far a measured depth may lie from the depth that a dial is compared at: budgets are 0.25 apart.
_NEAR = 0.15
# Windows that a cost is the mean of: enough for four digits.
_WINDOWS = 16


# --- costs ----------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Compute of a model.

    Attributes:
        mflops: of one token at inference, halted tokens skipped.
        ratio: the same relative to the plain decoder of the same shape.
        training: PFLOP of the whole training: dense, forward and backward, nothing computed twice.
    """

    mflops: float
    ratio: float
    training: float


def costs(experiment: Experiment, shares: Sequence[float]) -> Cost:
    """Returns the cost of a run whose tokens have these shares of depths, over one window of its recipe."""
    mflops, ratio, training = _window_costs(*_model_of(experiment), tuple(round(share, 4) for share in shares))
    return Cost(mflops, ratio, training * experiment.tokens / 1e9)


def model_parameters(experiment: Experiment) -> Parameters:
    config, shape, _ = _model(*_model_of(experiment))
    return parameters_of(config, shape=shape)


def _model_of(experiment: Experiment) -> tuple[str, tuple[str, ...]]:
    """Returns the recipe and the changes that decide the model; runs that differ in training alone share them."""
    return experiment.recipe, tuple(change for change in experiment.changes if not change.startswith("train."))


@cache
def _model(recipe: str, changes: tuple[str, ...]) -> tuple[AdaPonderConfig, Shape, int]:
    """Returns the config of a recipe's model, its shape and the length of a window."""
    loaded = load_recipe(recipe, changes)
    config = config_of(loaded)
    assert config is not None  # a backbone by its shape, not by the name of a checkpoint
    return config, shape_of(config), loaded.data.sequence


@cache
def _window_costs(recipe: str, changes: tuple[str, ...], shares: tuple[float, ...]) -> tuple[float, float, float]:
    """Returns (MFLOP per token, ratio to the plain decoder, MFLOP per token of a training step)."""
    config, shape, length = _model(recipe, changes)
    # Depths in these shares, spread evenly over the windows: a multiple of the golden ratio visits all parts alike.
    place = torch.arange(_WINDOWS * length, dtype=torch.float64) * 0.6180339887498949 % 1.0
    bounds = itertools.accumulate(shares[:-1])
    depths = sum(((place >= bound).long() for bound in bounds), torch.ones(len(place), dtype=torch.long))
    skipping = cost_of(depths.view(_WINDOWS, length), config, shape=shape)
    training = training_flops(config, sequence=length, shape=shape)
    return skipping.flops / len(depths) / 1e6, skipping.ratio, training / 1e6


# --- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One run as its record has it.

    Attributes:
        loss: what the run is judged by.
        depth: mean depth of the validation tokens.
        shares: shares of the validation tokens by depth, 1 … K.
    """

    experiment: Experiment
    record: Mapping[str, Any]
    loss: float
    depth: float
    shares: tuple[float, ...]

    @cached_property
    def cost(self) -> Cost:
        return costs(self.experiment, self.shares)

    @property
    def halted(self) -> float:
        """Returns the share of tokens below full depth."""
        return 1.0 - self.shares[-1]

    @property
    def gates_closed(self) -> float:
        """Returns the share of (token, gate) pairs in which the gate is closed or was not reached."""
        gates = len(self.shares) - 1
        return sum(share * (gates - i) for i, share in enumerate(self.shares)) / gates if gates else 0.0

    @property
    def collapsed(self) -> bool:
        """Returns whether 99 % of the tokens have one depth."""
        return max(self.shares) > 0.99

    def get(self, name: str) -> float:
        """Returns a number of the run: an attribute, or one of its :class:`Cost`."""
        return getattr(self.cost if name in Cost._fields else self, name)


def point_of(experiment: Experiment, record: Mapping[str, Any], corpus: Corpus) -> Point:
    last = record["validation"][-1]
    loss = record[corpus.loss]["report"] if corpus.loss else last["validation_loss"]
    shares = tuple(after - before for before, after in pairwise([0.0, *last["validation_halted"], 1.0]))
    return Point(experiment, record, loss, last["validation_depth"], shares)


@dataclass(frozen=True)
class Evidence:
    """All records by the setting and the seed of the queue's runs, and the content of ``claims.yaml``.

    Methods take the name of a setting, or its alias in the claims.
    """

    queue: Queue
    records: Sequence[Mapping[str, Any]]
    claims: Mapping[str, Any]

    @cached_property
    def settings(self) -> dict[str, Experiment]:
        """Maps each setting's name to one of its runs."""
        return {run.setting: run for run in reversed(self.queue.experiments)}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Maps each alias to a setting; of several settings, to the one with the lowest loss on the half ``choose``."""
        return {
            alias: self._best(setting) if isinstance(setting, list) else setting
            for alias, setting in self.claims["runs"].items()
        }

    def _best(self, settings: Sequence[str]) -> str:
        """Returns the best setting by its seed 0, or the first if none has run."""
        tried = {name: self._runs_of(name)[0][0].record for name in settings if 0 in self._runs_of(name)}
        known = {name: record["final"]["choose"] for name, record in tried.items() if "final" in record}
        return min(known, key=lambda name: known[name]) if known else settings[0]

    def runs(self, name: str) -> dict[int, list[Point]]:
        """Returns all runs of each seed of a setting, several where a seed was trained again."""
        return self._runs_of(self.aliases.get(name, name))

    def _runs_of(self, setting: str) -> dict[int, list[Point]]:
        if setting not in self.settings:
            raise InputError(f"{setting}: no run of the queue is called so; python -m experiments list shows them")
        if setting not in self._found:
            run = self.settings[setting]
            corpus = self.queue.corpora[run.corpus]
            by_seed = {seed: records_of(run.with_seed(seed), self.records, corpus) for seed in self._seeds}
            self._found[setting] = {
                seed: [point_of(run, record, corpus) for record in records]
                for seed, records in by_seed.items()
                if records
            }
        return self._found[setting]

    @cached_property
    def _found(self) -> dict[str, dict[int, list[Point]]]:
        return {}

    @cached_property
    def _seeds(self) -> list[int]:
        return sorted({run.seed for run in self.queue.experiments})

    def points(self, name: str) -> dict[int, Point]:
        """Returns the first run of each seed of a setting."""
        return {seed: runs[0] for seed, runs in self.runs(name).items()}

    def values(self, name: str, of: str = "loss") -> dict[int, float]:
        """Returns one number per seed: ``loss``, ``depth``, ``mflops``, ``ratio`` or ``training``."""
        return {seed: point.get(of) for seed, point in self.points(name).items()}

    def point(self, experiment: Experiment) -> Point | None:
        """Returns the run if its record holds all measurements of the claim."""
        corpus = self.queue.corpora[experiment.corpus]
        record = record_of(experiment, self.records, corpus)
        return None if record is None else point_of(experiment, record, corpus)

    @cached_property
    def done(self) -> set[str]:
        """Returns the labels of runs whose records hold all measurements of every claim."""
        waiting = {run.label for run in self.queue.experiments if self.point(run) is None}
        return {run.label for run in self.queue.experiments} - waiting

    @cached_property
    def used(self) -> set[str]:
        """Returns the file names of records that belong to a run of the queue."""
        every = [point for name in self.settings for runs in self.runs(name).values() for point in runs]
        return {point.record["file"] for point in every}

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

    # --- measurements and curves ------------------------------------------------------------------------------------

    def measured(self, name: str, measurement: str) -> dict[int, Mapping[str, Any]]:
        """Returns a measurement by seed, where it was made, from the first run that has it whole."""
        runs = self._measured_runs(name, measurement)
        return {seed: point.record["measured"][measurement] for seed, point in runs.items()}

    def _measured_runs(self, name: str, measurement: str) -> dict[int, Point]:
        first: dict[int, Point] = {}
        for seed, runs in sorted(self.runs(name).items()):
            for run in runs:
                result = run.record.get("measured", {}).get(measurement)
                if result is not None and "missing" not in result:
                    first.setdefault(seed, run)
        return first

    def rerun_differences(self, names: Sequence[str], weights: str) -> list[float]:
        """Returns the difference between the first two runs of seed 0 of each setting, on all documents."""
        pairs = [self.runs(name).get(0, [])[:2] for name in names]
        losses = [[point.record[weights]["loss"] for point in pair] for pair in pairs if len(pair) == 2]
        return [second - first for first, second in losses]

    def over_curve(self, name: str, curve: Sequence[str], of: str = "depth") -> dict[int, float]:
        """Returns by seed the loss minus the curve of separately trained models at equal ``depth`` or ``mflops``.

        Only where the curve's models on both sides have that seed.
        """
        points = self.points(name)
        values = {seed: self._on_curve(curve, seed, point.get(of), of) for seed, point in points.items()}
        return {seed: points[seed].loss - value for seed, value in values.items() if value is not None}

    def _on_curve(self, curve: Sequence[str], seed: int, x: float, of: str) -> float | None:
        """Interpolates the curve's loss at ``x`` for this seed; ``None`` if a neighbour lacks the seed."""
        models = [self.points(name) for name in curve]
        ends = sorted({point.get(of) for points in models for point in points.values()})
        around = [end for end in ends if end <= x][-1:] + [end for end in ends if end >= x][:1]
        line = [(points[seed].get(of), points[seed].loss) for points in models if seed in points]
        return at_depth(line, x) if around and set(around) <= {end for end, _ in line} else None

    def dialled(self, name: str) -> dict[int, list[tuple[float, float, float]]]:
        """Returns by seed (mean depth, FLOPs ratio, loss) of one checkpoint turned by the dial.

        The dial is turned on a part of the validation's text; losses are that checkpoint's validation loss plus how far
        the dial is from its own depths there.
        """
        turned = {}
        for seed, point in self._measured_runs(name, "dial").items():
            dial = point.record["measured"]["dial"]
            rows = [row for row in dial["rows"] if row["budget"] is not None]
            shift = point.loss - dial["own"]["loss"]
            turned[seed] = [(row["depth"], row["flops_ratio"], row["loss"] + shift) for row in rows]
        return turned

    def dial_over_curve(self, name: str, curve: Sequence[str], depth: float, of: str = "depth") -> dict[int, float]:
        """Returns by seed the dial's loss at a mean depth minus the curve's at equal ``depth`` or ``ratio``.

        Paired by seed; only where a checkpoint was turned to about that depth. Some jump: no threshold gives PonderNet
        a mean between one and two iterations.
        """
        differences = {}
        for seed, turned in self.dialled(name).items():
            if not any(abs(at - depth) <= _NEAR for at, _, _ in turned):
                continue
            loss = at_depth([(at, value) for at, _, value in turned], depth)
            x = depth if of == "depth" else at_depth([(at, ratio) for at, ratio, _ in turned], depth)
            value = None if x is None else self._on_curve(curve, seed, x, of)
            if loss is not None and value is not None:
                differences[seed] = loss - value
        return differences


_ROWS = ("table1", "equal-flops", "readme", "curve", "frontier", "dials", "savings", "true-cost", "seeds")
_FIELDS = {"titles", "changes", "figures", "paper-table1", "paper-table3", "against", "questions", *_ROWS}
_STATEMENT = {"claim", "where", "says", "paper", "fixed", "tests"}


def read_claims(path: Path) -> Mapping[str, Any]:
    """Reads ``claims.yaml``: the statements of the paper and ours, their tests, and the rows of the tables."""
    claims = read_yaml(path, InputError)
    problems = [f"{field} is missing" for field in sorted({"runs", "statements", *_FIELDS} - claims.keys())]
    for statement in claims.get("statements", ()):
        problems += [f"statements: {field} is missing" for field in sorted(_STATEMENT - statement.keys())]
    if not problems:
        named = {alias for rows in _ROWS for alias in claims[rows]} | set(claims["against"].values())
        problems = [f"{alias}: no such alias under runs" for alias in sorted(named - set(claims["runs"]))]
    if problems:
        raise InputError(f"{path}: {problems[0]}; see experiments/claims.yaml")
    return claims
