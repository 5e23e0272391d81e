"""Initialises weights for training from scratch, small enough that K iterations of a deep stack do not diverge.

PonderLM and its loop baseline are initialised like this: weights of matrices and embedding tables are drawn from a
normal distribution of variance 2 / (5 d), with hidden size d, truncated at three standard deviations; projections into
the residual stream are divided by sqrt(2 * layers * K), because K iterations add to the stream 2 * layers * K times.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adaponder.errors import BackboneError

# The last projection of attention and of the MLP, as decoder families name it.
_INTO_THE_STREAM = ("attention.dense", "dense_4h_to_h", "o_proj", "down_proj", "c_proj", "out_proj", "fc2")


@torch.no_grad()
def depth_scaled_(stock: PreTrainedModel, *, iterations: int, seed: int) -> None:
    """Initialises a stock decoder in place for ``iterations`` iterations; norm weights are 1, biases 0.

    Raises unless it finds two projections into the residual stream per layer.
    """
    device = next(stock.parameters()).device
    generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
    std = math.sqrt(2.0 / (5.0 * stock.config.hidden_size))
    shrink = math.sqrt(2.0 * stock.config.num_hidden_layers * iterations)
    scaled = 0
    for name, module in stock.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            into_the_stream = name.endswith(_INTO_THE_STREAM)
            scaled += into_the_stream
            _truncated_normal_(module.weight, std / shrink if into_the_stream else std, generator)
        elif isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            # Gemma's norms multiply by 1 + weight.
            weight.fill_(0.0 if type(module).__name__.startswith("Gemma") else 1.0)
        if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
            bias.zero_()
    expected = 2 * stock.config.num_hidden_layers
    if scaled != expected:
        raise BackboneError(
            f"{stock.config.model_type}: found {scaled} projections into the residual stream, expected {expected}; "
            "depth-scaled initialisation does not know this family"
        )
    stock.tie_weights()


def _truncated_normal_(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    # Drawing in float32 gives equal weights in every precision. In training the generator is on the CPU, which gives
    # equal weights on every device.
    drawn = torch.empty(weight.shape, dtype=torch.float32, device="meta" if weight.is_meta else generator.device)
    nn.init.trunc_normal_(drawn, std=std, a=-3.0 * std, b=3.0 * std, generator=generator)
    weight.copy_(drawn)
