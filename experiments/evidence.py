"""Losses, depths and costs of the queue's runs by setting and seed, from the records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from adaponder.backbones.shape import Shape, shape_of
from adaponder.config import AdaPonderConfig
from adaponder.errors import InputError
from adaponder.methods.cost import Parameters, cost_of, parameters_of, training_flops
from adaponder.recipes import Recipe, load_recipe
from adaponder.training.build import config_of
from experiments.queue import Experiment, Queue
from experiments.records import record_of, records_of, result
from experiments.statistics import at_depth

# How far a measured depth may lie from the depth that a dial is compared at: budgets are 0.25 apart.
_NEAR = 0.15
# Windows that a cost is the mean of: enough for four digits.
_WINDOWS = 16


class Point(NamedTuple):
    """One run as its record has it.

    Attributes:
        shares: of validation tokens by depth, 1 … K.
        mflops: of one token at inference, halted tokens skipped.
        ratio: the same relative to the plain decoder of the same shape.
        training: PFLOP of the whole training: dense, forward and backward, nothing computed twice.
    """

    seed: int
    loss: float
    depth: float
    shares: tuple[float, ...]
    mflops: float
    ratio: float
    training: float
    record: Mapping[str, Any]

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


class Cost(NamedTuple):
    """FLOPs of a token at inference, in millions and relative to the plain decoder; of all training, in PFLOP."""

    mflops: float
    ratio: float
    training: float


@dataclass(frozen=True)
class Evidence:
    """All records, by the setting and the seed of the queue's runs."""

    queue: Queue
    records: Sequence[Mapping[str, Any]]

    @cached_property
    def settings(self) -> dict[str, Experiment]:
        """Maps each setting's name to one of its runs."""
        return {each.setting: each for each in reversed(self.queue.experiments)}

    def points(self, setting: str) -> dict[int, Point]:
        """Returns the first run of each seed of a setting, on its corpus."""
        return {seed: runs[0] for seed, runs in self.runs(setting).items()}

    def runs(self, setting: str) -> dict[int, list[Point]]:
        """Returns all runs of each seed of a setting, several where a seed was trained again."""
        return self._runs[setting] if setting in self._runs else self._unknown(setting)

    def _unknown(self, setting: str) -> dict[int, list[Point]]:
        raise InputError(f"{setting}: no run of the queue is called so; python -m experiments list shows them")

    @cached_property
    def _runs(self) -> dict[str, dict[int, list[Point]]]:
        seeds = {setting: sorted({each.seed for each in self.queue.experiments}) for setting in self.settings}
        found: dict[str, dict[int, list[Point]]] = {}
        for setting, experiment in self.settings.items():
            corpus = self.queue.corpora[experiment.corpus]
            plain = replace(experiment, measures=(), again=0)
            by_seed = {seed: records_of(plain.with_seed(seed), self.records, corpus) for seed in seeds[setting]}
            found[setting] = {
                seed: [point_of(experiment, record, corpus.loss) for record in records]
                for seed, records in by_seed.items()
                if records
            }
        return found

    def best(self, settings: Sequence[str]) -> str:
        """Returns the setting whose seed 0 has the lowest loss on the half ``choose``; the first if none has run."""
        tried = {name: self.points(name)[0].record for name in settings if 0 in self.points(name)}
        known = {name: record["final"]["choose"] for name, record in tried.items() if "final" in record}
        return min(known, key=lambda name: known[name]) if known else settings[0]

    def rerun_differences(self, settings: Sequence[str], weights: str) -> list[float]:
        """Returns the difference between the first two runs of seed 0 of each setting, on all documents."""
        pairs = [self.runs(setting).get(0, [])[:2] for setting in settings]
        losses = [[point.record[weights]["loss"] for point in pair] for pair in pairs if len(pair) == 2]
        return [second - first for first, second in losses]

    def point(self, experiment: Experiment) -> Point | None:
        """Returns the run if its record holds all measurements of the claim."""
        record = record_of(experiment, self.records, self.queue.corpora[experiment.corpus])
        loss = self.queue.corpora[experiment.corpus].loss
        return None if record is None else point_of(experiment, record, loss)

    @cached_property
    def done(self) -> set[str]:
        """Returns the labels of runs whose records hold all measurements of every claim."""
        labels = {each.label for each in self.queue.experiments}
        return labels - {each.label for each in self.queue.experiments if self.point(each) is None}

    @cached_property
    def used(self) -> set[str]:
        """Returns the file names of records that belong to a run of the queue."""
        return {point.record["file"] for seeds in self._runs.values() for points in seeds.values() for point in points}

    def values(self, setting: str, of: str = "loss") -> dict[int, float]:
        """Returns one number per seed: ``loss``, ``depth``, ``mflops``, ``ratio`` or ``training``."""
        return {seed: getattr(point, of) for seed, point in self.points(setting).items()}

    def measured(self, setting: str, name: str) -> dict[int, Mapping[str, Any]]:
        """Returns a measurement by seed, where it was made."""
        found = self._measured_runs(setting, name)
        return {seed: point.record["measured"][name] for seed, point in found.items()}

    def _measured_runs(self, setting: str, name: str) -> dict[int, Point]:
        """Returns the first run of each seed whose measurement is complete."""
        found = {}
        for seed, runs in self.runs(setting).items():
            whole = [point for point in runs if _is_whole(point.record.get("measured", {}).get(name))]
            if whole:
                found[seed] = whole[0]
        return found

    def over_curve(self, setting: str, curve: Sequence[str], of: str = "depth") -> dict[int, float]:
        """Returns by seed the loss minus the curve of separately trained models at equal ``depth`` or ``mflops``.

        Only where the curve's models on both sides have that seed.
        """
        found = {}
        for seed, point in self.points(setting).items():
            if (value := self._on_curve(curve, seed, getattr(point, of), of)) is not None:
                found[seed] = point.loss - value
        return found

    def _on_curve(self, curve: Sequence[str], seed: int, x: float, of: str) -> float | None:
        """Interpolates the curve's loss at ``x`` for this seed; ``None`` if a neighbour lacks the seed."""
        every = [self.points(each) for each in curve]
        ends = sorted({getattr(point, of) for points in every for point in points.values()})
        around = [end for end in ends if end <= x][-1:] + [end for end in ends if end >= x][:1]
        line = [(getattr(p, of), p.loss) for points in every if (p := points.get(seed))]
        return at_depth(line, x) if around and set(around) <= {end for end, _ in line} else None

    def dialled(self, setting: str) -> dict[int, list[tuple[float, float, float]]]:
        """Returns by seed (mean depth, FLOPs ratio, loss) of one checkpoint turned by the dial.

        The dial is turned on a part of the validation's text; losses are that checkpoint's validation loss plus how far
        the dial is from its own depths there.
        """
        found = {}
        for seed, point in sorted(self._measured_runs(setting, "dial").items()):
            made = point.record["measured"]["dial"]
            shift = point.loss - made["own"]["loss"]
            turned = [row for row in made["rows"] if row["budget"] is not None]
            found[seed] = [(row["depth"], row["flops_ratio"], row["loss"] + shift) for row in turned]
        return found

    def dial_over_curve(self, setting: str, curve: Sequence[str], depth: float, of: str = "depth") -> dict[int, float]:
        """Returns by seed the dial's loss at a mean depth minus the curve's at equal ``depth`` or ``ratio``.

        Paired by seed; only where a checkpoint was turned to about that depth. Some jump: no threshold gives PonderNet
        a mean between one and two iterations.
        """
        found = {}
        for seed, turned in self.dialled(setting).items():
            if not any(abs(at - depth) <= _NEAR for at, _, _ in turned):
                continue
            loss = at_depth([(at, value) for at, _, value in turned], depth)
            x = depth if of == "depth" else at_depth([(at, ratio) for at, ratio, _ in turned], depth)
            value = None if x is None else self._on_curve(curve, seed, x, of)
            if loss is not None and value is not None:
                found[seed] = loss - value
        return found


def _is_whole(made: Mapping[str, Any] | None) -> bool:
    """Returns whether a measurement is complete."""
    return made is not None and "missing" not in made


def point_of(experiment: Experiment, record: Mapping[str, Any], loss: str | None = None) -> Point:
    """Returns the run of a record; ``loss`` is that of :class:`experiments.queue.Corpus`."""
    last = result(record)
    halted = [0.0, *last["validation_halted"], 1.0]
    shares = tuple(after - before for before, after in pairwise(halted))
    recipe = _with_a_shape(experiment)
    cost = costs(recipe, shares)
    return Point(
        seed=record["seed"],
        loss=record[loss]["report"] if loss else last["validation_loss"],
        depth=last["validation_depth"],
        shares=shares,
        mflops=cost.mflops,
        ratio=cost.ratio,
        training=cost.training,
        record=record,
    )


def _with_a_shape(experiment: Experiment) -> Recipe:
    """Returns the run's recipe with the backbone's shape, also where it continues another run."""
    return load_recipe(experiment.recipe, [*experiment.changes, f"train.seed={experiment.seed}"])


def model_parameters(experiment: Experiment) -> Parameters:
    config = _config(_model_key(_with_a_shape(experiment)))
    return parameters_of(config, shape=_shape(config.backbone_config.to_json_string()))


def costs(recipe: Recipe, shares: Sequence[float]) -> Cost:
    """Returns the cost of a model whose tokens have these shares of depths, over one window of the recipe."""
    train, length = recipe.train, recipe.data.sequence
    rounded = tuple(round(share, 4) for share in shares)
    mflops, ratio, training = _window_costs(_model_key(recipe), rounded, length)
    tokens = train.steps * train.global_batch * length
    return Cost(mflops, ratio, training * tokens / 1e9)


def _model_key(recipe: Recipe) -> str:
    """Returns the recipe's ``model`` section and window length as a cache key."""
    values = recipe.as_dict()
    return json.dumps({"model": values["model"], "sequence": recipe.data.sequence}, sort_keys=True)


@cache
def _config(key: str) -> AdaPonderConfig:
    values = json.loads(key)
    base = load_recipe(
        "mini/vanilla", [f"data.sequence={values['sequence']}", f"train.eval_tokens={values['sequence']}"]
    )
    model = replace(base.model, **{name: _tuple(value) for name, value in values["model"].items()})
    config = config_of(replace(base, model=model))
    assert config is not None  # a backbone by its shape, not by the name of a checkpoint
    return config


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _shape(backbone: str) -> Shape:
    """Returns the shape of a backbone from its config as JSON."""
    return shape_of(AdaPonderConfig(backbone_config=json.loads(backbone)))


@cache
def _window_costs(key: str, shares: tuple[float, ...], length: int) -> tuple[float, float, float]:
    """Returns (MFLOP per token, ratio to the plain decoder, MFLOP per token of a training step)."""
    config = _config(key)
    depths = torch.ones(_WINDOWS * length, dtype=torch.long)
    # Depths in these shares, spread evenly over the windows: a multiple of the golden ratio visits all parts alike.
    place = torch.arange(len(depths), dtype=torch.float64) * 0.6180339887498949 % 1.0
    halted = 0.0
    for share in shares[:-1]:
        halted += share
        depths += (place >= halted).long()
    shape = _shape(config.backbone_config.to_json_string())
    skipping = cost_of(depths.view(_WINDOWS, length), config, shape=shape)
    training = training_flops(config, sequence=length, shape=shape)
    return skipping.flops / len(depths) / 1e6, skipping.ratio, training / 1e6
