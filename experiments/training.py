"""Trains one run and measures it on every validation document: with its final weights, and with averaged ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from adaponder.data import Shards
from adaponder.devices import autocast
from adaponder.errors import TrainingError
from adaponder.evaluation.scoring import ScoringOptions, score
from adaponder.evaluation.text import Windows, open_text, open_vocabulary
from adaponder.training.loop import Trainer
from adaponder.training.run import train
from experiments.queue import Experiment

# The part of a run's steps, at its end, over which weights are averaged.
AVERAGED = 0.1
# Windows that are scored at once.
_BATCH = 16


class AveragingTrainer(Trainer):
    """A trainer that also keeps the mean of the weights over the last tenth of its steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.averaged: dict[str, Tensor] = {}
        self.averaged_steps = 0

    def _after_step(self, phase_end: int) -> bool:
        steps = self.recipe.train.steps
        if self.step >= steps - max(1, int(AVERAGED * steps)):
            self._average()
        return super()._after_step(phase_end)

    @torch.no_grad()
    def _average(self) -> None:
        self.averaged_steps += 1
        for name, parameter in self.model.named_parameters():
            if name not in self.averaged:
                self.averaged[name] = parameter.detach().clone()
            else:
                self.averaged[name].lerp_(parameter.detach(), 1 / self.averaged_steps)

    @torch.no_grad()
    def load_averaged(self) -> None:
        """Replaces the model's weights by their mean; the final ones are in the run's folder."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.averaged[name])


def train_run(experiment: Experiment, *, data: Path | None, runs: Path, device: str) -> tuple[AveragingTrainer, Path]:
    """Trains a run from its first step to its last; returns its trainer and the folder of its final model.

    The run that it continues is trained first if ``runs`` does not hold its final model. A folder left by an earlier
    attempt is deleted.
    """
    if experiment.source is not None and not (runs / experiment.source.label / "final").is_dir():
        train_run(experiment.source, data=data, runs=runs, device=device)
    out = runs / experiment.label
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    outcome = train(experiment.resolved(data, runs), out=out, device=device, trainer_class=AveragingTrainer)
    if outcome.final is None:
        raise TrainingError(f"{experiment.label} was stopped at step {outcome.step}: it leaves no record; run it again")
    assert isinstance(outcome.trainer, AveragingTrainer)  # the folder was empty, so this run has trained
    return outcome.trainer, outcome.final


# --- validation documents -------------------------------------------------------------------------------------------


def half_of(document_hash: int) -> str:
    """Returns the half of the validation documents that a document belongs to, by the last bit of its hash.

    Learning rates and variants are chosen on ``choose``; numbers are reported on ``report``. The first bits of the
    hash decide whether a document is a validation document at all, so the last bit is independent of that.
    """
    return "report" if document_hash & 1 else "choose"


def validation_hashes(shards: Shards) -> list[int]:
    """Returns the hash of each validation document, in the order of the split."""
    folder = shards.folder / "validation"
    tables = [pq.read_table(folder / part.docs_name, columns=["hash"]) for part in shards.manifest.splits["validation"]]
    return [value for table in tables for value in table.column("hash").to_pylist()]


def measure_documents(trainer: Trainer) -> dict[str, Any]:
    """Scores the whole validation split; returns total nats, predicted tokens and mean depth of each document.

    Also the loss (nats per token) of all documents and of each half (see :func:`half_of`). Documents are in the order
    of the split and named by their hash.
    """
    recipe, shards = trainer.recipe, trainer.sampler.shards
    text = open_text(str(shards.folder), open_vocabulary(str(shards.folder / "tokenizer.json")), whose="the run")
    windows = Windows(recipe.data.sequence, across_documents=recipe.data.attend_across_documents)
    with autocast(recipe.train.dtype, trainer.world.device):
        scores = score(
            trainer.model, text, windows, how=ScoringOptions(execution="dense"), batch_size=_BATCH, shape=trainer.shape
        )
    hashes = validation_hashes(shards)
    counted, document = text.counted, text.document

    def sums(values: np.ndarray) -> np.ndarray:
        return np.bincount(document[counted], weights=values[counted], minlength=len(hashes))

    nats, depth = sums(scores.nll), sums(scores.depth)
    tokens = sums(np.ones(len(document)))
    halves = np.array([half_of(value) for value in hashes])

    def loss(chosen: np.ndarray) -> float | None:
        return float(nats[chosen].sum() / tokens[chosen].sum()) if tokens[chosen].sum() else None

    return {
        "loss": loss(np.ones(len(hashes), bool)),
        "choose": loss(halves == "choose"),
        "report": loss(halves == "report"),
        "depth": float(depth.sum() / tokens.sum()),
        "documents": {
            "hash": [f"{value:016x}" for value in hashes],
            "nats": [round(float(value), 3) for value in nats],
            "tokens": [int(value) for value in tokens],
            "depth": [round(float(value), 3) for value in depth / np.maximum(tokens, 1)],
        },
    }
