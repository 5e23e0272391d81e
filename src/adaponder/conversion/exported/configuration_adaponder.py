"""The config of an AdaPonderLM: the config of a stock decoder, and the recurrence around the decoder."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def _of_backbone(name: str) -> Any:
    """Returns a property that reads and sets the attribute ``name`` of the backbone's config."""
    return property(
        lambda config: getattr(config.backbone_config, name, None),
        lambda config, value: setattr(config.backbone_config, name, value),
    )


class AdaPonderConfig(PreTrainedConfig):
    """The backbone's config and the recurrence around the backbone; fields that only training uses have no effect.

    Attributes:
        backbone_config: config of the stock decoder.
        method: ``adaponder``, or ``ponder``, which has no gates.
        iterations: K, the maximum number of passes over a token.
        tau: a token halts once its gate s < tau; 0 gives every token K passes.
        gate_width: hidden width of a gate as a multiple of the hidden size; 0 makes the gate linear.
        shared_gate: one gate for all iterations instead of one each.
        embedding_scale: factor by which token embeddings and expected embeddings are multiplied.
        initial_multiplier: further factor by which only token embeddings are multiplied.
        expectation_top_k: compute expected embeddings over the k likeliest tokens; ``None``: over the whole vocabulary.
        reuse: what a halted token keeps; only ``state`` is supported: keys, values and hidden state.
    """

    model_type = "adaponder"
    sub_configs: ClassVar[Any] = {"backbone_config": AutoConfig}
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "depth", "gates", "last_hidden_state"]

    backbone_config: Any = None
    method: str = "adaponder"
    iterations: int = 4
    tau: float = 1e-4
    gate_width: int = 4
    shared_gate: bool = False
    embedding_scale: float = 1.0
    initial_multiplier: float = 1.0
    expectation_top_k: int | None = None
    reuse: str = "state"

    # Attributes that transformers' own tools read or set.
    vocab_size = _of_backbone("vocab_size")
    hidden_size = _of_backbone("hidden_size")
    num_hidden_layers = _of_backbone("num_hidden_layers")
    num_attention_heads = _of_backbone("num_attention_heads")
    max_position_embeddings = _of_backbone("max_position_embeddings")
    bos_token_id = _of_backbone("bos_token_id")
    eos_token_id = _of_backbone("eos_token_id")
    pad_token_id = _of_backbone("pad_token_id")

    def __post_init__(self, **kwargs: Any):
        if isinstance(self.backbone_config, dict):
            settings = dict(self.backbone_config)
            self.backbone_config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        for name in _SIZES:
            if (size := kwargs.pop(name, None)) not in (None, value := getattr(self, name)):
                raise ValueError(f"{name}={size} must be set in backbone_config, where it is {value}")
        if self.method not in ("adaponder", "ponder") or self.reuse != "state":
            raise ValueError(f"method={self.method!r}, reuse={self.reuse!r}: this file computes adaponder and ponder")
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns every setting, and the backbone's sizes, which peft looks up here."""
        return super().to_dict() | {name: getattr(self, name) for name in _SIZES}

    def to_diff_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_diff_dict().items() if name not in _SIZES}

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        return self.backbone_config

    @property
    def gates(self) -> int:
        """Returns the number of gates: one for each iteration but the last, or a shared one."""
        if self.method != "adaponder":
            return 0
        return min(1, self.iterations - 1) if self.shared_gate else self.iterations - 1
