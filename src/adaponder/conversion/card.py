"""The model card of an exported folder: the model, its training as recorded, and measurements."""

from __future__ import annotations

import json
import platform
import shlex
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import jinja2
import torch
import transformers
from huggingface_hub import EvalResult, ModelCardData

from adaponder.backbones.shape import shape_of
from adaponder.config import AdaPonderConfig
from adaponder.errors import AdaPonderError
from adaponder.files import read_bytes, read_json
from adaponder.methods import method_class
from adaponder.methods.cost import parameters_of, per_depth
from adaponder.version import __version__

LEAST_TRANSFORMERS = "5.17"


def training_of(folder: Path) -> dict[str, Any] | None:
    """Returns how the checkpoint in ``folder`` was trained, from its ``state.json``; ``None`` if that is unreadable.

    Keys: recipe, data, tokenizer, steps, tokens, seed and validation; a value that is not recorded is ``None``.
    """
    try:
        state = read_json(folder / "state.json")
    except AdaPonderError:  # a conversion has no state.json
        return None
    recipe = _typed(state, "recipe", dict) or {}
    data, train = _typed(recipe, "data", dict) or {}, _typed(recipe, "train", dict) or {}
    step, batch, sequence = _typed(state, "step"), _typed(train, "global_batch"), _typed(data, "sequence")
    return {
        "recipe": _typed(recipe, "name", str),
        "data": _source_name(data, "source"),
        # The data may have been prepared with another tokenizer than the recipe's.
        "tokenizer": _source_name(state, "tokenizer_name") or _source_name(data, "tokenizer"),
        "steps": step,
        "tokens": None if step is None or batch is None or sequence is None else step * batch * sequence,
        "seed": _typed(train, "seed"),
        "validation": None if step is None else _validation(folder, step, _typed(train, "eval_tokens")),
    }


def _validation(folder: Path, step: int, tokens: int | None) -> dict[str, Any] | None:
    """Returns loss, depth and ``tokens`` of the run's validation after ``step`` steps; ``None`` if none is logged.

    ``tokens`` is the number of tokens that the validation scored, if known.
    """
    path = next((path for run in folder.parents[:2] if (path := run / "metrics.jsonl").is_file()), None)
    for line in reversed(read_bytes(path).decode("utf-8", "replace").splitlines() if path else []):
        try:
            entry = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if isinstance(entry, dict) and entry.get("step") == step - 1 and "validation_loss" in entry:
            return {"loss": entry["validation_loss"], "depth": entry.get("validation_depth"), "tokens": tokens}
    return None


def _typed(settings: dict[str, Any], name: str, kind: type = int) -> Any:
    """Returns ``settings[name]`` if its type is ``kind`` and it is not an empty text, else ``None``."""
    value = settings.get(name)
    return value if isinstance(value, kind) and not isinstance(value, bool) and value != "" else None


def _source_name(settings: dict[str, Any], name: str) -> str | None:
    """Returns the setting ``name``; of an absolute path only the last part, so that no local path is published."""
    text = _typed(settings, name, str)
    return PurePath(text).name if text is not None and PurePath(text).is_absolute() else text


def card_text(
    name: str,
    config: AdaPonderConfig,
    *,
    dtype: str,
    training: dict[str, Any] | None,
    measured: dict[str, Any] | None,
    license: str | None,
) -> str:
    """Renders ``card.md.jinja`` to the text of README.md: metadata for the hub in YAML, then the model card.

    The card's examples load the model by ``name``. ``training`` is from :func:`training_of`. ``measured`` has the keys
    data, split, tokens, windows and rows. Each row has label, loss, perplexity, bits_per_byte, depth, flops and ratio.
    The first row is measured with the model's default policy, the others with fixed depths.
    """
    metadata = ModelCardData(
        license=license or "unknown",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["adaponder", "adaptive-computation", "custom_code", config.backbone_config.model_type],
        model_name=name.rpartition("/")[2],
        eval_results=None if measured is None else _eval_results(measured),
    )
    shape = shape_of(config)
    context = min(2048, config.max_position_embeddings or 2048) - 1
    template = resources.files("adaponder.conversion").joinpath("card.md.jinja").read_text("utf-8")
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters["quoted"] = shlex.quote
    return environment.from_string(template).render(
        metadata=metadata.to_yaml(),
        name=name,
        config=config,
        method=method_class(config.method),
        shape=shape,
        parameters=parameters_of(config, shape=shape),
        dtype=dtype,
        training=training,
        measured=measured,
        context=context,
        costs=per_depth(config, context=context, shape=shape),
        license=license,
        least_transformers=LEAST_TRANSFORMERS,
        versions=f"adaponder {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        machine=platform.machine(),
    )


def _eval_results(measured: dict[str, Any]) -> list[EvalResult]:
    columns = (
        ("loss", "cross-entropy, nats per token", "loss"),
        ("perplexity", "perplexity", "perplexity"),
        ("bits_per_byte", "bits per byte", "bits_per_byte"),
        ("mean_depth", "iterations per token", "depth"),
    )
    first = measured["rows"][0]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=measured["data"],
            dataset_name=measured["data"],
            dataset_split=measured["split"],
            metric_type=kind,
            metric_name=words,
            metric_value=round(first[column], 6),
        )
        for kind, words, column in columns
        if first[column] is not None
    ]
