"""GPT-NeoX and the paper's recurrence in the plainest words: no cache, no chunk, no wrapper, all in one graph.

Written from the equations and from the layout of GPT-NeoX weights; it shares nothing with the package but parameters.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, layer_norm, linear


def rotate(x: Tensor, position: Tensor, size: int) -> Tensor:
    """Rotates the first ``size`` channels of ``[batch, heads, time, channels]`` by position."""
    frequency = 1.0 / (10_000.0 ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    angle = position[:, None, :, None].float() * torch.cat([frequency, frequency])
    turned, rest = x[..., :size], x[..., size:]
    half = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    return torch.cat([turned * angle.cos().to(x) + half * angle.sin().to(x), rest], -1)


def gpt_neox_pass(w: dict[str, Tensor], config, x: Tensor, real: Tensor, kv_before=None, active=None):
    """Returns (final-normed state, [(k, v) per layer]); ``kv_before`` replaces rows of halted tokens (eq. 10)."""
    batch, time, width = x.shape
    heads = config.num_attention_heads
    size = width // heads
    rotary = int(size * config.rope_parameters["partial_rotary_factor"])
    position = (real.cumsum(1) - 1).clamp_min(0)
    allowed = torch.tril(torch.ones(time, time, dtype=torch.bool)) & real[:, None, None, :]
    allowed = allowed | torch.eye(time, dtype=torch.bool)
    kv = []
    for layer in range(config.num_hidden_layers):
        p = f"gpt_neox.layers.{layer}."

        def norm(name: str, p: str = p, x: Tensor = x) -> Tensor:
            return layer_norm(x, (width,), w[p + name + ".weight"], w[p + name + ".bias"], config.layer_norm_eps)

        def dense(name: str, y: Tensor, p: str = p) -> Tensor:
            return linear(y, w[p + name + ".weight"], w[p + name + ".bias"])

        qkv = dense("attention.query_key_value", norm("input_layernorm")).view(batch, time, heads, 3 * size)
        q, k, v = qkv.transpose(1, 2).chunk(3, -1)
        q, k = rotate(q, position, rotary), rotate(k, position, rotary)
        if kv_before is not None:
            keep = active[:, None, :, None]
            k, v = torch.where(keep, k, kv_before[layer][0]), torch.where(keep, v, kv_before[layer][1])
        kv.append((k, v))
        score = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(~allowed, -math.inf)
        mixed = (score.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width)
        inner = gelu(dense("mlp.dense_h_to_4h", norm("post_attention_layernorm")))
        x = x + dense("attention.dense", mixed) + dense("mlp.dense_4h_to_h", inner)
    final = "gpt_neox.final_layer_norm."
    return layer_norm(x, (width,), w[final + "weight"], w[final + "bias"], config.layer_norm_eps), kv


def weights(model) -> dict[str, Tensor]:
    """Returns the stock parameters of a wrapped GPT-NeoX by their stock names, as leaves of the graph."""
    return {name.removeprefix("backbone."): value for name, value in model.named_parameters()}


def ponder(w: dict, config, ids: Tensor, real: Tensor, *, steps: int, scale: float, first: float) -> Tensor:
    """Computes PonderLM's logits after ``steps`` ponder steps and one last pass, without a cache."""
    table = w["gpt_neox.embed_in.weight"] * scale
    embedding = table[ids] * first
    for _ in range(steps):
        hidden, _ = gpt_neox_pass(w, config, embedding, real)
        embedding = embedding + linear(hidden, w["lm_head.weight"]).softmax(-1) @ table
    return linear(gpt_neox_pass(w, config, embedding, real)[0], w["lm_head.weight"])


def adaponder(model, ids: Tensor, real: Tensor, *, reuse: str = "state"):
    """Computes Algorithms 1 and 2; returns (logits, gate probabilities [batch, time, K-1], depth).

    ``reuse`` says what a halted token keeps: its keys, values and hidden state, keys and values alone, or nothing.
    """
    w, config, backbone = weights(model), model.config, model.backbone.config
    table = w["gpt_neox.embed_in.weight"] * config.embedding_scale
    embedding = table[ids] * config.initial_multiplier
    m, kv, h = real, None, None
    depth, gates = torch.zeros_like(ids), []
    for i in range(config.iterations):
        new, kv = gpt_neox_pass(w, backbone, embedding, real, None if reuse == "none" else kv, m)
        h = new if h is None or reuse != "state" else torch.where(m[..., None], new, h)
        depth = depth + m
        if i == config.iterations - 1:
            break
        g = f"method.gates.{i}."
        inner = gelu(linear(h, w[g + "inner.weight"], w[g + "inner.bias"]))
        s = linear(inner, w[g + "out.weight"], w[g + "out.bias"]).squeeze(-1).sigmoid()
        m = m & (s >= config.tau)
        embedding = embedding + (m * s)[..., None] * (linear(h, w["lm_head.weight"]).softmax(-1) @ table)
        gates.append(s)
    return linear(h, w["lm_head.weight"]), torch.stack(gates, -1), depth


def adaponder_loss(logits, gates, ids, real, *, weight: float, fraction: float) -> Tensor:
    """Computes eq. 12 and 13: cross-entropy of real tokens that real tokens predict, plus the smallest gates' mean."""
    counted = real[:, 1:] & real[:, :-1]
    loss = cross_entropy(logits[:, :-1][counted], ids[:, 1:][counted])
    pool = gates[real].flatten().sort().values
    return loss + weight * pool[: math.floor(fraction * pool.numel())].mean()
