"""Runs the Llama family in five kernels per layer: norm and QKV, attention, out, norm and gated up, down."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from adaponder.backbones.wrapper import Backbone
from adaponder.inference.bodies.base import Pools
from adaponder.inference.bodies.fused import (
    ACTIVATIONS,
    FusedBody,
    PassRows,
    linear_weights,
    norm_weights,
    unsupported_modules,
)
from adaponder.ops.ledger_attention import Projection
from adaponder.ops.row_linear import (
    Linear,
    Norm,
    Piece,
    Term,
    gated_linear,
    normed_linears,
    residual_linears,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class _Layer(NamedTuple):
    """The weights of a layer; ``qkv`` includes the first norm, ``projection`` the norms of queries and keys, if any."""

    qkv: Piece
    projection: Projection
    out: Linear
    norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    scale: float


class LlamaBody(FusedBody):
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped heads, gated MLP."""

    def __init__(self, backbone: Backbone, *, lanes: int, apart: bool, positions: int | None = None):
        super().__init__(backbone, lanes=lanes, apart=apart, positions=positions)
        body: Any = backbone.body
        self.activation = ACTIVATIONS[self.config.hidden_act]
        projection = Projection(self.heads, self.key_heads, self.size, rotary=self.cos.shape[-1])
        self.layers = [_weights(layer, projection) for layer in body.layers]

    @staticmethod
    def unsupported(backbone: Backbone) -> str | None:
        """Returns why this body cannot run the backbone, or ``None`` if it can."""
        if backbone.stock.config.model_type not in FAMILIES:
            return f"{backbone.stock.config.model_type} is not one of {', '.join(FAMILIES)}"
        layers: Any = backbone.body.layers
        linears, norms = [], [backbone.norm]
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        return unsupported_modules(backbone, layers, linears, norms)

    def layer(self, layer: int, x: Tensor, rows: PassRows, pools: Pools) -> Tensor:
        weights = self.layers[layer]
        (qkv,) = normed_linears(x, (weights.qkv,))
        mixed = self.attend(layer, qkv, rows, pools, weights.projection, scale=weights.scale)
        x = residual_linears(x, (Term(mixed, weights.out),))
        inner = gated_linear(x, weights.gate, weights.up, weights.norm, activation=self.activation)
        return residual_linears(x, (Term(inner, weights.down),))


def _weights(layer: Any, projection: Projection) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "q_norm"):
        query, key = norm_weights(attention.q_norm), norm_weights(attention.k_norm)
        projection = projection._replace(query_norm=query.weight, key_norm=key.weight, epsilon=query.eps)
    linears = tuple(linear_weights(linear) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    return _Layer(
        qkv=Piece(linears, norm_weights(layer.input_layernorm)),
        projection=projection,
        out=linear_weights(attention.o_proj),
        norm=norm_weights(layer.post_attention_layernorm),
        gate=linear_weights(mlp.gate_proj),
        up=linear_weights(mlp.up_proj),
        down=linear_weights(mlp.down_proj),
        scale=attention.scaling,
    )
