"""A corpus and a recipe small enough to train in a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from adaponder.data.prepare import prepare
from adaponder.recipes import Recipe, load_recipe
from support import SHAPE

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "and", "nobody", "read", "it", "again"]


def corpus(folder: Path, *, lengths: Callable[[int], int] = lambda number: 20 + number % 13) -> Path:
    """Prepares a folder of 400 made-up documents of ``lengths(number)`` words."""
    lines = []
    for number in range(400):
        words = (WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(lengths(number)))
        lines.append(f'{{"text": "{" ".join(words)} {number}", "source": "made up"}}')
    raw = folder / "made-up.jsonl"
    raw.write_text("\n".join(lines))
    prepare([str(raw)], out=folder / "shards", tokenizer="train-bpe:300", validation=0.1, workers=1)
    return folder / "shards"


def uneven(folder: Path) -> Path:
    """Prepares long documents, then many of a word or two: kept apart, a row has 32 targets or half as many."""
    return corpus(folder, lengths=lambda number: 60 if number % 40 < 4 else 0)


def small(shards: Path, *overrides: str, method: str = "adaponder") -> Recipe:
    """Returns a recipe of eight steps in both stages of a tiny model."""
    shape = SHAPE | {"model_type": "gpt_neox", "max_position_embeddings": 32}
    train = {"steps": 8, "global_batch": 4, "lr": 0.01, "gate_lr": 0.01, "save_every": 2, "keep": 99, "log_every": 1}
    train |= {"ponder_start": 3, "ponder_full": 5, "ponder_weight": 1.0, "k_max": 0.5}
    train |= {"eval_every": 0, "eval_tokens": 256}
    settings = [f"model.method={method}", "model.iterations=3", f"data.source={shards}", "data.sequence=32"]
    settings += [f"model.backbone.{name}={value}" for name, value in shape.items()]
    return load_recipe("cpu/demo", [*settings, *(f"train.{name}={value}" for name, value in train.items()), *overrides])


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(run: Path, other: Path) -> None:
    first, second = weights(run / "final"), weights(other / "final")
    assert first.keys() == second.keys()
    assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []
