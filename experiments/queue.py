"""The queue of experiments (``experiments/queue.yaml``): which runs each claim needs, most useful first.

The queue holds no state. A run is done when a record of the same recipe, seed and data exists; one that was cut has
none and is repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaponder.errors import ConfigError, InputError
from adaponder.files import read_yaml
from adaponder.recipes import Recipe, load_recipe
from experiments.identity import identity


@dataclass(frozen=True)
class Corpus:
    """Prepared text that runs are trained on.

    Attributes:
        name: empty for the queue's main corpus.
        folder: where ``adaponder prepare`` put it; ``None`` leaves the recipe's own ``data.source``.
        hash: the data hash of its records; ``None`` where none is fixed: records are then known by the name.
        prepare: the command that makes it.
        says: what it is.
        loss: ``final`` or ``averaged``: runs are judged by these weights on the half ``report`` of the validation
            documents; ``None``: by their last validation, pooled over documents.
    """

    name: str
    folder: str | None
    hash: str | None
    prepare: str
    says: str = ""
    loss: str | None = None

    def trained(self, record: Mapping[str, Any]) -> bool:
        """Returns whether a record's run was trained on this corpus."""
        return record["data"] == self.hash if self.hash else record.get("corpus") == self.name


@dataclass(frozen=True)
class Experiment:
    """One training run of a claim: a recipe, what is changed in it, and a seed.

    Attributes:
        measures: names of measurements on the trained model (``measures.py``).
        corpus: the name of its corpus; empty for the queue's main one.
        source: the label of the run, of the same seed, whose final model this one continues.
        again: how many earlier runs of the same recipe, seed and data there must be; 0 for an ordinary run.
    """

    claim: str
    recipe: str
    changes: tuple[str, ...]
    seed: int
    measures: tuple[str, ...] = ()
    corpus: str = ""
    source: Experiment | None = None
    again: int = 0

    @property
    def setting(self) -> str:
        """Returns the label without the seed, equal for runs that are compared seed by seed."""
        recipe = Path(self.recipe).stem if self.recipe.endswith(".yaml") else self.recipe
        whence = [] if self.source is None else [f"from-{self.source.setting}"]
        corpus = [f"on-{self.corpus}"] if self.corpus else []
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join([recipe, *map(_short, self.changes), *whence, *corpus]))

    @property
    def label(self) -> str:
        """Returns the name for people, folders and files, such as ``mini-ponder-k2-lr-0.004-seed-1``."""
        again = f"-again-{self.again}" if self.again else ""
        return f"{self.setting}-seed-{self.seed}{again}"

    def resolved(self, data: Path | str | None = None, runs: Path | None = None) -> Recipe:
        """Resolves the recipe, on the shards in ``data``, continuing a run in the folder ``runs``.

        Without ``runs`` the backbone of a run that continues another is ``from`` and the label of the other.
        """
        source = [] if data is None else [f"data.source={data}"]
        if self.source is not None:
            folder = f"from {self.source.label}" if runs is None else str(runs / self.source.label / "final")
            source += [f"model.backbone={json.dumps(folder)}"]
        return load_recipe(self.recipe, [*self.changes, f"train.seed={self.seed}", *source])

    @property
    def identity(self) -> str:
        """Returns the hash of what this run computes, equal for equal runs."""
        return _identity_of(dataclasses.replace(self, claim="", measures=(), again=0))

    def with_seed(self, seed: int) -> Experiment:
        source = None if self.source is None else self.source.with_seed(seed)
        return dataclasses.replace(self, seed=seed, source=source)


@functools.cache
def _identity_of(experiment: Experiment) -> str:
    return identity(experiment.resolved().as_dict())


@dataclass(frozen=True)
class Queue:
    """The content of the queue's file.

    Attributes:
        claims: what each claim says.
        experiments: all runs, most useful first.
        corpora: prepared text by name; the main one has the empty name.
        hardware, start, iteration: device seconds of a run on this hardware where none like it was timed: to start,
            and for each iteration of 3,000 steps.
    """

    claims: Mapping[str, str]
    experiments: Sequence[Experiment]
    corpora: Mapping[str, Corpus]
    hardware: str
    start: float
    iteration: float

    @property
    def main(self) -> Corpus:
        return self.corpora[""]

    @property
    def data_hash(self) -> str:
        """Returns the hash of the main corpus."""
        assert self.main.hash is not None  # read_queue has seen to it
        return self.main.hash

    def of_claim(self, claim: str, seeds: Sequence[int] = ()) -> list[Experiment]:
        """Returns the runs of one claim; with ``seeds``, each of its settings with those seeds."""
        if claim not in self.claims:
            raise InputError(f"{claim}: no such claim; choose one of {', '.join(self.claims)}")
        chosen = [each for each in self.experiments if each.claim == claim]
        if not seeds:
            return chosen
        return list(dict.fromkeys(each.with_seed(seed) for seed in seeds for each in chosen))

    def measures_of(self, experiment: Experiment) -> tuple[str, ...]:
        """Returns the measurements of all claims on this run, which is trained once for all of them."""
        same = [each for each in self.experiments if each.label == experiment.label]
        return tuple(dict.fromkeys(name for each in [experiment, *same] for name in each.measures))


def read_queue(path: Path) -> Queue:
    """Reads the queue in a YAML file and checks every recipe and change."""
    if not path.exists():
        raise InputError(f"--queue {path}: there is no such file; a checkout has experiments/queue.yaml")
    raw = read_yaml(path, InputError)
    try:
        seconds, claims = raw["seconds"], raw["claims"]
        corpora = {"": _corpus("", raw["data"])}
        corpora |= {name: _corpus(name, values) for name, values in raw.get("corpora", {}).items()}
        queue = Queue(
            claims={str(claim): str(says) for claim, says in claims.items()},
            experiments=list(dict.fromkeys(_experiments(raw["runs"], claims, corpora))),
            corpora=corpora,
            hardware=seconds["hardware"],
            start=float(seconds["start"]),
            iteration=float(seconds["iteration"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"--queue {path}: {type(error).__name__} {error}; see experiments/queue.yaml") from None
    for each in queue.experiments:
        try:
            for one in (each, *([each.source] if each.source else [])):
                _ = one.identity  # which resolves the recipe
        except ConfigError as error:
            raise InputError(f"--queue {path}, claim {each.claim}: {error}") from None
    return queue


def _corpus(name: str, values: Mapping[str, Any]) -> Corpus:
    if not name and not values["hash"]:
        raise ValueError("data.hash: the main corpus needs one")
    return Corpus(name, values["folder"], values["hash"], values["prepare"], values.get("says", ""), values.get("loss"))


_FIELDS = {"claim", "recipe", "set", "each", "seeds", "measure", "corpus", "from", "times"}


def _experiments(
    entries: Sequence[Mapping[str, Any]], claims: Mapping[str, str], corpora: Mapping[str, Corpus]
) -> Iterator[Experiment]:
    """Expands entries: a recipe with ``set`` changes, for ``each`` value of further fields, and for each seed.

    ``measure`` names measurements, ``corpus`` other text, ``from`` the ``recipe`` and ``set`` of the run that is
    continued; ``times: 2`` trains the same run twice.
    """
    for entry in entries:
        if unknown := set(entry) - _FIELDS:
            raise ValueError(f"{sorted(unknown)[0]}: no such field of a run")
        if entry["claim"] not in claims:
            raise ValueError(f"claim {entry['claim']} is not among the claims")
        if entry.get("corpus", "") not in corpora:
            raise ValueError(f"corpus {entry['corpus']} is not among the corpora")
        varied = entry.get("each", {})
        for seed in entry.get("seeds", [0]):
            for values in itertools.product(*varied.values()):
                one = Experiment(
                    claim=entry["claim"],
                    recipe=entry["recipe"],
                    changes=_changes(entry.get("set", {}) | dict(zip(varied, values, strict=True))),
                    seed=seed,
                    measures=tuple(entry.get("measure", ())),
                    corpus=entry.get("corpus", ""),
                    source=_source(entry, seed),
                )
                yield from (dataclasses.replace(one, again=again) for again in range(entry.get("times", 1)))


def _source(entry: Mapping[str, Any], seed: int) -> Experiment | None:
    """Returns the run that an entry continues, if any."""
    if (source := entry.get("from")) is None:
        return None
    if unknown := set(source) - {"recipe", "set"}:
        raise ValueError(f"from.{sorted(unknown)[0]}: no such field; recipe and set name the run to continue")
    changes = _changes(source.get("set", {}))
    return Experiment(entry["claim"], source["recipe"], changes, seed, corpus=entry.get("corpus", ""))


def _changes(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{field}={json.dumps(value)}" for field, value in values.items())


def _short(change: str) -> str:
    """Shortens ``train.lr=0.004`` to ``lr-0.004``."""
    field, _, value = change.replace('"', "").partition("=")
    return f"{field.rpartition('.')[2]}-{value}"
