"""A model with narrower weights: int8 or fp8 where its layers multiply, by torchao, or half precision throughout.

Only the linear maps inside the decoder's layers are quantised, one scale for each output; they are most of the weights.
Embeddings and head stay as they are, since every iteration mixes them, and so do the gates, which are small and decide
depth. Inputs are not quantised, so a token's result depends on no other token of the batch.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn

from adaponder.devices import WEIGHTS
from adaponder.errors import InputError
from adaponder.modeling import AdaPonderForCausalLM

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def narrow(model: AdaPonderForCausalLM, weights: str) -> None:
    """Gives ``model`` weights of that kind, in place: for evaluation and generation, not for training or saving."""
    if weights in _HALVES:
        if model.device.type == "cpu":
            raise InputError(
                f"--weights {weights}: a CPU computes in float32, often a hundred times faster; name a GPU by "
                f"--device, or insist with --dtype {weights}"
            )
        nn.Module.to(model, _HALVES[weights])
        model.config.dtype = _HALVES[weights]
        return
    if weights not in WEIGHTS:
        raise InputError(f"--weights {weights}: one of {', '.join(WEIGHTS)}")
    if find_spec("torchao") is None:
        raise InputError(f"--weights {weights}: torchao is not installed: pip install 'adaponder[quantize]'")
    linears = layer_linears(model)
    if not linears:
        family = model.config.backbone_config.model_type
        raise InputError(f"--weights {weights}: {family} has no plain linear map in its layers; try bfloat16")
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    rule = Int8WeightOnlyConfig() if weights == "int8" else Float8WeightOnlyConfig()
    quantize_(model, rule, filter_fn=lambda module, _: module in linears)


def layer_linears(model: AdaPonderForCausalLM) -> set[nn.Module]:
    """The linear maps inside the decoder's layers."""
    stacks = [module for module in model.backbone.modules() if isinstance(module, nn.ModuleList)]
    return {module for stack in stacks for module in stack.modules() if type(module) is nn.Linear}


def weight_bytes(model: AdaPonderForCausalLM) -> int:
    """The memory that the weights take, scales of quantised ones included; shared weights count once."""
    return sum(_bytes(parameter) for parameter in model.parameters())


def _bytes(tensor: Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes(getattr(tensor, name)) for name in names)
