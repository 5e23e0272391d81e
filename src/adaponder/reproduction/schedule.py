"""Which run to start next: none that cannot finish in time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adaponder.methods import method_class
from adaponder.recipes import Recipe
from adaponder.reproduction.queue import Experiment, Queue, identity

# What runs may take beyond their estimate before it is too late.
MARGIN = 1.1
# The steps that ``Queue.iteration`` is measured on: 3,000 of 32 x 1,024 tokens.
_MEASURED_TOKENS = 3000 * 32 * 1024


def device_seconds(
    experiment: Experiment, queue: Queue, records: Sequence[Mapping[str, Any]], hardware: str
) -> float | None:
    """Seconds that a run takes alone on the device: as runs of the same model took there, else by the queue's estimate.

    ``None`` where neither is known. A run that continues another is given the time to train that one too.
    """
    before = 0.0
    if experiment.source is not None:
        if (seconds := device_seconds(experiment.source, queue, records, hardware)) is None:
            return None
        before = seconds
    recipe = experiment.resolved()
    tokens = _tokens(recipe.as_dict())
    same = _timed_alike(recipe.as_dict())
    rates = [
        record["tokens_per_second"] * (record["shared_device_with"] + 1)
        for record in records
        if record["hardware"] == hardware and _timed_alike(record["recipe"]) == same
    ]
    if rates:
        return before + tokens / statistics.median(rates)
    if hardware != queue.hardware:
        return None
    return before + queue.iteration * _iterations(recipe) * tokens / _MEASURED_TOKENS


def wall_seconds(work: float, queue: Queue) -> float:
    """How long it takes until runs that share the device, one of them yet to start, all have their records.

    ``work`` is the sum of the seconds that each would still need alone: however the device is shared out, all are done
    by then.
    """
    return queue.start + MARGIN * work


def choose(
    waiting: Sequence[Experiment], cost: Callable[[Experiment], float], *, left: float | None
) -> Experiment | None:
    """The first run that ends within the seconds ``left`` (``None``: no limit); shorter ones may go before longer."""
    return next((each for each in waiting if left is None or cost(each) <= left), None)


def _iterations(recipe: Recipe) -> int:
    return method_class(recipe.model.method).fixed_iterations or recipe.model.iterations or 1


def _tokens(recipe: Mapping[str, Any]) -> int:
    train = recipe["train"]
    return train["steps"] * train["global_batch"] * recipe["data"]["sequence"]


def _timed_alike(recipe: Mapping[str, Any]) -> str:
    """A key that is equal for runs that take equally long per token: same model, batch and way to compute."""
    keys = ("global_batch", "micro_batch", "dtype", "execution", "compile", "memory_budget", "gradient_checkpointing")
    train = {key: recipe["train"][key] for key in keys if key in recipe["train"]}
    model = recipe["model"] | {"embedding_scale": 1.0}
    return identity({"model": model, "data": recipe["data"], "train": train})
