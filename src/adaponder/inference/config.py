"""Defines an engine's options, their defaults for a given model, and which models an engine can run."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Literal

import torch

from adaponder.backbones.families import read_whole, rope_types
from adaponder.checkpoints.special_tokens import as_ids
from adaponder.errors import BackboneError, InputError
from adaponder.fields import check_fields, setting
from adaponder.inference.bodies import Body
from adaponder.modeling import AdaPonderForCausalLM

# Rows per page.
PAGE = 16
# Up to this number of lanes, drafting is on by default: it makes decoding 2.3 times as fast with one lane and 2.0 times
# with four, but slower with 16 (benchmarks/README.md).
FEW_LANES = 4


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine; ``None`` takes the default for the model and its device."""

    lanes: int = setting(64, "Maximum number of sequences on the device.", "[1, inf)")
    rows: int | None = setting(
        None, "Number of KV rows in the pools; by default what all lanes can use, if memory allows.", "[1, inf)"
    )
    chunk: int | None = setting(None, "Maximum number of prefill rows per tick.", "[1, inf)")
    tokens: int | None = setting(
        None, "Maximum length of a sequence; by default the backbone's number of positions.", "[2, inf)"
    )
    max_iterations: int | None = setting(None, "Maximum depth of a token, for all requests.", "[1, 1024]")
    share_prefixes: bool = setting(True, "Whether requests with a common prefix share its rows.")
    prefix_block: int = setting(16, "Tokens per block of the prefix cache.", "[1, inf)")
    burst: int | None = setting(
        None, "Maximum number of ticks per launch while no prompt is prefilled; 16 on a GPU, else 1.", "[1, inf)"
    )
    late: bool | None = setting(
        None, "Whether the host processes one launch's results while the next one runs; by default on a GPU."
    )
    expectation_top_k: int | None = setting(
        None,
        "Compute expected embeddings from the k likeliest tokens only, which changes the model; by default as trained.",
        "[1, inf)",
    )
    body: Literal["fused", "stock"] | None = setting(None, "Kernels of the backbone; by default fused if possible.")
    drafts: int | None = setting(
        None,
        "Maximum number of a sequence's draft tokens, which start before they are certain: drafting costs rows, saves "
        "ticks and changes no result; by default on for few lanes.",
        "[0, inf)",
    )

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


@dataclass(frozen=True)
class EngineShape:
    """The sizes of an engine, resolved from its config and its model.

    Attributes:
        iterations: the maximum depth of a token.
        width: slots per token, which is also the number of rows of a token in one pass.
        passes: the maximum number of passes per token.
        window: the maximum number of tokens of one sequence in a tick; above 1 if the engine drafts.
    """

    lanes: int
    iterations: int
    tokens: int
    width: int
    passes: int
    window: int
    burst: int
    chunk: int
    page_size: int = PAGE

    @classmethod
    def of(cls, config: EngineConfig, model: AdaPonderForCausalLM) -> EngineShape:
        """Resolves an engine's options for a model; raises :class:`InputError` if they do not fit the model."""
        on_gpu = model.device.type == "cuda"
        iterations, top_k = model.most_iterations(config.max_iterations), config.expectation_top_k
        width, passes = model.method.slots_per_token(iterations), model.method.passes(iterations)
        if top_k is not None and not model.method.mixes_vocabulary:
            raise InputError(f"expectation_top_k={top_k} has no effect: {model.config.method} mixes no embeddings")
        if top_k is not None and top_k > model.config.vocab_size:
            raise InputError(f"expectation_top_k={top_k} must be at most {model.config.vocab_size}, the vocabulary")
        return cls(
            lanes=config.lanes,
            iterations=iterations,
            tokens=max_tokens(model, config.tokens),
            width=width,
            passes=passes,
            window=_window(config, model.config.method, width, passes),
            burst=config.burst or (16 if on_gpu else 1),
            chunk=max(width, config.chunk or (8192 if on_gpu else 256) * width),
        )

    @property
    def rows_in_flight(self) -> int:
        """The maximum number of decode rows of one lane in two launches, as many as can await processing."""
        return 2 * self.burst * self.width

    def default_rows(self, model: AdaPonderForCausalLM, body: Body) -> int:
        """Returns the number of pool rows that all lanes need for the longest sequences at full depth.

        The number is limited to what fits into 90 % of the GPU's free memory, or into 1 GiB without a GPU.
        """
        needed = self.lanes * (self.tokens * self.width * self.passes + 2 * PAGE) + 3 * PAGE + self.rows_in_flight
        free = 1 << 30
        if model.device.type == "cuda":
            gc.collect()  # frees the pools of engines that are no longer referenced
            torch.cuda.empty_cache()
            free = int(0.9 * torch.cuda.mem_get_info(model.device)[0])
        row_bytes = sum(heads * size for shapes in body.row_shapes() for heads, size in shapes) * model.dtype.itemsize
        return min(needed, max(4 * PAGE, free // row_bytes))


def check_model(model: AdaPonderForCausalLM) -> None:
    """Raises :class:`InputError` or :class:`BackboneError` if an engine cannot run the model."""
    if not hasattr(model, "method"):
        raise InputError(
            f"model is a {type(model).__name__}, not an AdaPonderForCausalLM: make one with its from_pretrained(path) "
            "or from_backbone(decoder)"
        )
    reuse, family = model.method.reuse(), model.config.backbone_config.model_type
    if reuse in ("kv", "none"):
        raise InputError(
            f"reuse={reuse!r} changes the hidden state of halted tokens, so their rows cannot be skipped; an engine "
            "needs reuse='state' (model.generate supports this model)"
        )
    if read_whole(model.config.backbone_config):
        raise BackboneError(
            f"{family} has no usable KV cache, so an engine cannot decode it (model.generate with use_cache=False can)"
        )
    if "dynamic" in rope_types(model.config.backbone_config):
        raise BackboneError(
            f"{family}: rope_type='dynamic' changes all rotary angles with the longest text of a batch, so requests "
            "would influence each other; an engine cannot decode it (model.generate can)"
        )
    if model.training:
        raise InputError("model is in training mode; call model.eval() first")


def max_tokens(model: AdaPonderForCausalLM, tokens: int | None) -> int:
    """Returns the maximum length of a sequence: ``tokens``, or by default the backbone's number of positions.

    The default is 4096 if the backbone has no such number. Raises if ``tokens`` is below 2 or above the number.
    """
    limit = model.config.max_position_embeddings
    if tokens is None:
        return limit or 4096
    if tokens < 2 or (limit is not None and tokens > limit):
        raise InputError(f"tokens={tokens} must be between 2 and {limit}, the backbone's number of positions")
    return tokens


def eos_ids(model: AdaPonderForCausalLM) -> frozenset[int]:
    """Returns the model's end-of-text token ids."""
    return frozenset(as_ids(model.generation_config.eos_token_id))


def _window(config: EngineConfig, method: str, width: int, passes: int) -> int:
    """Returns the number of tokens in a draft window; 1 without drafting.

    A window gains at most one token per tick, and a token leaves it after at most ``passes`` ticks, so the window never
    has more than ``passes`` tokens. Raises if drafts are requested for a method that cannot use them.
    """
    drafts = config.drafts
    if drafts is None:
        return passes if config.lanes <= FEW_LANES and width == 1 else 1
    if drafts and width > 1:
        raise InputError(f"drafts={drafts}: {method} computes all {width} slots of a token in one pass; use drafts=0")
    if drafts and passes == 1:
        raise InputError(f"drafts={drafts}: {method} has one iteration, so there is nothing to verify; use drafts=0")
    return min(drafts, passes - 1) + 1
