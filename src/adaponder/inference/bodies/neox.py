"""Runs GPT-NeoX in three kernels per layer: both norms and [QKV | up], attention, [out | down] and the residual."""

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
from adaponder.ops.row_linear import Linear, Piece, Term, normed_linears, residual_linears


class _Layer(NamedTuple):
    """The weights of a layer; ``qkv`` and ``up`` include the norms before them, ``up`` the activation."""

    qkv: Piece
    up: Piece
    out: Linear
    down: Linear
    scale: float


class NeoxBody(FusedBody):
    """A GPT-NeoX decoder (Pythia)."""

    def __init__(self, backbone: Backbone, *, lanes: int, apart: bool, positions: int | None = None):
        super().__init__(backbone, lanes=lanes, apart=apart, positions=positions)
        body: Any = backbone.body
        self.parallel: bool = self.config.use_parallel_residual
        activation = ACTIVATIONS[self.config.hidden_act]
        # Query, key and value of each head are adjacent.
        self.projection = Projection(
            self.heads, self.heads, self.size, packed=True, rotary=self.cos.shape[-1], bias=None
        )
        self.layers = [
            _Layer(
                qkv=Piece((linear_weights(layer.attention.query_key_value),), norm_weights(layer.input_layernorm)),
                up=Piece(
                    (linear_weights(layer.mlp.dense_h_to_4h),), norm_weights(layer.post_attention_layernorm), activation
                ),
                out=linear_weights(layer.attention.dense),
                down=linear_weights(layer.mlp.dense_4h_to_h),
                scale=layer.attention.scaling,
            )
            for layer in body.layers
        ]

    @staticmethod
    def unsupported(backbone: Backbone) -> str | None:
        """Returns why this body cannot run the backbone, or ``None`` if it can."""
        if backbone.stock.config.model_type != "gpt_neox":
            return f"{backbone.stock.config.model_type} is not gpt_neox"
        layers: Any = backbone.body.layers
        linears, norms = [], [backbone.norm]
        for layer in layers:
            linears += [layer.attention.query_key_value, layer.attention.dense]
            linears += [layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h]
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
        return unsupported_modules(backbone, layers, linears, norms)

    def layer(self, layer: int, x: Tensor, rows: PassRows, pools: Pools) -> Tensor:
        weights = self.layers[layer]
        if self.parallel:
            qkv, up = normed_linears(x, (weights.qkv, weights.up))
            mixed = self.attend(layer, qkv, rows, pools, self.projection, scale=weights.scale)
            return residual_linears(x, (Term(mixed, weights.out), Term(up, weights.down)))
        (qkv,) = normed_linears(x, (weights.qkv,))
        mixed = self.attend(layer, qkv, rows, pools, self.projection, scale=weights.scale)
        x = residual_linears(x, (Term(mixed, weights.out),))
        (up,) = normed_linears(x, (weights.up,))
        return residual_linears(x, (Term(up, weights.down),))
