"""A model is a backbone and a way of reading it again: this is both, as data."""

from __future__ import annotations

import copy
import difflib
import re
from dataclasses import fields
from typing import Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from adaponder.errors import ConfigError, in_one_line
from adaponder.settings import (
    PonderOn,
    Recurrence,
    check_against,
    fits,
    needed,
    scale_from_scratch,
    scale_of,
    shown,
)

_SETTINGS = {item.name for item in fields(Recurrence)}

# What Hugging Face itself writes into, or passes through, a config.json: not ours to judge.
_FOREIGN_KEYS = {
    "name_or_path",
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

# What a folder that brings its own code will say of it (exporting such folders does not exist yet, so nothing equals
# this). Equal to it, an auto_map is ignored and the classes of this package are used; any other is refused.
OUR_AUTO_MAP: dict[str, str] | None = None

# More than any model has, by far; what lies beyond would fill the memory before it is found to be nonsense.
_LARGEST = {"vocab_size": 2**24, "num_hidden_layers": 4096, "num_attention_heads": 2**16, "hidden_size": 2**20}
_LARGEST_SIZE = 2**31 - 1
_SIZE = re.compile(r"(_size|_dim|_rank|_heads|_layers|max_position_embeddings)$|^(n|num)_")


def is_our_auto_map(auto_map: Any) -> bool:
    """Whether an ``auto_map`` is the one that this package writes; code in a folder is not run even then."""
    return OUR_AUTO_MAP is not None and auto_map == OUR_AUTO_MAP


class AdaPonderConfig(PreTrainedConfig):
    """The backbone's own config plus the recurrence around it.

    Args:
        backbone_config: config of any Hugging Face decoder (object, or dict with ``model_type``).
        method: which recurrence; one of adaponder, ponder, loop, pause, mor, ouro, vanilla.
        iterations: K, the most times a token is read (PonderLM's ``pondering_steps + 1``; pause: 1 + pauses).
        tau: a token halts once its gate ``s < tau`` (eq. 4).
        gate_width: hidden width of a gate as a multiple of the hidden size; 0 makes the gate linear.
        gate_bias: where gates start: ``s = sigmoid(gate_bias)``. The config says how far they are open.
        shared_gate: one gate for all iterations (the paper's ablation) instead of one each.
        embedding_scale: factor on embeddings and on the table of the mixture: a number, ``sqrt(d)`` or
            ``sqrt(2.5 d)``; once built it is a number. ``None`` is what training from scratch uses: sqrt(d), for loop
            sqrt(2.5 d). Conversions of stock models have 1, so that vanilla is the stock model.
        initial_multiplier: further factor on the first embedding only (PonderLM's ``mutiply_pondering_steps``).
        expectation_top_k: mix only the k likeliest tokens' embeddings; ``None`` mixes the whole vocabulary.
        reuse: what a halted token keeps. ``state``: keys, values and hidden state; ``kv``: keys and values only (the
            paper's equations); ``none``: nothing (the ablation).
        ponder_on: the ponder loss acts on gate ``probabilities`` or ``logits``.
        ponder_pool: later gates of a halted token count as they are (``all``) or as constant 0 (``closed``).
        pause_token_id: an unused vocabulary slot that serves as pause token; ``None`` learns a vector of its own.
        capacities: mor, share of tokens each recursion keeps in training; the first is 1 (every token is read once).
        router_alpha: mor, factor on the router's sigmoid.
        router_loss_weight: mor, factor on the auxiliary loss.
        exit_threshold: ouro, a token exits once its cumulative exit probability reaches this.
        exit_entropy_weight: ouro, the beta of stage I.
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

    backbone_config: Any = None  # a config or a dict when given, always a config once built
    method: str = "adaponder"
    iterations: int = 4
    tau: float = 1e-4
    gate_width: int = 4
    gate_bias: float = 4.0
    shared_gate: bool = False
    embedding_scale: float | str | None = None
    initial_multiplier: float = 1.0
    expectation_top_k: int | None = None
    reuse: str = "state"
    ponder_on: str = "probabilities"
    ponder_pool: str = "all"
    pause_token_id: int | None = None
    capacities: list[float] | None = None
    router_alpha: float = 0.1
    router_loss_weight: float = 1e-3
    exit_threshold: float = 1.0
    exit_entropy_weight: float = 0.1

    def __post_init__(self, **kwargs: Any):
        _refuse_unknown(kwargs, {field.name for field in fields(type(self))})
        self.backbone_config = _as_config(self.backbone_config)
        if self.method == "vanilla":
            self.iterations = 1
        self.check()
        if self.embedding_scale is None:
            self.embedding_scale = scale_from_scratch(self.method)
        if isinstance(self.embedding_scale, str):
            self.embedding_scale = scale_of(self.embedding_scale, self.backbone_config.hidden_size)
        if self.method == "mor":
            self.capacities = _capacities(self.capacities, self.iterations)
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raises on values that no model can be built from; called again before anything is allocated."""
        _check_recurrence(self)
        _check_backbone(self.backbone_config)
        _check_pause(self)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The backbone's: vocabulary, special tokens and lengths are its own, and written down once."""
        return self.backbone_config

    @property
    def vocab_size(self) -> int:
        return self.backbone_config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.backbone_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.backbone_config.num_hidden_layers

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self.backbone_config, "max_position_embeddings", None)

    # Hugging Face's own tools read and set these on a model's config: the backbone's are the ones that are saved.

    @property
    def eos_token_id(self) -> Any:
        return getattr(self.backbone_config, "eos_token_id", None)

    @eos_token_id.setter
    def eos_token_id(self, value: Any) -> None:
        self.backbone_config.eos_token_id = value

    @property
    def bos_token_id(self) -> Any:
        return getattr(self.backbone_config, "bos_token_id", None)

    @bos_token_id.setter
    def bos_token_id(self, value: Any) -> None:
        self.backbone_config.bos_token_id = value

    @property
    def pad_token_id(self) -> Any:
        return getattr(self.backbone_config, "pad_token_id", None)

    @pad_token_id.setter
    def pad_token_id(self, value: Any) -> None:
        self.backbone_config.pad_token_id = value

    @property
    def table_scale(self) -> float:
        """Factor on the embedding table of the mixture."""
        assert isinstance(self.embedding_scale, (int, float))  # resolved when built
        return self.embedding_scale

    @property
    def input_scale(self) -> float:
        """Factor on the first embedding, E^0."""
        return self.table_scale * self.initial_multiplier

    def gates(self) -> int:
        """How many decisions a token faces: none after the last iteration."""
        return self.iterations - 1


def _as_config(backbone: PreTrainedConfig | dict | None) -> PreTrainedConfig:
    if backbone is None:
        raise ConfigError("backbone_config is missing: give the config of a Hugging Face decoder")
    if isinstance(backbone, PreTrainedConfig):
        # A copy: Hugging Face writes the outer model's attention choice into it, and the stock model keeps its own.
        return copy.deepcopy(backbone)
    if not isinstance(backbone, dict):
        raise ConfigError(f"backbone_config={shown(backbone)}: the config of a Hugging Face decoder is needed")
    if "auto_map" in backbone:
        raise ConfigError("backbone_config.auto_map asks to run code from the checkpoint: refused")
    if "model_type" not in backbone:
        raise ConfigError("backbone_config.model_type is missing: name the decoder family, e.g. gpt_neox")
    fields_of_backbone = dict(backbone)
    family = fields_of_backbone.pop("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise ConfigError(f"backbone_config.model_type={shown(family)}: this transformers knows no such family")
    for name in _LARGEST:
        if name in backbone:
            _check_count(name, backbone[name])
    _check_sizes(backbone)
    if {"hidden_size", "num_attention_heads"} <= backbone.keys() and backbone.get("head_dim") is None:
        _check_heads(backbone["hidden_size"], backbone["num_attention_heads"])
    try:
        return AutoConfig.for_model(family, **fields_of_backbone)
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"backbone_config: {family} refuses it: {in_one_line(error)}") from error


def _refuse_unknown(kwargs: dict[str, Any], known: set[str]) -> None:
    if "auto_map" in kwargs and not is_our_auto_map(kwargs.pop("auto_map")):
        raise ConfigError("auto_map asks to run code from the checkpoint: refused")
    for key in kwargs:
        if key not in known | _FOREIGN_KEYS:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{key}: AdaPonderConfig has no such field{hint}")


def _check_recurrence(config: AdaPonderConfig) -> None:
    for item in fields(type(config)):
        # A recipe may leave a setting open; a config whose default is a value needs one.
        if item.name in _SETTINGS and getattr(config, item.name) is None and item.default is not None:
            raise ConfigError(f"{item.name}=None: a value is needed, as {item.default!r}")
    check_against(Recurrence, lambda name: getattr(config, name))
    if not fits(config.ponder_on, PonderOn, None):
        raise ConfigError(f"ponder_on={shown(config.ponder_on)}: {needed(config.ponder_on, PonderOn, None)}")
    if config.ponder_pool == "closed" and config.ponder_on == "logits":
        raise ConfigError(
            "ponder_pool='closed' counts later gates as probability 0, which no logit has: "
            "use ponder_on='probabilities'"
        )


def _check_backbone(backbone: PreTrainedConfig) -> None:
    """Refuses shapes that no decoder can have before anything is allocated."""
    for name in _LARGEST:
        _check_count(name, getattr(backbone, name, None))
    _check_sizes(backbone.to_dict())
    heads = backbone.num_attention_heads
    if (groups := getattr(backbone, "num_key_value_heads", None)) is not None:
        _check_count("num_key_value_heads", groups)
        if heads % groups:
            raise ConfigError(
                f"backbone_config.num_key_value_heads={groups} does not divide num_attention_heads={heads}"
            )
    if getattr(backbone, "head_dim", None) is None:
        _check_heads(backbone.hidden_size, heads)


def _check_heads(hidden_size: int, heads: int) -> None:
    if hidden_size % heads:
        raise ConfigError(f"backbone_config.num_attention_heads={heads} does not divide hidden_size={hidden_size}")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"backbone_config.{name}={shown(value)}: a positive whole number is needed")
    if value > (limit := _LARGEST.get(name, _LARGEST_SIZE)):
        raise ConfigError(f"backbone_config.{name}={shown(value)}: at most {limit}")


def _check_sizes(backbone: dict[str, Any]) -> None:
    """Refuses a negative, infinite or astronomical number where a family's config counts something."""
    for name, value in backbone.items():
        if not _SIZE.search(name) or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not 0 <= value <= _LARGEST_SIZE:
            raise ConfigError(f"backbone_config.{name}={shown(value)}: from 0 to {_LARGEST_SIZE}")


def _check_pause(config: AdaPonderConfig) -> None:
    pause = config.pause_token_id
    if pause is not None and not (isinstance(pause, int) and 0 <= pause < config.vocab_size):
        raise ConfigError(
            f"pause_token_id={pause} lies outside the vocabulary of {config.vocab_size}: name an unused slot, "
            "or None for a vector of its own"
        )


def _capacities(capacities: list[float] | None, iterations: int) -> list[float]:
    if capacities is None:
        # The paper's keeping ratios at K = 4 (sum 3.80, its 3.8x); other depths keep everything unless told.
        capacities = [1.0, 0.97, 0.93, 0.9] if iterations == 4 else [1.0] * iterations
    values = [float(value) for value in capacities]
    if len(values) != iterations:
        raise ConfigError(f"capacities has {len(values)} entries for iterations={iterations}: one each is needed")
    if values[0] != 1.0:
        raise ConfigError(f"capacities[0]={values[0]}: the first recursion reads every token, so it is 1")
    if any(not 0.0 < value <= 1.0 for value in values) or values != sorted(values, reverse=True):
        raise ConfigError(f"capacities={values}: shares in (0, 1], never growing")
    return values
