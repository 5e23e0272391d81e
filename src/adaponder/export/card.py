"""The model card of an exported folder: what is known of the model, measured where it was, and what is not known."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCardData

from adaponder.backbones.shape import shape_of
from adaponder.config import AdaPonderConfig
from adaponder.export.history import Training
from adaponder.methods import method_class
from adaponder.methods.cost import parameters_of, per_depth
from adaponder.version import __version__

LEAST_TRANSFORMERS = "5.17"


@dataclass(frozen=True)
class Row:
    """A text scored once: at the model's own depths, or with every token read equally often."""

    label: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    depth: float
    flops: float
    ratio: float


@dataclass(frozen=True)
class Measured:
    """What was measured when the folder was exported; the first row is at the model's own depths."""

    data: str
    split: str | None
    tokens: int
    windows: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Card:
    """All that a card tells; ``name`` is what the reader will open: a hub name, or the folder."""

    name: str
    config: AdaPonderConfig
    dtype: str
    training: Training | None
    measured: Measured | None
    license: str | None

    def text(self) -> str:
        """README.md: the hub's metadata, then the page."""
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
        own = self.measured.rows[0]
        values: dict[str, tuple[str, float | None]] = {
            "loss": ("cross-entropy, nats per token", own.loss),
            "perplexity": ("perplexity", own.perplexity),
            "bits_per_byte": ("bits per byte", own.bits_per_byte),
            "mean_depth": ("iterations per token", own.depth),
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
    known = card.training
    if known is None:
        words = (
            "The checkpoint does not record how it was trained: data, number of tokens and schedule are not known here."
        )
        return f"## Training\n\n{words}"
    facts = {
        "data": known.data,
        "tokens": None if known.tokens is None else f"{known.tokens:,}",
        "tokenizer": known.tokenizer,
        "steps": None if known.steps is None else f"{known.steps:,}",
        "recipe": known.recipe,
        "seed": known.seed,
    }
    rows = [(name, "not recorded" if value is None else value) for name, value in facts.items()]
    validation = known.validation
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


def _measured(measured: Measured) -> str:
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
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
