"""What ``generate`` accepts, checked before the first token: each refusal names the field and the cure."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from adaponder.config import AdaPonderConfig
from adaponder.errors import CacheError, InputError
from adaponder.ledger import Ledger
from adaponder.policies import Policy


def check_generation(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    config: AdaPonderConfig,
    settings: GenerationConfig,
    policy: Policy | None,
) -> None:
    if input_ids is None or input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise InputError("input_ids: the prompt is empty; give at least one token per sequence")
    if attention_mask is not None and attention_mask.ndim == 2 and bool((attention_mask.sum(1) == 0).any()):
        raise InputError("attention_mask: a sequence is all padding; give at least one real token per sequence")
    _number(settings, "temperature", "above 0", lambda x: x > 0)
    _number(settings, "top_p", "in (0, 1]", lambda x: 0 < x <= 1)
    _number(settings, "top_k", "0 (off) or more", lambda x: x >= 0)
    _number(settings, "max_new_tokens", "at least 1", lambda x: x >= 1)
    _check_length(input_ids, attention_mask, config, settings)
    if policy is not None and not policy.causal:
        raise InputError(f"policy={policy.fingerprint} looks at the future: it can be evaluated, not generated with")


def _check_length(
    input_ids: Tensor, attention_mask: Tensor | None, config: AdaPonderConfig, settings: GenerationConfig
) -> None:
    limit = config.max_position_embeddings
    if limit is None:
        return
    prompt = input_ids.shape[1]
    if prompt > limit and attention_mask is not None:
        prompt = int(attention_mask.sum(1).max())
    if prompt > limit:
        raise InputError(
            f"input_ids: the prompt has {prompt} tokens, the backbone's positions end at {limit}; shorten it"
        )
    new = settings.max_new_tokens
    # The last new token is returned without being read, so it needs no position.
    if new is not None and prompt + new - 1 > limit:
        raise InputError(
            f"max_new_tokens={new}: {prompt} prompt tokens leave room for {limit - prompt + 1} before position {limit}"
        )


def _number(settings: GenerationConfig, name: str, allowed: str, holds: Any) -> None:
    value = getattr(settings, name, None)
    if value is None:
        return
    if not isinstance(value, (int, float)) or math.isnan(value) or not holds(value):
        raise InputError(f"{name}={value}: must be {allowed}")


def check_cache(cache: Any, *, layers: int, iterations: int, slots_per_token: int) -> Ledger:
    """The cache itself, if it can be gone on from with these settings."""
    if not isinstance(cache, Ledger):
        raise CacheError(
            f"past_key_values is a {type(cache).__name__}: this model keeps one row per token and iteration, which "
            "only its own Ledger can hold (static, quantised and offloaded caches cannot); leave it out to get one"
        )
    if cache.layers_count != layers:
        raise CacheError(f"the cache is of a model with {cache.layers_count} layers, this one has {layers}")
    if (cache.iterations, cache.slots_per_token) != (iterations, slots_per_token):
        raise CacheError("the cache was filled with another max_iterations: go on with the same, or start anew")
    return cache
