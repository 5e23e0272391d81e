"""What the paper says and which runs test it: ``experiments/claims.yaml``; ``judging.py`` judges it by the records."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaponder.errors import InputError
from adaponder.files import read_yaml
from experiments.evidence import Evidence
from experiments.queue import Experiment

Test = Mapping[str, Any]
BEFORE = "before any of its runs"


@dataclass(frozen=True)
class Fixed:
    """When the tests of a statement were committed.

    Attributes:
        date: the day.
        when: relative to the records of its runs: ``before any of its runs``, ``after seed 0``, ``after all runs``, …
    """

    date: datetime.date
    when: str

    @property
    def note(self) -> str:
        """Returns the note of the results page; empty if the tests were fixed before any run."""
        return "" if self.when == BEFORE else f"chosen after looking: {self.when}"


@dataclass(frozen=True)
class Statement:
    """One table, figure or sentence of the paper.

    Attributes:
        claim: the claim of the queue whose runs test it.
        where: in the paper.
        says: what the paper says.
        paper: its numbers.
        fixed: when the tests were committed.
        tests: what must hold, all of it.
    """

    claim: str
    where: str
    says: str
    paper: str
    fixed: Fixed
    tests: Sequence[Test]


@dataclass(frozen=True)
class Question:
    """A question to the paper, answered by tests, by a named table (``show``), or by a sentence."""

    asks: str
    answer: str = ""
    fixed: Fixed | None = None
    tests: Sequence[Test] = ()
    show: str | None = None


@dataclass(frozen=True)
class Claims:
    """The content of the file.

    Attributes:
        runs: the label, without seed, of a run of the queue by its alias; a list of labels stands for the best of them.
        titles: what tables call a recipe, or a run by its alias.
        rows: lists of aliases by the name of the table that shows them.
        against: the run that all settings of a claim are held against, by the claim's name.
        paper: the paper's own rows, by the name of its table.
    """

    runs: Mapping[str, Any]
    titles: Mapping[str, str]
    rows: Mapping[str, Sequence[str]]
    against: Mapping[str, str]
    statements: Sequence[Statement]
    paper: Mapping[str, Sequence[Sequence[Any]]]
    questions: Sequence[Question] = field(default_factory=list)


_PAPER = ("table1", "table3")
_ROWS = ("table1", "equal-flops", "readme", "curve", "frontier", "dials", "savings", "true-cost", "seeds")


def read_claims(path: Path) -> Claims:
    """Reads the claims in a YAML file; its tables name runs by alias."""
    if not path.exists():
        raise InputError(f"{path}: there is no such file; a checkout has experiments/claims.yaml")
    raw = read_yaml(path, InputError)
    try:
        claims = Claims(
            runs=raw["runs"],
            titles=raw["titles"],
            rows={name: raw[name] for name in _ROWS},
            against=raw["against"],
            paper={name: raw[f"paper-{name}"] for name in _PAPER},
            statements=[Statement(**_dated(each)) for each in raw["statements"]],
            questions=[Question(**_dated(each)) for each in raw.get("questions", [])],
        )
        named = {alias for rows in claims.rows.values() for alias in rows} | set(claims.against.values())
        if unknown := named - set(claims.runs):
            raise ValueError(f"{sorted(unknown)[0]}: no such alias under runs")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: {type(error).__name__} {error}; see experiments/claims.yaml") from None
    return claims


def _dated(raw: Mapping[str, Any]) -> dict[str, Any]:
    return dict(raw) | ({"fixed": Fixed(**raw["fixed"])} if "fixed" in raw else {})


def title_of(claims: Claims, evidence: Evidence, alias: str) -> str:
    """Returns the title of a run: its alias's, or its recipe's with the changed fields, except the learning rate."""
    if alias in claims.titles:
        return claims.titles[alias]
    return _in_words(claims, evidence.settings[claims.runs.get(alias, alias)])


def _in_words(claims: Claims, experiment: Experiment) -> str:
    words = [claims.titles.get(experiment.recipe, experiment.recipe)]
    for change in experiment.changes:
        name, _, value = change.replace('"', "").partition("=")
        if name == "model.iterations" and "K = " in words[0]:
            words[0] = re.sub(r"K = \d+", f"K = {value}", words[0])
        elif name != "train.lr":
            words.append(_CHANGES.get(name, "{name} {value}").format(name=name.partition(".")[2], value=value))
    if experiment.source is not None:
        words.append(f"continued from {_in_words(claims, experiment.source)}")
    return ", ".join(words)


_CHANGES = {
    "model.embedding_scale": "embedding scale {value}",
    "train.k_max": "k = {value}",
    "train.ponder_weight": "lambda = {value}",
    "model.backbone.num_hidden_layers": "{value} layers",
    "model.backbone.vocab_size": "vocabulary {value}",
    "train.min_lr_ratio": "decay to {value}",
    "train.steps": "{value} steps",
    "model.tau": "tau = {value}",
    "model.gate_bias": "gate bias {value}",
    "train.gate_start": "gates learn from step {value}",
    "train.halt_before_ponder": "halting from the first step",
    "model.ponder_pool": "pool = {value}",
    "model.state_scale": "states x {value}",
    "model.exit_prior": "exit prior {value}",
    "model.exit_prior_weight": "its weight {value}",
    "model.halt_prior": "halt prior {value}",
    "model.loss_prior": "loss prior {value}",
    "model.lookahead_by": "labels counted by {value}",
    "model.lookahead_delta": "asking for {value} nats",
    "model.gate_share": "gates halt in {value} of the sequences",
    "train.capacity_warmup": "halts from step {value}",
    "train.ponder_start": "ponder loss from step {value}",
    "train.ponder_full": "in full from {value}",
    "train.freeze_backbone_steps": "gates alone for {value} steps",
}
