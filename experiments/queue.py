"""Reads the queue of experiments (``experiments/queue.yaml``): the runs of each claim, most useful first.

The queue holds no state: a run is done when a record of the same recipe, seed and data exists.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from adaponder.errors import ConfigError, InputError
from adaponder.files import read_yaml
from adaponder.recipes import Recipe, load_recipe

# Fields that do not change the trained weights: folder of the data (records hold its hash), logging, saving, compiling.
_FREE = {
    "model": (),
    "data": ("source", "tokenizer", "validation"),
    "train": ("eval_every", "eval_tokens", "save_every", "keep", "log_every", "keep_logits", "compile_by"),
}


def identity(recipe: Mapping[str, Any]) -> str:
    """Hashes the fields of a resolved recipe that affect the trained weights and differ from ``defaults.yaml``.

    A field that is added to recipes is added to that file with its default, so that no existing hash changes.
    """
    model = dict(recipe["model"])
    if isinstance(model["backbone"], Mapping):
        model["embedding_scale"] = _embedding_scale(model)
    decisive: dict[str, dict[str, Any]] = {}
    for section, ignored in _FREE.items():
        values, defaults = {**recipe, "model": model}[section], frozen_defaults()[section]
        plain = {name: _plain(value) for name, value in values.items() if name not in ignored}
        decisive[section] = {name: value for name, value in plain.items() if value != defaults.get(name)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _embedding_scale(model: Mapping[str, Any]) -> float:
    """Returns the factor of the embeddings as a number; a recipe may have text such as ``sqrt(d)``, or no value."""
    scale = model.get("embedding_scale")
    if scale and not isinstance(scale, str):
        return float(scale)
    loop = scale == "sqrt(2.5 d)" or (not scale and model.get("method") == "loop")
    return math.sqrt((2.5 if loop else 1.0) * model["backbone"]["hidden_size"])


@functools.cache
def frozen_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Reads ``{section: {field: default}}`` from ``defaults.yaml``."""
    return read_yaml(Path(__file__).with_name("defaults.yaml"), InputError)


def _plain(value: Any) -> Any:
    """Converts integers to floats, so that 1 and 1.0 give the same hash."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if type(value) is int else value


@dataclass(frozen=True)
class Corpus:
    """A prepared training text, made by the command ``prepare``; ``says`` is its description on the results page.

    Attributes:
        name: empty for the queue's main corpus.
        folder: output of ``adaponder prepare``; ``None`` keeps ``data.source`` of the recipe.
        hash: data hash by which records are matched to this corpus; ``None``: they are matched by ``name``.
        loss: which loss counts for a run: that of its ``final`` or ``averaged`` weights on the ``report`` half of the
            validation documents; ``None``: the last validation loss, over all documents.
    """

    name: str
    folder: str | None
    hash: str | None
    prepare: str
    says: str = ""
    loss: str | None = None

    def trained(self, record: Mapping[str, Any]) -> bool:
        """Returns whether the run of a record was trained on this corpus."""
        return record["data"] == self.hash if self.hash else record.get("corpus") == self.name


@dataclass(frozen=True)
class Experiment:
    """One training run of a claim: a recipe, the changed fields, and a seed.

    Attributes:
        measures: names of measurements on the trained model (``measures.py``).
        corpus: name of the corpus; empty for the queue's main corpus.
        source: the run with the same seed whose final model this run continues, if any.
        again: number of earlier runs with the same recipe, seed and data.
    """

    claim: str
    recipe: str
    changes: tuple[str, ...]
    seed: int
    measures: tuple[str, ...] = ()
    corpus: str = ""
    source: Experiment | None = None
    again: int = 0

    @cached_property
    def setting(self) -> str:
        """Returns the name of the setting, from recipe, changed fields, source and corpus."""
        words = [Path(self.recipe).stem if self.recipe.endswith(".yaml") else self.recipe]
        for change in self.changes:  # train.lr=0.004 becomes lr-0.004
            field, _, value = change.replace('"', "").partition("=")
            words.append(f"{field.rpartition('.')[2]}-{value}")
        words += [] if self.source is None else [f"from-{self.source.setting}"]
        words += [f"on-{self.corpus}"] if self.corpus else []
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words))

    @property
    def label(self) -> str:
        """Returns the name of the run and its folder, such as ``mini-ponder-k2-lr-0.004-seed-1``."""
        return f"{self.setting}-seed-{self.seed}" + (f"-again-{self.again}" if self.again else "")

    def resolved(self, data: Path | str | None = None, runs: Path | None = None) -> Recipe:
        """Returns the recipe with all changes of the run; ``data`` replaces ``data.source`` of the recipe.

        If the run has a source, the backbone is the source's final model in ``runs``, or the text ``from LABEL``.
        """
        changes = [*self.changes, f"train.seed={self.seed}", *([] if data is None else [f"data.source={data}"])]
        if self.source is not None:
            folder = f"from {self.source.label}" if runs is None else str(runs / self.source.label / "final")
            changes.append(f"model.backbone={json.dumps(folder)}")
        return load_recipe(self.recipe, changes)

    @property
    def shaped(self) -> Recipe:
        """Returns the recipe without seed and source; its backbone is a shape, not a trained model."""
        return _load(self.recipe, self.changes)

    @cached_property
    def identity(self) -> str:
        """Returns the hash (:func:`identity`) of the recipe with the seed and the source of this run."""
        continued = () if self.source is None else ('model.backbone="from"',)
        values = _load(self.recipe, (*self.changes, *continued)).as_dict()
        values["train"]["seed"] = self.seed
        if self.source is not None:
            values["model"]["backbone"] = f"from {self.source.label}"
        return identity(values)

    @property
    def tokens(self) -> int:
        """Returns the number of training tokens of this run; those of its source are not counted."""
        train = self.shaped.train
        return train.steps * train.global_batch * self.shaped.data.sequence

    def with_seed(self, seed: int) -> Experiment:
        source = None if self.source is None else self.source.with_seed(seed)
        return replace(self, seed=seed, source=source)


@functools.cache
def _load(recipe: str, changes: tuple[str, ...]) -> Recipe:
    return load_recipe(recipe, changes)


@dataclass(frozen=True)
class Queue:
    """The content of ``queue.yaml``: the sentence of each claim, all runs (most useful first), and corpora by name.

    ``seconds`` serves to estimate runs if no similar run was timed. On ``hardware``, a run takes ``start`` seconds
    before its first step, and ``iteration`` seconds for 3,000 steps with one iteration per token.
    """

    claims: Mapping[str, str]
    experiments: Sequence[Experiment]
    corpora: Mapping[str, Corpus]
    seconds: Mapping[str, Any]

    @property
    def main(self) -> Corpus:
        return self.corpora[""]

    def of_claim(self, claim: str, seeds: Sequence[int] = ()) -> list[Experiment]:
        """Returns the runs of one claim; ``seeds`` replace the queue's seeds."""
        if claim not in self.claims:
            raise InputError(f"{claim}: no such claim; choose one of {', '.join(self.claims)}")
        selected = [run for run in self.experiments if run.claim == claim]
        return list(dict.fromkeys(run.with_seed(seed) for seed in seeds for run in selected)) if seeds else selected

    def measures_of(self, experiment: Experiment) -> tuple[str, ...]:
        """Returns the measurements of all claims on this run, which is trained once for all of them."""
        same = [run for run in self.experiments if run.label == experiment.label]
        return tuple(dict.fromkeys(name for run in [experiment, *same] for name in run.measures))


def read_queue(path: Path) -> Queue:
    """Reads a queue from a YAML file; raises if a field, recipe or change is wrong."""
    if not path.exists():
        raise InputError(f"--queue {path}: there is no such file; a checkout has experiments/queue.yaml")
    raw = read_yaml(path, InputError)
    try:
        corpora = {name: Corpus(name, **values) for name, values in {"": raw["data"], **raw.get("corpora", {})}.items()}
        if not corpora[""].hash:
            raise ValueError("data.hash: the main corpus needs one")
        claims = {str(claim): str(sentence) for claim, sentence in raw["claims"].items()}
        experiments = list(dict.fromkeys(_experiments(raw["runs"], claims, corpora)))
        queue = Queue(claims, experiments, corpora, {name: raw["seconds"][name] for name in _SECONDS})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"--queue {path}: {type(error).__name__} {error}; see experiments/queue.yaml") from None
    for run in experiments:
        try:
            _ = run.identity, run.source and run.source.identity  # which load the recipes
        except ConfigError as error:
            raise InputError(f"--queue {path}, claim {run.claim}: {error}") from None
    return queue


_SECONDS = ("hardware", "start", "iteration")
_FIELDS = {"claim", "recipe", "set", "each", "seeds", "measure", "corpus", "from", "times"}


def _experiments(
    entries: Sequence[Mapping[str, Any]], claims: Mapping[str, str], corpora: Mapping[str, Corpus]
) -> Iterator[Experiment]:
    """Yields the runs of each entry: ``recipe`` changed by ``set``, for all combinations of ``each`` and all ``seeds``.

    ``from`` has the ``recipe`` and ``set`` of the source; ``times: 2`` yields the run and one rerun.
    """
    for entry in entries:
        source = entry.get("from")
        unknown = sorted(set(entry) - _FIELDS) + [f"from.{name}" for name in set(source or ()) - {"recipe", "set"}]
        if unknown:
            raise ValueError(f"{unknown[0]}: no such field of a run")
        claim, corpus, varied = entry["claim"], entry.get("corpus", ""), entry.get("each", {})
        if claim not in claims:
            raise ValueError(f"claim {claim} is not among the claims")
        if corpus not in corpora:
            raise ValueError(f"corpus {corpus} is not among the corpora")
        for seed, *values in itertools.product(entry.get("seeds", [0]), *varied.values()):
            continued = source and Experiment(claim, source["recipe"], _changes(source), seed, corpus=corpus)
            changes = _changes({"set": entry.get("set", {}) | dict(zip(varied, values, strict=True))})
            measures = tuple(entry.get("measure", ()))
            run = Experiment(claim, entry["recipe"], changes, seed, measures, corpus, continued)
            yield from (replace(run, again=again) for again in range(entry.get("times", 1)))


def _changes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{field}={json.dumps(value)}" for field, value in entry.get("set", {}).items())
