"""Defines a model's config: the backbone's config and the settings of the recurrence."""

from __future__ import annotations

import copy
import re
from dataclasses import fields
from typing import Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from adaponder.errors import ConfigError, did_you_mean, in_one_line, shown
from adaponder.fields import Recurrence, check_fields, is_removed, meanings
from adaponder.methods import method_class
from adaponder.registry import scale_from_scratch, scale_of

# Keys that Hugging Face itself writes into a config.json or passes to a config.
_FOREIGN_KEYS = {
    "name_or_path",
    "_name_or_path",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "torch_dtype",
    "num_labels",
    "model_type",
    "transformers_version",
    "transformers_weights",
    "_commit_hash",
    "_from_auto",
    "gradient_checkpointing",
    "per_layer_config",
    "use_cache",  # transformers.Trainer writes it
}

# The auto_map in the config.json of folders that ``adaponder export`` writes. These entries, or some of them, are
# ignored, because this package's own classes are used; any other auto_map is refused.
OUR_AUTO_MAP = {
    "AutoConfig": "configuration_adaponder.AdaPonderConfig",
    "AutoModel": "modeling_adaponder.AdaPonderModel",
    "AutoModelForCausalLM": "modeling_adaponder.AdaPonderForCausalLM",
}

# Limits above any real model; larger values would exhaust the memory before an error is raised.
_LARGEST = {"vocab_size": 2**24, "num_hidden_layers": 4096, "num_attention_heads": 2**16, "hidden_size": 2**20}
_LARGEST_SIZE = 2**31 - 1
# Sizes of the backbone that AdaPonderConfig repeats as attributes; as arguments, they must equal backbone_config's.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SIZE = re.compile(r"(_size|_dim|_rank|_heads|_layers|max_position_embeddings)$|^(n|num)_")


def is_our_auto_map(auto_map: Any) -> bool:
    """Returns whether all entries of an ``auto_map`` are in ``OUR_AUTO_MAP``; callers refuse any other ``auto_map``.

    Ignores the prefix ``NAME--`` that Hugging Face adds to each entry for a hub repository NAME.
    """
    if not isinstance(auto_map, dict) or not auto_map:
        return False
    return all(
        isinstance(entry, str) and OUR_AUTO_MAP.get(name) == entry.rpartition("--")[2]
        for name, entry in auto_map.items()
    )


def _of_backbone(name: str) -> Any:
    """Returns a property for the field ``name`` of the backbone's config; a missing field is ``None``."""
    return property(
        lambda config: getattr(config.backbone_config, name, None),
        lambda config, value: setattr(config.backbone_config, name, value),
    )


class AdaPonderConfig(PreTrainedConfig, Recurrence):
    """The config of a model: the backbone's config and the settings of the recurrence.

    Args:
        backbone_config: the config of any Hugging Face decoder (object, or dict with ``model_type``).
    """

    model_type = "adaponder"
    sub_configs: ClassVar[Any] = {"backbone_config": AutoConfig}
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "hidden_states",
        "depth",
        "gates",
        "iteration_logits",
        "terms",
    ]

    backbone_config: Any = None  # may be passed as a dict; always a config object afterwards

    def __post_init__(self, **kwargs: Any):
        kwargs = {key: value for key, value in kwargs.items() if not is_removed(f"model.{key}", value)}
        sizes = {name: kwargs.pop(name, None) for name in _SIZES}
        _refuse_unknown(kwargs, {field.name for field in fields(type(self))})
        self.backbone_config = _as_config(self.backbone_config)
        for name, size in sizes.items():
            if size is not None and size != getattr(self, name):
                raise ConfigError(
                    f"{name}={shown(size)} must be set in backbone_config, where it is {getattr(self, name)}"
                )
        method = method_class(self.method)
        if method.fixed_iterations is not None:
            self.iterations = method.fixed_iterations
        self.check()
        if self.embedding_scale is None:
            self.embedding_scale = scale_from_scratch(self.method)
        if isinstance(self.embedding_scale, str):
            self.embedding_scale = scale_of(self.embedding_scale, self.backbone_config.hidden_size)
        method.complete(self)
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raises on settings from which no model can be built; the model's constructor calls it again."""
        check_fields(self, kind=Recurrence)
        if self.ponder_pool == "closed" and self.ponder_on == "logits":
            raise ConfigError(
                "ponder_pool='closed' counts later gates as probability 0, which no logit has: "
                "use ponder_on='probabilities'"
            )
        backbone = self.backbone_config
        sizes = {name: getattr(backbone, name, None) for name in (*_LARGEST, "num_key_value_heads", "head_dim")}
        _check_sizes(backbone.to_dict() | sizes)
        if self.pause_token_id is not None and self.pause_token_id >= self.vocab_size:
            raise ConfigError(
                f"pause_token_id={self.pause_token_id} lies outside the vocabulary of {self.vocab_size}: give an "
                "unused token id, or None for a learned vector"
            )

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Returns the backbone's config, which has the vocabulary size, special tokens and lengths."""
        return self.backbone_config

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings, and the backbone's sizes, because peft looks for them here."""
        return super().to_dict() | {name: getattr(self, name) for name in _SIZES}

    def to_diff_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_diff_dict().items() if name not in _SIZES}

    @property
    def auto_map(self) -> dict[str, str]:
        """Returns an empty mapping: there is no remote code, but TRL reads this attribute of custom configs."""
        return {}

    vocab_size = _of_backbone("vocab_size")
    hidden_size = _of_backbone("hidden_size")
    num_hidden_layers = _of_backbone("num_hidden_layers")
    num_attention_heads = _of_backbone("num_attention_heads")
    max_position_embeddings = _of_backbone("max_position_embeddings")
    tie_word_embeddings = _of_backbone("tie_word_embeddings")
    # Hugging Face's tools read and set these on the model's config; they are stored in the backbone's config.
    eos_token_id = _of_backbone("eos_token_id")
    bos_token_id = _of_backbone("bos_token_id")
    pad_token_id = _of_backbone("pad_token_id")


AdaPonderConfig.__doc__ = f"{(AdaPonderConfig.__doc__ or '').rstrip()}\n{meanings(Recurrence)}\n    "


def _as_config(backbone: PreTrainedConfig | dict | None) -> PreTrainedConfig:
    if backbone is None:
        raise ConfigError("backbone_config is missing: give the config of a Hugging Face decoder")
    if isinstance(backbone, PreTrainedConfig):
        # Copied: Hugging Face writes the outer model's attention implementation into it, not into the stock model's.
        return copy.deepcopy(backbone)
    if not isinstance(backbone, dict):
        raise ConfigError(f"backbone_config={shown(backbone)} must be the config of a Hugging Face decoder")
    if "auto_map" in backbone:
        raise ConfigError("backbone_config.auto_map asks to run code from the checkpoint: refused")
    if "model_type" not in backbone:
        raise ConfigError("backbone_config.model_type is missing: name the decoder family, e.g. gpt_neox")
    family = backbone["model_type"]
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise ConfigError(f"backbone_config.model_type={shown(family)} is not a family of the installed transformers")
    _check_sizes(backbone)
    try:
        return AutoConfig.for_model(**backbone)
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"backbone_config: {family} refuses it: {in_one_line(error)}") from error


def _refuse_unknown(kwargs: dict[str, Any], known: set[str]) -> None:
    if "auto_map" in kwargs and not is_our_auto_map(kwargs.pop("auto_map")):
        raise ConfigError("auto_map asks to run code from the checkpoint: refused")
    for key in kwargs:
        if key not in known | _FOREIGN_KEYS:
            raise ConfigError(f"{key}: AdaPonderConfig has no such field{did_you_mean(key, known)}")


def _check_sizes(backbone: dict[str, Any]) -> None:
    """Raises on sizes that no decoder can have; called before memory is allocated for them."""
    for name, value in backbone.items():
        if name in _LARGEST or (name == "num_key_value_heads" and value is not None):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"backbone_config.{name}={shown(value)} must be a positive whole number")
            if value > (limit := _LARGEST.get(name, _LARGEST_SIZE)):
                raise ConfigError(f"backbone_config.{name}={shown(value)} must be at most {limit}")
        if _SIZE.search(name) and isinstance(value, (int, float)) and not 0 <= value <= _LARGEST_SIZE:
            raise ConfigError(f"backbone_config.{name}={shown(value)} must be between 0 and {_LARGEST_SIZE}")
    heads, width = backbone.get("num_attention_heads"), backbone.get("hidden_size")
    if heads and (groups := backbone.get("num_key_value_heads")) and heads % groups:
        raise ConfigError(f"backbone_config.num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    if heads and width and backbone.get("head_dim") is None and width % heads:
        raise ConfigError(f"backbone_config.num_attention_heads={heads} does not divide hidden_size={width}")
