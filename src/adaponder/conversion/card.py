"""The model card of an exported folder: the model, its training as recorded, and measurements."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

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
    """Returns how the checkpoint in ``folder`` was trained, by its ``state.json``; ``None`` without a readable one.

    Keys: recipe, data, tokenizer, steps, tokens, seed and validation; a value that is not recorded is ``None``.
    """
    try:
        state = read_json(folder / "state.json")
    except AdaPonderError:  # conversions have none
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
    """Returns loss and depth of the run's validation after ``step`` steps, over its first ``tokens`` tokens."""
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
    """Returns a setting if it is of that type and, for text, not empty; else ``None``."""
    value = settings.get(name)
    return value if isinstance(value, kind) and not isinstance(value, bool) and value != "" else None


def _source_name(settings: dict[str, Any], name: str) -> str | None:
    """Returns the name of a source; for a path its last part, so that no local path is published."""
    text = _typed(settings, name, str)
    return PurePath(text).name if text is not None and PurePath(text).is_absolute() else text


# --- the card -------------------------------------------------------------------------------------------------------


def card_text(
    name: str,
    config: AdaPonderConfig,
    *,
    dtype: str,
    training: dict[str, Any] | None,
    measured: dict[str, Any] | None,
    license: str | None,
) -> str:
    """Returns the text of README.md: the hub's metadata, then the page.

    Args:
        name: what the reader opens: a hub name, or the folder.
        training: from :func:`training_of`.
        measured: data, split, tokens, windows, and rows with label, loss, perplexity, bits_per_byte, depth, flops and
            ratio; the first row is at the model's own depths.
    """
    metadata = ModelCardData(
        license=license or "unknown",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["adaponder", "adaptive-computation", "custom_code", config.backbone_config.model_type],
        model_name=name.rpartition("/")[2],
        eval_results=None if measured is None else _eval_results(measured),
    ).to_yaml()
    sections = (
        _title(name, config),
        _use(name, config),
        _model(config, dtype),
        _trained(training),
        _cost_by_depth(config) if measured is None else _results(measured),
        _limits(license),
    )
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(sections) + "\n"


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


def _title(name: str, config: AdaPonderConfig) -> str:
    how = (
        "After each iteration a small gate decides, token by token, whether to read again; a token that has halted\n"
        "keeps its keys, values and hidden state, and costs nothing more."
        if method_class(config.method).halts
        else "Every token is read equally often."
    )
    backbone, most = config.backbone_config.model_type, config.iterations
    return f"""# {name.rpartition("/")[2]}

A {backbone} decoder that reads each token up to {most} times before it predicts the next ({config.method}): between two
iterations the embedding that it expects next is added to the token's own.
{how}
The method is that of *AdaPonderLM: Gated Pondering Language Models with Token-Wise Adaptive Depth* (2026)."""


def _use(name: str, config: AdaPonderConfig) -> str:
    dial = (
        f"\nmodel.config.tau = 0.01  # a higher threshold than {config.tau:g}: tokens halt earlier"
        if method_class(config.method).halts
        else ""
    )
    fewer = max(1, config.iterations - 1)
    return f"""## How to use

With torch and transformers {LEAST_TRANSFORMERS} or newer. The model's code is `modeling_adaponder.py` in this folder;
read it before you trust it.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))

model(**inputs).depth  # how often each token was read
model.generate(**inputs, max_new_tokens=50, max_iterations={fewer})  # read no token more often{dial}
```

`pipeline("text-generation", "{name}", trust_remote_code=True)` and `lm_eval --model hf --model_args
pretrained={name},trust_remote_code=True` work as for any model. Where the package
`adaponder` is installed, its commands open this folder by their own classes (an engine that batches by depth, other
halting rules, training) and never run the code in it."""


def _model(config: AdaPonderConfig, dtype: str) -> str:
    shape = shape_of(config)
    counted = parameters_of(config, shape=shape)
    facts: dict[str, Any] = {
        "backbone": f"{config.backbone_config.model_type}, {shape.layers} layers, hidden size {shape.hidden}",
        "vocabulary": f"{shape.vocabulary:,}",
        "positions": config.max_position_embeddings,
        "parameters": f"{counted.total:,}, of which the recurrence adds {counted.added:,}",
        "iterations K": config.iterations,
        "embedding scale": f"{config.embedding_scale:g}",
        "precision": dtype,
    }
    facts |= method_class(config.method).described(config)
    return "## The model\n\n" + _table(("", ""), facts.items())


def _trained(training: dict[str, Any] | None) -> str:
    if training is None:
        return (
            "## Training\n\nThe checkpoint does not record how it was trained: data, number of tokens and schedule are "
            "not known here."
        )
    rows = []
    for name in ("data", "tokens", "tokenizer", "steps", "recipe", "seed"):
        value = training[name]
        counted = f"{value:,}" if name in ("tokens", "steps") and value is not None else value
        rows.append((name, "not recorded" if value is None else counted))
    if (validation := training["validation"]) is not None:
        tokens, depth = validation["tokens"], validation["depth"]
        first = "" if tokens is None else f" (first {tokens:,} tokens)"
        at_depth = "" if depth is None else f" at mean depth {depth:.3f}"
        rows.append((f"validation loss of the run{first}", f"{validation['loss']:.4f}{at_depth}"))
    return "## Training\n\n" + _table(("", ""), rows)


def _cost_by_depth(config: AdaPonderConfig) -> str:
    context = min(2048, config.max_position_embeddings or 2048) - 1
    costs = per_depth(config, context=context, shape=shape_of(config))
    rows = [(depth, f"{cost.flops / 1e6:,.2f}", f"{cost.ratio:.2f}") for depth, cost in enumerate(costs, 1)]
    return (
        "## Results\n\nLoss by depth and mean depth were not measured when this folder was exported "
        "(`adaponder export --data TEXT` measures them). What one more token costs after "
        f"{context:,} others, counted by formula:\n\n" + _table(("depth", "MFLOP", "x plain decoder"), rows)
    )


def _results(measured: dict[str, Any]) -> str:
    rows = [
        (
            row["label"],
            f"{row['loss']:.4f}",
            f"{row['perplexity']:,.2f}",
            "" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}",
            f"{row['depth']:.3f}",
            f"{row['flops'] / 1e6:,.2f}",
            f"{row['ratio']:.2f}",
        )
        for row in measured["rows"]
    ]
    split = "" if measured["split"] is None else f", {measured['split']}"
    versions = f"adaponder {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    head = ("", "loss", "perplexity", "bits/byte", "mean depth", "MFLOP/token", "x plain decoder")
    return (
        f"## Results\n\nOn {measured['data']}{split}: {measured['tokens']:,} tokens, {measured['windows']}. FLOPs are "
        f"counted by formula, head, expectation, gates\nand attention included.\n\n{_table(head, rows)}\n\n"
        f"Measured with {versions} on {platform.machine()}."
    )


def _limits(license: str | None) -> str:
    unknown = "" if license else "- No licence was stated when this folder was exported: ask its author.\n"
    return f"""## Limits

{unknown}- What its training text holds it may repeat. Whether anything was done about that, or to make it follow
  instructions, is not recorded.
- Attention is `sdpa` or `eager`. Documents packed into one sequence are not kept apart.
- The cache holds K rows of keys and values per token, and a batch waits for its deepest token; the package's engine
  does neither.
- The loss of a forward is cross-entropy alone: it fine-tunes the backbone, but nothing teaches gates to halt."""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Formats a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
