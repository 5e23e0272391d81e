"""Runs Hugging Face's ``generate`` over a ledger, after checking the prompt and the settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import fields
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from adaponder.checkpoints.special_tokens import as_ids
from adaponder.errors import CacheError, EvaluationError, InputError
from adaponder.execution.ledger import Ledger
from adaponder.execution.tokens import check_ids, require_tensors
from adaponder.fields import Field, Range, Sampling, fields_of, violation
from adaponder.modeling.arguments import RunTime, check_room

# The generating model and its run-time settings. Not passed as keyword arguments, because Hugging Face would pass them
# to an assistant model too, but not to the additional forwards of classifier-free guidance.
_GENERATING: ContextVar[tuple[Any, dict[str, Any]] | None] = ContextVar("generating", default=None)
_RUN_TIME = tuple(item.name for item in fields(RunTime))
# The same ranges as the engine's, except that temperature must be above 0: here do_sample=False means greedy decoding.
_CHECKED = (
    *(fields_of(Sampling)[name] for name in ("top_p", "top_k", "max_new_tokens")),
    Field("temperature", float, range=Range.parse("(0, inf)")),
    Field("num_beams", int, range=Range.parse("[1, inf)")),
)


def generating(model: Any) -> RunTime | None:
    """Returns the settings of the ``generate`` call that this model is running; ``None`` outside of ``generate``."""
    current = _GENERATING.get()
    return RunTime(**current[1]) if current is not None and current[0] is model else None


def check_generation(
    input_ids: Tensor | None, settings: Mapping[str, Any], *, vocabulary: int, positions: int | None
) -> None:
    """Raises on prompts and settings that ``generate`` cannot use.

    ``settings`` are the values of the generation config, overridden by the keyword arguments; ``positions`` is the
    backbone's number of positions, ``None`` if it is unlimited.
    """
    embedded = settings.get("inputs_embeds")
    require_tensors(input_ids=input_ids, inputs_embeds=embedded, attention_mask=settings.get("attention_mask"))
    if embedded is None and input_ids is None and settings.get("bos_token_id") is not None:
        input_ids = torch.tensor([[settings["bos_token_id"]]])  # transformers starts from this token
    if embedded is not None:
        # Given both, transformers reads the embeddings and returns the ids before the new tokens.
        if embedded.ndim != 3 or (input_ids is not None and input_ids.shape != embedded.shape[:2]):
            raise InputError("inputs_embeds must be [batch, time, hidden], and input_ids beside it [batch, time]")
        input_ids = torch.full(embedded.shape[:2], -1, device=embedded.device)  # no token id, so no padding
    if input_ids is None or input_ids.ndim != 2 or 0 in input_ids.shape:
        raise InputError("input_ids: the prompt is empty and there is no bos_token_id; give at least one token")
    if embedded is None:
        # Synchronises the device once, instead of in every forward.
        check_ids("input_ids", input_ids, vocabulary, wait=True)
    lengths = _lengths(input_ids, settings)
    if (lengths == 0).any():
        raise InputError("attention_mask: a sequence is all padding; give at least one real token per sequence")
    for field in _CHECKED:
        value = settings.get(field.name)
        if value is not None and (problem := violation(field, value)):
            raise InputError(f"{field.name}={value} {problem.partition(';')[0]}")
    if isinstance(settings.get("custom_generate"), str):
        raise InputError("custom_generate: runs code from a folder or the hub; pass a function of your own instead")
    if settings.get("assistant_early_exit") is not None:
        raise InputError("assistant_early_exit: every iteration needs all layers; draft with an assistant_model")
    cache = settings.get("past_key_values")
    if isinstance(cache, Ledger) and cache.get_seq_length() >= input_ids.shape[1]:
        raise CacheError(
            f"past_key_values holds {cache.get_seq_length()} tokens, input_ids {input_ids.shape[1]}: give the whole "
            "text so far, with at least one token that the cache does not hold"
        )
    if positions is not None:
        _check_length(int(lengths.max()), settings, positions)


def _lengths(ids: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Counts the real tokens of each sequence as Hugging Face does: by the mask or, without one, the padding token."""
    mask = settings.get("attention_mask")
    if mask is not None:
        if mask.ndim != 2 or mask.shape != ids.shape:
            raise InputError(
                f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}: they must agree"
            )
        return (mask != 0).sum(1)
    pad = settings.get("pad_token_id")
    if isinstance(pad, int) and pad not in as_ids(settings.get("eos_token_id")):
        return (ids != pad).sum(1)
    return ids.new_full((ids.shape[0],), ids.shape[1])


def _check_length(prompt: int, settings: Mapping[str, Any], positions: int) -> None:
    if prompt > positions:
        raise InputError(
            f"input_ids: the prompt has {prompt} tokens, the backbone has {positions} positions; shorten it"
        )
    new, total = settings.get("max_new_tokens"), settings.get("max_length")
    if new is not None:
        check_room(prompt, new, positions)
    elif total is not None and total > positions + 1:
        raise InputError(f"max_length={total}: the backbone has {positions} positions")


def check_cache(cache: Any, new: Ledger) -> Ledger:
    """Returns ``cache``; raises unless it is a ledger with the same settings as ``new``, an empty ledger."""
    if not isinstance(cache, Ledger):
        raise CacheError(
            f"past_key_values is a {type(cache).__name__}: this model keeps one row per token and iteration, which "
            "only its own Ledger can hold (static, quantised and offloaded caches cannot); leave it out to get one"
        )
    differences = [
        f"{name} {value} instead of {new.identity[name]}"
        for name, value in cache.identity.items()
        if new.identity.get(name, value) != value
    ]
    if differences:
        raise CacheError(
            f"past_key_values was filled with {', '.join(differences)}: use the same settings, or a new cache"
        )
    return cache


def _require_numbers(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Returns the logits unchanged; raises on NaN, from which Hugging Face would silently generate token 0."""
    if bool(logits.isnan().any()):
        raise EvaluationError(
            f"after {input_ids.shape[1]} tokens the model's logits are NaN: its weights are damaged, or it overflows "
            "in this precision"
        )
    return logits


class LedgerGenerationMixin(GenerationMixin):
    """Runs Hugging Face's ``generate`` with a ledger in place of Hugging Face's caches.

    The model class provides ``new_ledger`` and ``_policy``. The name of this class must end in "GenerationMixin",
    because Hugging Face recognises models that can generate by such a base class.
    """

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raises, because Hugging Face's continuous batching (``generate_batch``) caches only one row per token."""
        raise InputError(
            "generate_batch: Hugging Face's continuous batching has no rows for iterations; use "
            "adaponder.inference.Engine(model).generate([Request(prompt=ids), …])"
        )

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any):
        """Runs Hugging Face's ``generate``, with a ledger as its cache.

        See the model's ``forward`` for ``policy``, ``max_iterations`` and ``seed``. With ``return_dict_in_generate``,
        the result's ``past_key_values.depth`` has the depths of all processed tokens.
        """
        overrides = {name: value for name, value in kwargs.items() if value is not None}
        check_generation(
            inputs if inputs is not None else kwargs.get("input_ids"),
            (generation_config or self.generation_config).to_dict() | overrides,
            vocabulary=self.config.vocab_size,
            positions=self.config.max_position_embeddings,
        )
        run_time = {name: kwargs.pop(name) for name in _RUN_TIME if name in kwargs}
        self._policy(run_time.get("policy"), generates=True)
        token = _GENERATING.set((self, run_time))
        try:
            return super().generate(inputs, generation_config=generation_config, **kwargs)
        finally:
            _GENERATING.reset(token)

    @wraps(GenerationMixin._get_logits_processor)
    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        processors = super()._get_logits_processor(*args, **kwargs)
        processors.insert(0, _require_numbers)
        return processors

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # Hugging Face reads its signature
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        _, run_time = _GENERATING.get() or (None, {})
        return super().prepare_inputs_for_generation(*args, **kwargs) | {"output_gates": False} | run_time

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Sets a ledger as the cache: Hugging Face's default cache has one row per token instead of up to K."""
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise CacheError(
                f"cache_implementation={implementation!r} keeps one row per token and layer; this model keeps one per "
                "iteration too: leave it out to use the ledger"
            )
        cache = model_kwargs.get("past_key_values")
        _, run_time = _GENERATING.get() or (None, {})
        ledger = self.new_ledger(run_time.get("max_iterations"))
        if cache is not None:
            check_cache(cache, ledger)._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = ledger
