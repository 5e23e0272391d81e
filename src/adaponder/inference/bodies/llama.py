"""Llama and its like in five kernels a layer: norm and QKV, attention, out, norm and gated up, down."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from adaponder.backbones.wrapper import Backbone
from adaponder.inference.bodies.base import Pools
from adaponder.inference.bodies.fused import FusedBody
from adaponder.inference.bodies.weights import ACTIVATIONS, linear_of, norm_of, why_not
from adaponder.ops.ledger_attention import LedgerRows
from adaponder.ops.row_linear import (
    Linear,
    Norm,
    Piece,
    Term,
    gated_linear,
    normed_linears,
    residual_linears,
    row_norm,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class _Layer(NamedTuple):
    """``qkv`` are three pieces with the first norm before them; the norms of queries and keys are per head."""

    qkv: tuple[Piece, Piece, Piece]
    query_norm: Norm | None
    key_norm: Norm | None
    out: Linear
    norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    scale: float


class LlamaBody(FusedBody):
    """A decoder of the Llama family: RMSNorms, rotary positions, grouped heads, a gated feed-forward part."""

    def __init__(self, backbone: Backbone, *, positions: int | None = None):
        super().__init__(backbone, positions=positions)
        body: Any = backbone.body
        self.activation = ACTIVATIONS[self.config.hidden_act]
        self.layers = [_weights(layer) for layer in body.layers]

    @staticmethod
    def fits(backbone: Backbone) -> str | None:
        """Why this decoder cannot be read so, or ``None`` if it can."""
        config, body = backbone.stock.config, backbone.body
        if config.model_type not in FAMILIES:
            return f"{config.model_type} is none of {', '.join(FAMILIES)}"
        if config.hidden_act not in ACTIVATIONS:
            return f"hidden_act={config.hidden_act!r} has no kernel"
        layers: Any = body.layers
        linears, norms = [], [backbone.norm]
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        return why_not(backbone, layers, linears, norms)

    def layer(self, layer: int, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Tensor:
        weights = self.layers[layer]
        query, key, value = (part.unflatten(-1, (-1, self.size)) for part in normed_linears(x, weights.qkv))
        if weights.query_norm is not None and weights.key_norm is not None:
            query, key = row_norm(query, weights.query_norm), row_norm(key, weights.key_norm)
        mixed = self.attend(layer, query, key, value, position, rows, pools, scale=weights.scale)
        x = residual_linears(x, (Term(mixed, weights.out),))
        between = gated_linear(x, weights.gate, weights.up, weights.norm, activation=self.activation)
        return residual_linears(x, (Term(between, weights.down),))


def _weights(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norm = norm_of(layer.input_layernorm)
    query, key, value = (
        Piece(linear_of(linear), norm) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return _Layer(
        qkv=(query, key, value),
        query_norm=norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None,
        out=linear_of(attention.o_proj),
        norm=norm_of(layer.post_attention_layernorm),
        gate=linear_of(mlp.gate_proj),
        up=linear_of(mlp.up_proj),
        down=linear_of(mlp.down_proj),
        scale=attention.scaling,
    )
