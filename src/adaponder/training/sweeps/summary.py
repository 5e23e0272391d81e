"""One line of a sweep's table per run: what its recipe asks for, how far it is, and what came of it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adaponder.config import AdaPonderConfig
from adaponder.errors import TrainingError
from adaponder.methods import method_class
from adaponder.recipes import Recipe
from adaponder.training.schedule import objective_at
from adaponder.training.sweeps.plan import PlannedRun

FINISHED, FAILED, STOPPED, PENDING = "finished", "failed", "stopped", "pending"


@dataclass(frozen=True)
class RunSummary:
    """One run as a line of the sweep's table; what is not known (yet) is ``None``.

    ``embedding_scale`` is the model's, a number. ``requested_depth``: see :func:`requested_depth`. ``validation_*``:
    loss, mean depth and the share of tokens halted after iterations 1 … K-1, at the end of the run.
    ``tokens_per_second``: the median of what training logged.
    """

    name: str
    fields: Mapping[str, Any]
    seed: int
    fingerprint: str
    status: str
    step: int
    steps: int
    method: str
    iterations: int | None
    embedding_scale: float | None
    requested_depth: float | None
    validation_loss: float | None = None
    validation_depth: float | None = None
    validation_halted: list[float] | None = None
    tokens_per_second: float | None = None
    error: str | None = None


def requested_depth(recipe: Recipe, config: AdaPonderConfig | None) -> float | None:
    """Mean iterations per token that the objective of the recipe's last step asks for.

    The ponder loss ranks all (token, gate) pairs, K - 1 of them a token, and pushes the lowest share k towards closed.
    A closed gate is one iteration less, so what is asked for is ``K - k (K - 1)``; where lambda is 0, K.
    Lambda says how hard it is asked, not how much. What comes of it, ``validation_depth``, may lie on either side:
    pairs are pushed and need not arrive, and a token that halts early skips gates that were never pushed.
    ``train.target_depth`` is asked for as it stands, mor asks for the sum of its capacities, methods that never halt
    for K; ouro names no depth: ``None``.
    """
    if config is None:
        return None
    method = method_class(config.method)
    if method.has_ponder_term and recipe.train.target_depth is not None:
        return recipe.train.target_depth
    objective = objective_at(recipe.train, recipe.train.steps - 1)
    return method.requested_depth(config, objective.ponder_fraction if objective.ponder_weight > 0 else 0.0)


def pending(run: PlannedRun, config: AdaPonderConfig | None) -> RunSummary:
    """The summary of a run that was not started."""
    recipe = run.recipe
    return RunSummary(
        name=run.name,
        fields=dict(run.fields),
        seed=recipe.train.seed,
        fingerprint=recipe.fingerprint,
        status=PENDING,
        step=0,
        steps=recipe.train.steps,
        method=recipe.model.method,
        iterations=None if config is None else config.iterations,
        embedding_scale=None if config is None else config.table_scale,
        requested_depth=requested_depth(recipe, config),
    )


def result_of(run: PlannedRun, folder: Path) -> RunSummary:
    """The summary of a finished run, from its folder."""
    summary = pending(run, AdaPonderConfig.from_pretrained(folder / "final"))
    path, last = folder / "metrics.jsonl", summary.steps - 1
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    validation = next((line for line in reversed(lines) if "validation_loss" in line and line["step"] == last), None)
    if validation is None:
        raise TrainingError(f"{path} has no validation at step {last}: delete {folder} to run it again")
    loss = validation["validation_loss"]
    if not math.isfinite(loss):
        return replace(summary, status=FAILED, step=last + 1, error=f"validation loss is {loss}")
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return replace(
        summary,
        status=FINISHED,
        step=last + 1,
        validation_loss=loss,
        validation_depth=validation["validation_depth"],
        validation_halted=validation["validation_halted"],
        tokens_per_second=statistics.median(speeds) if speeds else None,
    )
