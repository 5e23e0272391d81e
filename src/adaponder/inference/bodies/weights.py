"""Whether a decoder's modules are plain enough to be read without calling them, and their weights.

Fused bodies hold the modules' own parameters: they take no memory, and see what changes in place. A parameter that is
replaced by another one (an adapter merged, a module moved to another device) needs a body of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from adaponder.backbones.wrapper import Backbone
from adaponder.ops.precision import wide_dtype
from adaponder.ops.row_linear import Linear, Norm

# Names of activations in a decoder's config, and what the kernels call them.
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
# Rotary embeddings whose angles depend on the position alone.
ROPES = ("default", "linear", "llama3", "yarn")


def linear_of(module: Any) -> Linear:
    """The parameters of a plain linear module."""
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def norm_of(module: Any) -> Norm:
    """The parameters of a LayerNorm, or of an RMSNorm as the Llama family has it."""
    if isinstance(module, nn.LayerNorm):
        bias = None if module.bias is None else module.bias.detach()
        return Norm(module.weight.detach(), bias, module.eps, centred=True)
    return Norm(module.weight.detach(), None, module.variance_epsilon, centred=False)


def why_not(backbone: Backbone, layers: Iterable[Any], linears: Iterable[Any], norms: Iterable[Any]) -> str | None:
    """The reason why these layers, linear maps and norms cannot be read without calling them, if there is one."""
    body: Any = backbone.body
    rope = getattr(body.rotary_emb, "rope_type", None)
    if rope not in ROPES:
        return f"rotary embedding of type {rope!r}: its angles may depend on more than the position"
    return _in_modules(body, linears, norms) or _in_parameters([p for layer in layers for p in layer.parameters()])


def _in_modules(body: nn.Module, linears: Iterable[Any], norms: Iterable[Any]) -> str | None:
    for module in linears:
        if type(module) is not nn.Linear:
            return f"a {type(module).__name__} stands where a plain linear map is needed (an adapter, or quantised)"
    for module in norms:
        plain = type(module) is nn.LayerNorm or type(module).__name__.endswith("RMSNorm")
        if not plain or getattr(module, "weight", None) is None:
            return f"its norm, a {type(module).__name__}, is none that is known"
    for module in body.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"hooks on its {type(module).__name__} would not be called"
        if isinstance(module, nn.Dropout) and module.p and module.training:
            return "it drops values in training: call eval() first"
    return None


def _in_parameters(parameters: list[nn.Parameter]) -> str | None:
    if len({(parameter.device, parameter.dtype) for parameter in parameters}) > 1:
        return "its weights lie on several devices or in several precisions"
    plain = all(type(parameter.data) is Tensor and parameter.is_floating_point() for parameter in parameters)
    if not plain or any(parameter.is_meta for parameter in parameters):
        return "its weights are offloaded or quantised"
    return None


@torch.no_grad()
def rotary_table(backbone: Backbone, like: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0, 1, …, by the decoder's own rotary embedding: ``[positions, width]`` each."""
    body: Any = backbone.body
    every = torch.arange(positions, device=like.device)[None]
    # In float32 at least: stock layers round the angles' cosines to the model's precision.
    cos, sin = body.rotary_emb(like.new_empty(1, 1, 1, dtype=wide_dtype(like.dtype)), every)
    return cos[0].contiguous(), sin[0].contiguous()
