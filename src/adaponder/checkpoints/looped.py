"""Translates config fields and tensor names of published looped models (Ouro, Nanbeige), without running their code."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from adaponder.errors import CheckpointError, listed, shown

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Fields that a published config may leave out, and their values in the published configuration class.
_COMMON = {
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class Layout(NamedTuple):
    """The checkpoint layout of a published looped model.

    Attributes:
        family: the decoder family of transformers that computes one loop.
        loops: the config field with the number of loops.
        names: maps parts of published tensor names to the decoder's.
        gate: maps the tensors of the exit gate to names in :class:`~adaponder.methods.ouro.Ouro`.
        refused: config fields that must be unset, because the decoder does not compute their features.
    """

    name: str
    family: str
    loops: str
    names: dict[str, str]
    gate: dict[str, str]
    refused: tuple[str, ...]


LAYOUTS = {
    "ouro": Layout(
        name="Ouro",
        family="hyperclovax",  # Llama with a norm after attention and one after the MLP; its multipliers stay 1
        loops="total_ut_steps",
        names={"input_layernorm_2": "post_norm1", "post_attention_layernorm_2": "post_norm2"},
        gate={"model.early_exit_gate.weight": "exit.weight", "model.early_exit_gate.bias": "exit.bias"},
        refused=("use_sliding_window", "early_exit_step", "attention_bias", "mlp_bias"),
    ),
    "nanbeige": Layout(
        name="Nanbeige",
        family="llama",
        loops="num_loops",
        names={},
        gate={},
        refused=(
            *("attention_bias", "mlp_bias", "loop_loss_weights", "qk_layernorm", "emb_neighbor_num"),
            *("insert_ngram_layer_idx", "ngram_insert_all_layers", "enable_double_loop_split", "loop_middle_layers"),
            *("loop_share_kv", "enable_hyper_connection", "enable_mhc", "enable_h_res_identity"),
            *("enable_depth_attention", "use_sliding_window"),
        ),
    ),
}

# Looped models whose recurrence is not a method of this package, and why.
_OTHERS = {
    "iquestloopcoder": "in its second pass a gate per head mixes attention to the first pass's keys with a window of "
    "64 tokens; passes here differ in their input alone",
    "huginn_raven": "it repeats its middle layers only, between a prelude and a coda; a method here repeats all layers",
}


def layout_of(config: dict[str, Any]) -> Layout | None:
    """Returns the layout that a parsed config.json has, or ``None`` if it is not a published looped model's."""
    family = config.get("model_type")
    return LAYOUTS.get(family) if isinstance(family, str) else None


def refuse_other_loops(where: Any, config: dict[str, Any]) -> None:
    """Raises with the reason if ``config`` belongs to a looped model that cannot be opened."""
    family = config.get("model_type")
    if isinstance(family, str) and family in _OTHERS:
        raise CheckpointError(f"{where}: model_type={family!r} cannot be opened: {_OTHERS[family]}")


def is_published_auto_map(config: dict[str, Any]) -> bool:
    """Returns whether ``auto_map`` names only modules published with this looped model, so it can be ignored."""
    layout, entries = layout_of(config), config.get("auto_map")
    if layout is None or not isinstance(entries, dict):
        return False
    family = config["model_type"]
    module = re.compile(rf"(?:[\w.-]+/[\w.-]+--)?(configuration|modeling)_{family}\.{layout.name}\w+")
    return all(isinstance(entry, str) and module.fullmatch(entry) for entry in entries.values())


def translated_config(where: Any, config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Returns the decoder's config fields; raises on published settings that the decoder does not compute."""
    for name in layout.refused:
        if (value := config.get(name)) is not None and value is not False and value != []:
            raise CheckpointError(f"{where}: {name}={shown(value)}: {layout.name} with it is not modelled")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"{where}: layer_types: only full_attention is supported for {layout.name}")
    if missing := [name for name in _SIZES if config.get(name) is None]:
        raise CheckpointError(f"{where}: {listed(missing)} missing")
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    fields = {name: config.get(name, value) for name, value in _COMMON.items()} | {"num_key_value_heads": heads}
    if fields["head_dim"] is None:
        fields["head_dim"] = config.get("kv_channels")  # Nanbeige's name for it
    if fields["rope_parameters"] is not None:
        del fields["rope_theta"], fields["rope_scaling"]
    else:
        del fields["rope_parameters"]
        if fields["rope_scaling"] is None:
            del fields["rope_scaling"]  # its presence makes transformers warn of the old name
    return {name: config[name] for name in _SIZES} | fields


def translated_recurrence(where: Any, config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Returns the settings of the recurrence: method, number of loops, exit threshold."""
    loops = config.get(layout.loops)
    if not isinstance(loops, int) or isinstance(loops, bool) or not 1 <= loops <= 1024:
        raise CheckpointError(f"{where}: {layout.loops}={shown(loops)} must be a whole number from 1 to 1024")
    threshold = config.get("early_exit_threshold") if layout.gate else None
    threshold = 1.0 if threshold is None else threshold  # without it, the published code runs every loop
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold <= 1:
        raise CheckpointError(f"{where}: early_exit_threshold={shown(threshold)} must be above 0 and at most 1")
    require_flags(where, config, "skip_loop_final_norm")
    skips = not layout.gate and config.get("skip_loop_final_norm")
    recurrence: dict[str, Any] = {"method": "loop" if skips else "ouro", "iterations": loops, "embedding_scale": 1.0}
    return recurrence if skips else recurrence | {"exit_threshold": float(threshold)}


def require_flags(where: Any, config: dict[str, Any], *names: str) -> None:
    """Raises if one of the fields ``names`` is set to anything but a boolean: the text "false" would count as true."""
    for name in names:
        if config.get(name) not in (None, True, False):
            raise CheckpointError(f"{where}: {name}={shown(config[name])} must be true or false")
