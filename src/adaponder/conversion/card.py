"""The model card of an exported folder: the model, its training as recorded, and measurements."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Validation:
    """The run's validation at the step of the checkpoint: mean loss and depth over its first ``tokens`` tokens."""

    loss: float
    depth: float | None
    tokens: int | None


@dataclass(frozen=True)
class Training:
    """How a checkpoint was trained, by its ``state.json``; ``None`` where that does not record it."""

    recipe: str | None
    data: str | None
    tokenizer: str | None
    steps: int | None
    tokens: int | None
    seed: int | None
    validation: Validation | None


def training_of(folder: Path) -> Training | None:
    """Returns how the checkpoint in ``folder`` was trained; ``None`` without a readable record."""
    try:
        state = read_json(folder / "state.json")
    except AdaPonderError:  # conversions have none
        return None
    recipe = _section(state, "recipe")
    data, train, step = _section(recipe, "data"), _section(recipe, "train"), _whole(state.get("step"))
    factors = [step, _whole(train.get("global_batch")), _whole(data.get("sequence"))]
    return Training(
        recipe=_text(recipe.get("name")),
        data=_named(data.get("source")),
        # The data may have been prepared with another tokenizer than the recipe's.
        tokenizer=_named(state.get("tokenizer_name")) or _named(data.get("tokenizer")),
        steps=step,
        tokens=factors[0] * factors[1] * factors[2] if None not in factors else None,  # type: ignore[operator]
        seed=_whole(train.get("seed")),
        validation=None if step is None else _validation(folder, step, _whole(train.get("eval_tokens"))),
    )


def _validation(folder: Path, step: int, tokens: int | None) -> Validation | None:
    """Returns the validation after ``step`` steps in the metrics of the run that ``folder`` belongs to."""
    for run in (folder.parent, folder.parent.parent):
        path = run / "metrics.jsonl"
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


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name)
    return section if isinstance(section, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _named(value: Any) -> str | None:
    """Returns a source's name; for a path its last part, so that no local path is published."""
    text = _text(value)
    return PurePath(text).name if text is not None and PurePath(text).is_absolute() else text


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# --- the card -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardRow:
    """One row of the results: a text scored at the model's own depths, or at one depth for every token."""

    label: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    depth: float
    flops: float
    ratio: float


@dataclass(frozen=True)
class CardResults:
    """The measurements of an export; the first row is at the model's own depths."""

    data: str
    split: str | None
    tokens: int
    windows: str
    rows: Sequence[CardRow]


@dataclass(frozen=True)
class Card:
    """The content of a card; ``name`` is what the reader opens: a hub name, or the folder."""

    name: str
    config: AdaPonderConfig
    dtype: str
    training: Training | None
    measured: CardResults | None
    license: str | None

    def text(self) -> str:
        """Returns the text of README.md: the hub's metadata, then the page."""
        sections = (_title, _use, _model, _trained, _results, _limits)
        return f"---\n{self._metadata()}\n---\n\n" + "\n\n".join(section(self) for section in sections) + "\n"

    def _metadata(self) -> str:
        return ModelCardData(
            license=self.license or "unknown",
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["adaponder", "adaptive-computation", "custom_code", self.config.backbone_config.model_type],
            model_name=self.name.rpartition("/")[2],
            eval_results=list(self._eval_results()) or None,
        ).to_yaml()

    def _eval_results(self) -> Iterable[EvalResult]:
        if self.measured is None:
            return
        first = self.measured.rows[0]
        values: dict[str, tuple[str, float | None]] = {
            "loss": ("cross-entropy, nats per token", first.loss),
            "perplexity": ("perplexity", first.perplexity),
            "bits_per_byte": ("bits per byte", first.bits_per_byte),
            "mean_depth": ("iterations per token", first.depth),
        }
        for kind, (words, value) in values.items():
            if value is not None:
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=self.measured.data,
                    dataset_name=self.measured.data,
                    dataset_split=self.measured.split,
                    metric_type=kind,
                    metric_name=words,
                    metric_value=round(value, 6),
                )


def _title(card: Card) -> str:
    config, halts = card.config, method_class(card.config.method).halts
    how = (
        "After each iteration a small gate decides, token by token, whether to read again; a token that has halted\n"
        "keeps its keys, values and hidden state, and costs nothing more."
        if halts
        else "Every token is read equally often."
    )
    backbone, most = config.backbone_config.model_type, config.iterations
    return f"""# {card.name.rpartition("/")[2]}

A {backbone} decoder that reads each token up to {most} times before it predicts the next ({config.method}): between two
iterations the embedding that it expects next is added to the token's own.
{how}
The method is that of *AdaPonderLM: Gated Pondering Language Models with Token-Wise Adaptive Depth* (2026)."""


def _use(card: Card) -> str:
    config, most = card.config, card.config.iterations
    dial = (
        f"\nmodel.config.tau = 0.01  # a higher threshold than {config.tau:g}: tokens halt earlier"
        if method_class(config.method).halts
        else ""
    )
    return f"""## How to use

With torch and transformers {LEAST_TRANSFORMERS} or newer. The model's code is `modeling_adaponder.py` in this folder;
read it before you trust it.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{card.name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{card.name}", trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))

model(**inputs).depth  # how often each token was read
model.generate(**inputs, max_new_tokens=50, max_iterations={max(1, most - 1)})  # read no token more often{dial}
```

`pipeline("text-generation", "{card.name}", trust_remote_code=True)` and `lm_eval --model hf --model_args
pretrained={card.name},trust_remote_code=True` work as for any model. Where the package
`adaponder` is installed, its commands open this folder by their own classes (an engine that batches by depth, other
halting rules, training) and never run the code in it."""


def _model(card: Card) -> str:
    config, backbone = card.config, card.config.backbone_config
    shape = shape_of(config)
    counted = parameters_of(config, shape=shape)
    facts: dict[str, Any] = {
        "backbone": f"{backbone.model_type}, {shape.layers} layers, hidden size {shape.hidden}",
        "vocabulary": f"{shape.vocabulary:,}",
        "positions": config.max_position_embeddings,
        "parameters": f"{counted.total:,}, of which the recurrence adds {counted.added:,}",
        "iterations K": config.iterations,
        "embedding scale": f"{config.embedding_scale:g}",
        "precision": card.dtype,
    }
    facts |= method_class(config.method).described(config)
    return "## The model\n\n" + _table(("", ""), facts.items())


def _trained(card: Card) -> str:
    training = card.training
    if training is None:
        words = (
            "The checkpoint does not record how it was trained: data, number of tokens and schedule are not known here."
        )
        return f"## Training\n\n{words}"
    facts = {
        "data": training.data,
        "tokens": None if training.tokens is None else f"{training.tokens:,}",
        "tokenizer": training.tokenizer,
        "steps": None if training.steps is None else f"{training.steps:,}",
        "recipe": training.recipe,
        "seed": training.seed,
    }
    rows = [(name, "not recorded" if value is None else value) for name, value in facts.items()]
    validation = training.validation
    if validation is not None:
        many = "" if validation.tokens is None else f" (first {validation.tokens:,} tokens)"
        deep = "" if validation.depth is None else f" at mean depth {validation.depth:.3f}"
        rows.append((f"validation loss of the run{many}", f"{validation.loss:.4f}{deep}"))
    return "## Training\n\n" + _table(("", ""), rows)


def _results(card: Card) -> str:
    if card.measured is not None:
        return _measured(card.measured)
    config = card.config
    context = min(2048, config.max_position_embeddings or 2048) - 1
    costs = per_depth(config, context=context, shape=shape_of(config))
    rows = [(depth, f"{cost.flops / 1e6:,.2f}", f"{cost.ratio:.2f}") for depth, cost in enumerate(costs, 1)]
    return (
        "## Results\n\nLoss by depth and mean depth were not measured when this folder was exported "
        "(`adaponder export --data TEXT` measures them). What one more token costs after "
        f"{context:,} others, counted by formula:\n\n" + _table(("depth", "MFLOP", "x plain decoder"), rows)
    )


def _measured(measured: CardResults) -> str:
    rows = [
        (
            row.label,
            f"{row.loss:.4f}",
            f"{row.perplexity:,.2f}",
            "" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
            f"{row.depth:.3f}",
            f"{row.flops / 1e6:,.2f}",
            f"{row.ratio:.2f}",
        )
        for row in measured.rows
    ]
    part = "" if measured.split is None else f", {measured.split}"
    versions = f"adaponder {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    head = ("", "loss", "perplexity", "bits/byte", "mean depth", "MFLOP/token", "x plain decoder")
    return (
        f"## Results\n\nOn {measured.data}{part}: {measured.tokens:,} tokens, {measured.windows}. FLOPs are counted by "
        f"formula, head, expectation, gates\nand attention included.\n\n{_table(head, rows)}\n\n"
        f"Measured with {versions} on {platform.machine()}."
    )


def _limits(card: Card) -> str:
    unknown = "" if card.license else "- No licence was stated when this folder was exported: ask its author.\n"
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
