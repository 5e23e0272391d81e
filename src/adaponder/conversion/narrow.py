"""Stores a model's weights in fewer bits: int8 or fp8 in the decoder's linear layers, or half precision throughout.

Only linear layers inside the decoder's layers are quantised, with one scale per output; they are most of the weights.
Embeddings and head keep their precision, since every iteration mixes them, and so do gates, which are small and decide
depth. Activations are not quantised, so a token's result depends on no other token of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from adaponder.devices import WEIGHTS
from adaponder.errors import InputError
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.precision import widened

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_QUANTISED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Multiplied by the smallest fp8 number, 2**-9, this gives float16's smallest, 2**-24.
_SMALLEST_POWER = 2.0**-15


class NarrowLinear(nn.Module):
    """A linear layer with int8 or fp8 weights, converted to the input's precision in each forward."""

    can_be_saved = False
    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, wide: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = wide.in_features, wide.out_features
        weight = wide.weight.detach()
        largest = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
        # In float32: in half precision, a row's largest weight could exceed the last int8 step and wrap around.
        exact = widened(weight)
        scale = (exact.abs().amax(1) / largest).clamp(min=torch.finfo(exact.dtype).tiny)
        # Small scales are outside float16's range, but not bfloat16's.
        scale = scale.to(torch.bfloat16 if weight.element_size() == 2 else weight.dtype)
        steps = exact / scale[:, None]
        self.register_buffer("weight", (steps.round() if dtype == torch.int8 else steps).to(dtype))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if wide.bias is None else wide.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.weight.to(x.dtype), self.scale
        if x.dtype == torch.float16:
            # Sums of unscaled steps overflow float16, so the power of two in the scale is applied before the product.
            scale, power = _split(scale)
            weight *= power.to(x.dtype)[:, None]
        product = functional.linear(x, weight) * scale.to(x.dtype)
        return product if self.bias is None else product + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.weight.dtype}"


def _split(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (factor below 2, power of two) of each scale; an fp8 weight times the power is exact in float16."""
    exact = widened(scale)
    power = (exact / (2 * torch.frexp(exact).mantissa)).clamp(min=_SMALLEST_POWER)
    return exact / power, power


def narrow(model: AdaPonderForCausalLM, weights: str) -> None:
    """Converts the weights of ``model`` to ``weights`` (int8, fp8, bfloat16, float16) in place, for inference only."""
    if weights in _HALVES:
        if model.device.type == "cpu":
            raise InputError(
                f"--weights {weights}: a CPU is faster in float32; name a GPU with --device, or force it with "
                f"--dtype {weights}"
            )
        nn.Module.to(model, _HALVES[weights])
        model.config.dtype = _HALVES[weights]
        return
    if weights not in WEIGHTS:
        raise InputError(f"--weights {weights} must be one of {', '.join(WEIGHTS)}")
    stacks = [module for module in model.backbone.modules() if isinstance(module, nn.ModuleList)]
    linears = [
        (module, name, child)
        for module in {module for stack in stacks for module in stack.modules()}
        for name, child in module.named_children()
        if type(child) is nn.Linear
    ]
    if not linears:
        family = model.config.backbone_config.model_type
        raise InputError(f"--weights {weights}: the layers of {family} have no plain nn.Linear to quantise")
    for module, name, linear in linears:
        setattr(module, name, NarrowLinear(linear, _QUANTISED[weights]))


def weight_bytes(model: AdaPonderForCausalLM) -> int:
    """Returns the size of all weights in bytes, scales of quantised weights included; shared weights count once."""
    quantised = [module for module in model.modules() if isinstance(module, NarrowLinear)]
    tensors = [*model.parameters(), *(buffer for module in quantised for buffer in module.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
