"""What a checkpoint's own files say of how it was trained: recipe, tokens, and the run's last validation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from adaponder.errors import AdaPonderError
from adaponder.files import read_bytes, read_json

_STATE, _METRICS = "state.json", "metrics.jsonl"


@dataclass(frozen=True)
class Validation:
    """The run's validation at the step of the checkpoint: mean loss and depth over its first so many tokens."""

    loss: float
    depth: float | None
    tokens: int | None


@dataclass(frozen=True)
class Training:
    """How a checkpoint was trained, as its ``state.json`` tells; ``None`` stands for what it does not tell."""

    recipe: str | None
    data: str | None
    tokenizer: str | None
    steps: int | None
    tokens: int | None
    seed: int | None
    validation: Validation | None


def training_of(folder: Path) -> Training | None:
    """How the checkpoint in ``folder`` was trained; ``None`` where it keeps no record of that."""
    try:
        state = read_json(folder / _STATE)
    except AdaPonderError:  # conversions have none; a damaged one tells nothing either
        return None
    recipe = _part(state, "recipe")
    data, train, step = _part(recipe, "data"), _part(recipe, "train"), _whole(state.get("step"))
    factors = [step, _whole(train.get("global_batch")), _whole(data.get("sequence"))]
    return Training(
        recipe=_text(recipe.get("name")),
        data=_named(data.get("source")),
        # The recipe's does not hold where its source was prepared with another.
        tokenizer=_named(state.get("tokenizer_name")) or _named(data.get("tokenizer")),
        steps=step,
        tokens=factors[0] * factors[1] * factors[2] if None not in factors else None,  # type: ignore[operator]
        seed=_whole(train.get("seed")),
        validation=None if step is None else _validation(folder, step, _whole(train.get("eval_tokens"))),
    )


def _validation(folder: Path, step: int, tokens: int | None) -> Validation | None:
    """The validation after ``step`` steps in the metrics of the run that ``folder`` is a part of."""
    for run in (folder.parent, folder.parent.parent):
        path = run / _METRICS
        if not path.is_file():
            continue
        for line in reversed(read_bytes(path).decode("utf-8", "replace").splitlines()):
            try:
                entry = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if isinstance(entry, dict) and entry.get("step") == step - 1 and "validation_loss" in entry:
                return Validation(entry["validation_loss"], entry.get("validation_depth"), tokens)
        return None
    return None


def _part(whole: dict[str, Any], name: str) -> dict[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _named(value: Any) -> str | None:
    """A source by name; of a path its last part, since where it lay is nobody's business."""
    text = _text(value)
    return PurePath(text).name if text is not None and PurePath(text).is_absolute() else text


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
