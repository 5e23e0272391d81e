"""Scores a text in portions that are saved as they finish, so that an interrupted scoring can continue."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import reduce

import numpy as np

from adaponder.evaluation.kept import Kept
from adaponder.evaluation.meter import Spent
from adaponder.evaluation.scoring import Scores, ScoringOptions, score
from adaponder.evaluation.text import Text
from adaponder.evaluation.windows import Windows
from adaponder.methods.cost import Cost
from adaponder.modeling import AdaPonderForCausalLM

# Batches per portion: enough that saving costs little beside scoring.
BATCHES = 32
_OPTIONAL = ("gates", "nll_by_iteration", "entropy")


def portions(windows: Windows, predictions: int, batch_size: int) -> list[Windows]:
    """The windows dealt out alternately, so that each portion has at most :data:`BATCHES` batches."""
    count = max(1, math.ceil(len(windows.starts(predictions)) / (max(1, batch_size) * BATCHES)))
    return [replace(windows, every=count, offset=offset) for offset in range(count)]


def score_portions(
    model: AdaPonderForCausalLM,
    text: Text,
    windows: Windows,
    *,
    how: ScoringOptions,
    name: str,
    batch_size: int,
    kept: Kept | None = None,
    advance: Callable[[int], None] = lambda predictions: None,
) -> Scores:
    """Equals ``score(model, text, windows, how=how, detail=True)``; portions that ``kept`` has are not scored again."""
    whole: dict[str, np.ndarray] = {}
    spent: list[Spent] = []
    for part in portions(windows, text.predictions, batch_size):
        chosen = part.scored(text.predictions)
        key = f"{name}, portion {part.offset + 1} of {part.every}"
        saved = None if kept is None else kept.load(key)
        if saved is not None:
            arrays, cost = saved.arrays, _spent(saved.facts)
            advance(int(chosen.sum()))
        else:
            scores = score(model, text, part, how=how, batch_size=batch_size, detail=True, advance=advance)
            arrays, cost = _arrays(scores, chosen), scores.spent
            if kept is not None:
                kept.save(key, asdict(cost), arrays)
        for field, values in arrays.items():
            target = whole.setdefault(field, np.zeros((text.predictions, *values.shape[1:]), values.dtype))
            target[chosen] = values
        spent.append(cost)
    return Scores(**whole, spent=reduce(_together, spent))


def _arrays(scores: Scores, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of ``scores`` at the chosen predictions."""
    arrays = {name: getattr(scores, name) for name in ("nll", "depth", *_OPTIONAL)}
    return {name: values[chosen] for name, values in arrays.items() if values is not None}


def _spent(facts: dict) -> Spent:
    """The inverse of ``dataclasses.asdict``."""
    return Spent(**(facts | {"cost": Cost(**facts["cost"]), "histogram": tuple(facts["histogram"])}))


def _together(one: Spent, other: Spent) -> Spent:
    """The cost of two portions of one scoring together."""
    assert one.scored is not None  # a scoring says how many predictions it was for
    assert other.scored is not None
    return replace(
        one,
        cost=one.cost + other.cost,
        histogram=tuple(a + b for a, b in zip(one.histogram, other.histogram, strict=True)),
        seconds=one.seconds + other.seconds,
        deepest=max(one.deepest, other.deepest),
        scored=one.scored + other.scored,
    )
