"""The queue of experiments (``experiments/queue.yaml``): which runs each claim needs, most useful first.

The queue holds no state. A run is done when a record of the same recipe, seed and data exists; one that was cut has
none and is repeated.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from adaponder.errors import ConfigError, InputError
from adaponder.files import read_yaml
from adaponder.recipes import FREE_TRAIN, DataRecipe, ModelRecipe, Recipe, TrainRecipe, load_recipe
from adaponder.registry import DEFAULT_METHOD, scale_from_scratch
from adaponder.settings import scale_of

# Fields of data that are left out of the identity: records carry a hash of the data instead.
_BY_HASH = ("source", "tokenizer", "validation")


@dataclass(frozen=True)
class Experiment:
    """One training run of a claim: a recipe, what is changed in it, and a seed."""

    claim: str
    recipe: str
    changes: tuple[str, ...]
    seed: int

    @property
    def label(self) -> str:
        """A name for people, folders and files: ``mini-ponder-k2-lr-0.004-seed-1``."""
        recipe = Path(self.recipe).stem if self.recipe.endswith(".yaml") else self.recipe
        words = "-".join([recipe, *map(_short, self.changes), f"seed-{self.seed}"])
        return re.sub(r"[^A-Za-z0-9._-]+", "-", words)

    def resolved(self, data: Path | str | None = None) -> Recipe:
        """The recipe that is trained, on the shards in ``data``."""
        source = [] if data is None else [f"data.source={data}"]
        return load_recipe(self.recipe, [*self.changes, f"train.seed={self.seed}", *source])


@dataclass(frozen=True)
class Queue:
    """The content of the queue's file.

    Attributes:
        claims: what each claim says.
        experiments: all runs, most useful first.
        data_folder, data_hash, prepare: the prepared corpus, the hash that its records carry, and how it is made.
        hardware, start, iteration: device seconds of a run on this hardware where none like it was timed: to start,
            and for each iteration of 3,000 steps.
    """

    claims: Mapping[str, str]
    experiments: Sequence[Experiment]
    data_folder: str
    data_hash: str
    prepare: str
    hardware: str
    start: float
    iteration: float

    def of_claim(self, claim: str, seeds: Sequence[int] = ()) -> list[Experiment]:
        """The runs of one claim; with ``seeds``, each of its settings with those seeds."""
        if claim not in self.claims:
            raise InputError(f"{claim}: no such claim; choose one of {', '.join(self.claims)}")
        chosen = [each for each in self.experiments if each.claim == claim]
        if not seeds:
            return chosen
        settings = dict.fromkeys((each.recipe, each.changes) for each in chosen)
        return [Experiment(claim, recipe, changes, seed) for seed in seeds for recipe, changes in settings]


def read_queue(path: Path) -> Queue:
    """The queue in a YAML file; every recipe and change in it is checked."""
    if not path.exists():
        raise InputError(f"--queue {path}: there is no such file; a checkout has experiments/queue.yaml")
    raw = read_yaml(path, InputError)
    try:
        data, seconds, claims = raw["data"], raw["seconds"], raw["claims"]
        queue = Queue(
            claims={str(claim): str(says) for claim, says in claims.items()},
            experiments=list(dict.fromkeys(_experiments(raw["runs"], claims))),
            data_folder=data["folder"],
            data_hash=data["hash"],
            prepare=data["prepare"],
            hardware=seconds["hardware"],
            start=float(seconds["start"]),
            iteration=float(seconds["iteration"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"--queue {path}: {type(error).__name__} {error}; see experiments/queue.yaml") from None
    for each in queue.experiments:
        try:
            each.resolved()
        except ConfigError as error:
            raise InputError(f"--queue {path}, claim {each.claim}: {error}") from None
    return queue


def _experiments(entries: Sequence[Mapping[str, Any]], claims: Mapping[str, str]) -> Iterator[Experiment]:
    """An entry is a recipe with what is ``set``, for ``each`` value of further fields, and for each of its seeds."""
    for entry in entries:
        if unknown := set(entry) - {"claim", "recipe", "set", "each", "seeds"}:
            raise ValueError(f"{sorted(unknown)[0]}: no such field of a run")
        if entry["claim"] not in claims:
            raise ValueError(f"claim {entry['claim']} is not among the claims")
        varied = entry.get("each", {})
        for seed in entry.get("seeds", [0]):
            for values in itertools.product(*varied.values()):
                changed = entry.get("set", {}) | dict(zip(varied, values, strict=True))
                changes = tuple(f"{field}={json.dumps(value)}" for field, value in changed.items())
                yield Experiment(entry["claim"], entry["recipe"], changes, seed)


def _short(change: str) -> str:
    """``train.lr=0.004`` as ``lr-0.004``."""
    field, _, value = change.partition("=")
    return f"{field.rpartition('.')[2]}-{value}"


def identity(recipe: Mapping[str, Any]) -> str:
    """A hash of what a recipe computes on given data: equal for equal runs.

    It leaves out names and prose, how often the run logs and saves, where the data is, and fields with their default,
    so that adding a field does not change the identity of older runs.
    """
    model = dict(recipe["model"])
    backbone = model["backbone"]
    if isinstance(backbone, Mapping):
        scale = model.get("embedding_scale") or scale_from_scratch(model.get("method", DEFAULT_METHOD))
        model["embedding_scale"] = scale_of(scale, backbone["hidden_size"]) if isinstance(scale, str) else float(scale)
    decisive = {
        "model": _departures(ModelRecipe, model, ()),
        "data": _departures(DataRecipe, recipe["data"], _BY_HASH),
        "train": _departures(TrainRecipe, recipe["train"], FREE_TRAIN),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _departures(kind: Any, section: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """The fields of a section that differ from their defaults; whole numbers as floats, so that 1 equals 1.0."""
    defaults = {item.name: _plain(item.default) for item in fields(kind)}
    plain = {key: _plain(value) for key, value in section.items() if key not in ignored}
    return {key: value for key, value in plain.items() if value != defaults.get(key)}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
