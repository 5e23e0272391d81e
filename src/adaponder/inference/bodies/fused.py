"""Implements what fused bodies share: checks and weights, rotary tables, attention over the pools, the final norm.

Fused bodies use the modules' own parameters: they take no extra memory and see in-place changes. A parameter that is
replaced by another tensor (a merged adapter, a module moved to another device) needs a new body.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adaponder.backbones.wrapper import Backbone
from adaponder.execution.base import Pass
from adaponder.inference.bodies.base import Body, Pools, RowShape
from adaponder.ops.ledger_attention import (
    LedgerRows,
    Projection,
    Scratch,
    Turn,
    decode_attention,
    enter,
    ledger_attention,
    scratch_for,
)
from adaponder.ops.precision import wide_dtype
from adaponder.ops.row_linear import Linear, Norm, row_norm

# Activation names in a decoder's config, and the kernels' names for them.
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
# Rotary embeddings whose angles depend on the position alone.
ROPES = ("default", "linear", "llama3", "yarn")


class PassRows(NamedTuple):
    """The rows of a pass: decode rows first, then prefill rows, numbered from 0 again.

    ``prefill`` is ``None`` where there are no prefill rows.
    """

    decode: LedgerRows
    decode_turn: Turn
    prefill: LedgerRows | None
    prefill_turn: Turn


class FusedBody(Body):
    """A decoder with a few kernels per layer, on the parameters of its own modules.

    Args:
        backbone: one for which the class's ``unsupported`` returns ``None``.
        lanes: the largest number of decode rows in a pass.
        apart: whether all decode rows are of different lanes, so that none attends to another of the same pass. Not so
            where a token takes several slots (``pause``).
        positions: the number of positions; by default the config's.
    """

    def __init__(self, backbone: Backbone, *, lanes: int, apart: bool, positions: int | None = None):
        config: Any = backbone.stock.config
        self.config, self.windows, self.apart = config, backbone.layer_windows, apart
        self.norm = norm_weights(backbone.norm)
        like = self.norm.weight
        self.cos, self.sin = _rotary_table(backbone, like, positions or config.max_position_embeddings)
        self.heads: int = config.num_attention_heads
        self.key_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.scratch: Scratch | None = None
        # Programmatic dependent launch needs compute capability 9.
        self.dependent = like.is_cuda and torch.cuda.get_device_capability(like.device) >= (9, 0)
        if like.is_cuda:
            self.scratch = scratch_for(lanes, self.heads, self.size, like.device)

    def row_shapes(self) -> list[RowShape]:
        return [RowShape(self.key_heads, self.size, self.key_heads, self.size)] * len(self.windows)

    def forward(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        split, stream = self._split(position, rows), x
        for layer in range(len(self.windows)):
            stream = self.layer(layer, stream, split, pools)
        return Pass(row_norm(stream, self.norm), stream)

    @abstractmethod
    def layer(self, layer: int, x: Tensor, rows: PassRows, pools: Pools) -> Tensor:
        """Returns the residual stream ``[n, d]`` after a layer."""

    def _split(self, position: Tensor, rows: LedgerRows) -> PassRows:
        first, rest = slice(0, rows.alone), slice(rows.alone, None)
        prefill = None
        if rows.cohorts:
            shift = rows.alone
            cohorts = tuple(x._replace(start=x.start - shift, stop=x.stop - shift) for x in rows.cohorts)
            prefill = _select(rows, rest)._replace(alone=0, cohorts=cohorts)
        elif rows.tiles is not None:
            prefill = rows
        decode_turn, prefill_turn = (Turn(position[which], self.cos, self.sin) for which in (first, rest))
        return PassRows(_select(rows, first)._replace(cohorts=()), decode_turn, prefill, prefill_turn)

    def attend(
        self, layer: int, qkv: Tensor, rows: PassRows, pools: Pools, projection: Projection, *, scale: float
    ) -> Tensor:
        """Rotates queries and keys, writes keys and values to the pools and attends: ``[n, heads * size]``.

        ``qkv [n, (heads + 2 key heads) size]`` is laid out as ``projection`` says.
        """
        keys, values, window = pools.keys[layer], pools.values[layer], self.windows[layer]
        count, mixed = rows.decode.alone, []
        if count and self.apart:
            mixed.append(
                decode_attention(
                    qkv[:count],
                    keys,
                    values,
                    rows.decode,
                    projection,
                    rows.decode_turn,
                    window=window,
                    scale=scale,
                    scratch=self.scratch,
                    dependent=self.dependent,
                )
            )
        elif count:
            query = enter(qkv[:count], keys, values, rows.decode.row, projection, rows.decode_turn)
            mixed.append(
                ledger_attention(query, keys, values, rows.decode, window=window, scale=scale, scratch=self.scratch)
            )
        if rows.prefill is not None:
            query = enter(qkv[count:], keys, values, rows.prefill.row, projection, rows.prefill_turn)
            mixed.append(ledger_attention(query, keys, values, rows.prefill, window=window, scale=scale))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(1)


def linear_weights(module: Any) -> Linear:
    """Returns the parameters of a plain linear module."""
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def norm_weights(module: Any) -> Norm:
    """Returns the parameters of a LayerNorm, or of an RMSNorm as in the Llama family."""
    if isinstance(module, nn.LayerNorm):
        bias = None if module.bias is None else module.bias.detach()
        return Norm(module.weight.detach(), bias, module.eps, centred=True)
    return Norm(module.weight.detach(), None, module.variance_epsilon, centred=False)


def unsupported_modules(
    backbone: Backbone, layers: Iterable[Any], linears: Iterable[Any], norms: Iterable[Any]
) -> str | None:
    """Returns why kernels cannot replace these modules, or ``None`` if they can."""
    body: Any = backbone.body
    if backbone.stock.config.hidden_act not in ACTIVATIONS:
        return f"hidden_act={backbone.stock.config.hidden_act!r} has no kernel"
    rope = getattr(body.rotary_emb, "rope_type", None)
    if rope not in ROPES:
        return f"rotary embedding of type {rope!r}: its angles may depend on more than the position"
    for module in linears:
        if type(module) is not nn.Linear:
            return f"a {type(module).__name__} replaces a plain linear layer (an adapter, or quantised)"
    for module in norms:
        plain = type(module) is nn.LayerNorm or type(module).__name__.endswith("RMSNorm")
        if not plain or getattr(module, "weight", None) is None:
            return f"its norm, a {type(module).__name__}, is unknown"
    for module in body.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"hooks on its {type(module).__name__} would not be called"
        if isinstance(module, nn.Dropout) and module.p and module.training:
            return "dropout is active: call eval() first"
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    if len({(parameter.device, parameter.dtype) for parameter in parameters}) > 1:
        return "its weights are on several devices or in several precisions"
    plain = all(type(parameter.data) is Tensor and parameter.is_floating_point() for parameter in parameters)
    if not plain or any(parameter.is_meta for parameter in parameters):
        return "its weights are offloaded or quantised"
    return None


def _select(rows: LedgerRows, which: slice) -> LedgerRows:
    """Returns some rows of a pass."""
    names = ("lane", "slot", "iteration", "row")
    return rows._replace(**{name: getattr(rows, name)[which] for name in names})


@torch.no_grad()
def _rotary_table(backbone: Backbone, like: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of positions 0, 1, …, ``[positions, width]`` each, by the decoder's own embedding."""
    body: Any = backbone.body
    every = torch.arange(positions, device=like.device)[None]
    # In float32 at least: stock layers round the angles' cosines to the model's precision.
    cos, sin = body.rotary_emb(like.new_empty(1, 1, 1, dtype=wide_dtype(like.dtype)), every)
    return cos[0].contiguous(), sin[0].contiguous()
