"""Published layouts of looped models: folders as they are published, and what their code computes, written plainly."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

OURO: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_ouro.OuroConfig",
        "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
    },
    "model_type": "ouro",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "layer_types": ["full_attention", "full_attention"],
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float64",
    "use_cache": True,
}
NANBEIGE: dict[str, Any] = {
    name: value
    for name, value in OURO.items()
    if name not in ("total_ut_steps", "early_exit_threshold", "layer_types", "max_window_layers", "sliding_window")
}
NANBEIGE |= {"model_type": "nanbeige", "architectures": ["NanbeigeForCausalLM"], "num_loops": 2, "head_dim": 12}
NANBEIGE |= {
    "auto_map": {
        "AutoConfig": "configuration_nanbeige.NanbeigeConfig",
        "AutoModelForCausalLM": "modeling_nanbeige.NanbeigeForCausalLM",
    },
    "skip_loop_final_norm": False,
    "loop_loss_weights": [],
}


PONDERLM: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "rotary_pct": 0.25,
    "rotary_emb_base": 10_000,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "use_parallel_residual": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float64",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "ponderinglm": True,
    "pondering_steps": 3,
    "scale_embeds": True,
    "mutiply_pondering_steps": True,
}


def random_weights(config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random tensors under their published names; far from 0 and 1, so that no mistake is rounded away."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.4, around: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + around).to(dtype)

    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    if config["model_type"] == "gpt_neox":
        weights = {"gpt_neox.embed_in.weight": draw(vocabulary, width), "embed_out.weight": draw(vocabulary, width)}
        weights["adapter.weight"] = draw(width, 2 * width)  # published, and used by no forward
        sizes = {"attention.query_key_value": (3 * width, width), "attention.dense": (width, width)}
        sizes |= {"mlp.dense_h_to_4h": (inner, width), "mlp.dense_4h_to_h": (width, inner)}
        layers = [f"gpt_neox.layers.{number}." for number in range(config["num_hidden_layers"])]
        norms = [f"{layer}{name}_layernorm" for layer in layers for name in ("input", "post_attention")]
        for name in (*norms, "gpt_neox.final_layer_norm"):
            weights |= {f"{name}.weight": draw(width, around=1.0), f"{name}.bias": draw(width)}
        for layer, (name, (rows, columns)) in itertools.product(layers, sizes.items()):
            weights |= {f"{layer}{name}.weight": draw(rows, columns), f"{layer}{name}.bias": draw(rows)}
        return weights
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    weights = {"model.embed_tokens.weight": draw(vocabulary, width), "model.norm.weight": draw(width, around=1.0)}
    if config["model_type"] == "ouro":
        norms += ["input_layernorm_2", "post_attention_layernorm_2"]
        weights["model.early_exit_gate.weight"] = draw(1, width)
        weights["model.early_exit_gate.bias"] = draw(1, around=-0.5)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(vocabulary, width)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        weights |= {f"{layer}{norm}.weight": draw(width, around=1.0) for norm in norms}
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = draw(rows * size, width)
        weights[f"{layer}self_attn.o_proj.weight"] = draw(width, heads * size)
        weights |= {f"{layer}mlp.{name}_proj.weight": draw(inner, width) for name in ("gate", "up")}
        weights[f"{layer}mlp.down_proj.weight"] = draw(width, inner)
    return weights


def publish(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Writes a folder as the hub has it: config.json with an ``auto_map``, and safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def turned(x: Tensor, base: float, size: int) -> Tensor:
    """Rotates the first ``size`` numbers of each head, ``[batch, heads, time, …]``; published angles are float32."""
    frequency = 1.0 / (base ** (torch.arange(0, size, 2).float() / size))
    angle = torch.arange(x.shape[2]).float()[:, None] * frequency
    cos, sin = (torch.cat([half, half], -1).double() for half in (angle.cos(), angle.sin()))
    first, second = x[..., :size].chunk(2, -1)
    return torch.cat([x[..., :size] * cos + torch.cat([-second, first], -1) * sin, x[..., size:]], -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention of ``[batch, heads, time, size]``, the heads joined."""
    time = torch.arange(q.shape[2])
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(time[None, :] > time[:, None], -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Loops(NamedTuple):
    """What a looped model computes: logits and exit probability of each loop, ``depth [batch, time]`` of each token."""

    logits: list[Tensor]
    gates: list[Tensor]
    depth: Tensor


def plain_loops(
    config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor, *, threshold: float = 1.0, frozen: bool = True
) -> Loops:
    """Runs every loop over a whole text, without a cache.

    ``frozen``: after a token's exit, its keys, values and state are those of its last loop. Otherwise every token goes
    on and ``depth`` says where it would have exited, as published code does it.
    """
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    sandwich = config["model_type"] == "ouro"
    loops = config["total_ut_steps"] if sandwich else config["num_loops"]
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return weights[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()

    def turn(x: Tensor) -> Tensor:
        return turned(x, config["rope_theta"], size)

    def split(x: Tensor, number: int) -> Tensor:
        return x.unflatten(-1, (number, size)).transpose(1, 2)

    state = weights["model.embed_tokens.weight"][ids]
    active, staying = torch.ones_like(ids, dtype=torch.bool), torch.ones(ids.shape, dtype=torch.float64)
    exited = torch.zeros_like(active)
    depth, logits, gates = torch.full_like(ids, loops), [], []
    reused: dict[int, tuple[Tensor, Tensor]] = {}
    skips = config.get("skip_loop_final_norm", False)
    for loop in range(loops):
        x = state
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}."
            y = norm(x, f"{layer}input_layernorm")
            q, k, v = (y @ weights[f"{layer}self_attn.{name}_proj.weight"].T for name in "qkv")
            q, k, v = turn(split(q, heads)), turn(split(k, groups)), split(v, groups)
            if frozen and loop:
                k, v = (
                    torch.where(active[:, None, :, None], new, old)
                    for new, old in zip((k, v), reused[number], strict=True)
                )
            reused[number] = (k, v)
            k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
            y = attended(q, k, v) @ weights[f"{layer}self_attn.o_proj.weight"].T
            x = x + (norm(y, f"{layer}input_layernorm_2") if sandwich else y)
            y = norm(x, f"{layer}post_attention_layernorm")
            gate, up = (y @ weights[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            y = (functional.silu(gate) * up) @ weights[f"{layer}mlp.down_proj.weight"].T
            x = x + (norm(y, f"{layer}post_attention_layernorm_2") if sandwich else y)
        normed = norm(x, "model.norm")
        state = torch.where(active[..., None], x if skips else normed, state)
        logits.append((norm(state, "model.norm") if skips else state) @ head.T)
        if sandwich:
            exits = state @ weights["model.early_exit_gate.weight"][0] + weights["model.early_exit_gate.bias"]
            gates.append(torch.sigmoid(exits))
            staying = staying * torch.sigmoid(-exits)
            leaves = ~exited & (staying.float() <= 1.0 - threshold)
            depth = torch.where(leaves, loop + 1, depth)
            exited = exited | leaves
            if frozen:
                active = ~exited
    return Loops(logits, gates, depth.clamp(max=loops))


def plain_ponderlm(config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor) -> list[Tensor]:
    """Returns the logits of every iteration: each adds the expected embedding under its logits to the input."""
    width, heads, steps = config["hidden_size"], config["num_attention_heads"], config["pondering_steps"]
    size = width // heads

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + config["layer_norm_eps"]).sqrt()
        return weights[f"{name}.weight"] * scaled + weights[f"{name}.bias"]

    def logits(x: Tensor) -> Tensor:
        for number in range(config["num_hidden_layers"]):
            layer = f"gpt_neox.layers.{number}."
            joined = linear(norm(x, f"{layer}input_layernorm"), f"{layer}attention.query_key_value")
            q, k, v = joined.unflatten(-1, (heads, 3, size)).permute(3, 0, 2, 1, 4)
            q, k = (turned(x, config["rotary_emb_base"], int(size * config["rotary_pct"])) for x in (q, k))
            mixed = x + linear(attended(q, k, v), f"{layer}attention.dense")
            y = norm(x if config["use_parallel_residual"] else mixed, f"{layer}post_attention_layernorm")
            inner = functional.gelu(linear(y, f"{layer}mlp.dense_h_to_4h"))
            x = mixed + linear(inner, f"{layer}mlp.dense_4h_to_h")
        return norm(x, "gpt_neox.final_layer_norm") @ weights["embed_out.weight"].T

    table = weights["gpt_neox.embed_in.weight"] * (width**0.5 if config["scale_embeds"] else 1.0)
    state = table[ids] * (max(1, steps) if config["mutiply_pondering_steps"] else 1)
    results = [logits(state)]
    for _ in range(steps):
        state = state + results[-1].softmax(-1) @ table
        results.append(logits(state))
    return results
