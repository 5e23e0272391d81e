"""GPT-NeoX in three kernels a layer: both norms and [QKV | up], attention, [out | down] and the residual."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from adaponder.backbones.wrapper import Backbone
from adaponder.inference.bodies.base import Pools
from adaponder.inference.bodies.fused import FusedBody, Where
from adaponder.inference.bodies.weights import ACTIVATIONS, linear_of, norm_of, why_not
from adaponder.ops.ledger_attention import Projection
from adaponder.ops.row_linear import Linear, Piece, Term, normed_linears, residual_linears


class _Layer(NamedTuple):
    """``qkv`` and ``up`` with their norms before them (``up`` with its activation), ``out``, ``down``."""

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
        # Each head's query, key and value lie side by side.
        self.projection = Projection(
            self.heads, self.heads, self.size, packed=True, rotary=self.cos.shape[-1], bias=None
        )
        self.layers = [
            _Layer(
                qkv=Piece((linear_of(layer.attention.query_key_value),), norm_of(layer.input_layernorm)),
                up=Piece((linear_of(layer.mlp.dense_h_to_4h),), norm_of(layer.post_attention_layernorm), activation),
                out=linear_of(layer.attention.dense),
                down=linear_of(layer.mlp.dense_4h_to_h),
                scale=layer.attention.scaling,
            )
            for layer in body.layers
        ]

    @staticmethod
    def fits(backbone: Backbone) -> str | None:
        """Why this decoder cannot be read so, or ``None`` if it can."""
        config, body = backbone.stock.config, backbone.body
        if config.model_type != "gpt_neox":
            return f"{config.model_type} is no GPT-NeoX"
        if config.hidden_act not in ACTIVATIONS:
            return f"hidden_act={config.hidden_act!r} has no kernel"
        layers: Any = body.layers
        linears = [
            linear
            for layer in layers
            for linear in (
                layer.attention.query_key_value,
                layer.attention.dense,
                layer.mlp.dense_h_to_4h,
                layer.mlp.dense_4h_to_h,
            )
        ]
        norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        return why_not(backbone, layers, linears, [*norms, backbone.norm])

    def layer(self, layer: int, x: Tensor, where: Where, pools: Pools) -> Tensor:
        weights = self.layers[layer]
        if self.parallel:
            qkv, up = normed_linears(x, (weights.qkv, weights.up))
            mixed = self.attend(layer, qkv, where, pools, self.projection, scale=weights.scale)
            return residual_linears(x, (Term(mixed, weights.out), Term(up, weights.down)))
        (qkv,) = normed_linears(x, (weights.qkv,))
        mixed = self.attend(layer, qkv, where, pools, self.projection, scale=weights.scale)
        x = residual_linears(x, (Term(mixed, weights.out),))
        (up,) = normed_linears(x, (weights.up,))
        return residual_linears(x, (Term(up, weights.down),))
