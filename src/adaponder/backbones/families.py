"""Reads properties of decoders: sliding windows, rotary types, layers, and what prevents them from being backbones."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from adaponder.errors import BackboneError

# BLOOM and (with alibi) Falcon build attention biases from the padding mask only; local layers of GPT-Neo count rows
# instead of positions; GPT-NeoX-Japanese takes no gathered keys. They can only be read whole, from the first token on.
_READ_WHOLE = ("bloom", "gpt_neo", "gpt_neox_japanese")


def read_whole(config: PreTrainedConfig) -> bool:
    """Returns whether this family works only on whole sequences: without padding, packed documents or a cache."""
    return config.model_type in _READ_WHOLE or (config.model_type == "falcon" and config.alibi)


def refuse_by_name(stock: PreTrainedModel) -> None:
    """Raises with the reason if this family cannot be a backbone."""
    if (reason := _obstacle(stock)) is not None:
        raise BackboneError(f"{stock.config.model_type} cannot be a backbone: {reason}")


def _obstacle(stock: PreTrainedModel) -> str | None:
    """Returns why a decoder cannot be a backbone (its first unsupported property), or ``None`` if it can."""
    config, head, embedding = stock.config, stock.get_output_embeddings(), stock.get_input_embeddings()
    if config.model_type == "doge" and config._attn_implementation != "eager":
        return "its masks let a token see the future; open it with attn_implementation='eager'"
    if config.is_encoder_decoder:
        return "it is an encoder-decoder; a decoder that reads its own embeddings is needed"
    kinds = set(getattr(config, "layer_types", None) or [])
    if any("linear" in kind or kind in ("conv", "mamba", "recurrent") for kind in kinds):
        return "linear-attention and convolution layers keep one running state instead of one row per token to reuse"
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"attention of kind {', '.join(sorted(unknown))} is not modelled"
    if "longrope" in rope_types(config):
        return "longrope makes rotary angles depend on the length of the text, so later tokens change earlier ones"
    harmless = {"final_logit_softcapping": (None, 0), "logit_scale": (None, 1), "logits_scaling": (None, 1)}
    for name, values in (harmless | {"lm_head_multiplier": (None, 1)}).items():
        if getattr(config, name, None) not in values:
            return f"{name} changes its logits, and the expectation over the vocabulary supports only a linear head"
    if not isinstance(head, nn.Linear):
        return f"its head is a {type(head).__name__}, not a linear map of the hidden state"
    if not isinstance(embedding, nn.Embedding):
        return f"its embedding is a {type(embedding).__name__}, not a table"
    if getattr(config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention lets a token see the future"
    if getattr(config, "add_cross_attention", False):
        return "add_cross_attention needs an encoder"
    if getattr(config, "layerdrop", 0):
        return f"layerdrop={config.layerdrop} skips layers at random, and a skipped layer leaves no row: set it to 0"
    projection = getattr(config, "word_embed_proj_dim", None)
    if projection not in (None, config.hidden_size):
        return f"word_embed_proj_dim={projection}: a projection between embedding and body is not supported"
    if getattr(config, "num_kv_shared_layers", 0):
        return "num_kv_shared_layers makes layers read other layers' keys and values"
    return None


def refuse_halting(stock: PreTrainedModel, method: str) -> None:
    """Raises if this family cannot skip halted tokens in a pass."""
    if read_whole(stock.config):
        raise BackboneError(
            f"{stock.config.model_type} cannot be a backbone of {method}: it works on whole sequences only, so halted "
            "tokens cannot be skipped; use vanilla, ponder or loop"
        )


def windows_of(config: PreTrainedConfig) -> dict[str, int | None]:
    """Maps each attention kind (``every_layer`` if the config has none) to its window in tokens; ``None``: no limit."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return {"every_layer": window}
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Returns the sliding window of each layer in tokens; ``None``: no limit."""
    windows = windows_of(config)
    return [windows[kind] for kind in getattr(config, "layer_types", None) or [*windows] * config.num_hidden_layers]


def rope_types(config: PreTrainedConfig) -> set[str | None]:
    """Returns the rotary types that the config names, over all attention kinds."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {kind.get("rope_type") for kind in (rope, *rope.values()) if isinstance(kind, dict)}


def decoder_layers(body: nn.Module, count: int) -> list[nn.Module]:
    """Returns the decoder's layers in order: its first ``ModuleList`` of length ``count``; empty if it has none."""
    lists = (module for module in body.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return list(next(lists, ()))


def has_attention_dropout(config: PreTrainedConfig) -> bool:
    """Returns whether the config sets dropout of attention weights (it applies in training mode)."""
    return any(getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "attn_dropout"))
