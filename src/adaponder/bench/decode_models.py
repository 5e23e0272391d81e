"""The models that decoding is measured with: shapes with random weights, made on the device, or a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from adaponder.config import AdaPonderConfig
from adaponder.errors import InputError, choice
from adaponder.modeling import AdaPonderForCausalLM

ITERATIONS = 4
_NEOX = {"model_type": "gpt_neox", "vocab_size": 50304, "max_position_embeddings": 4096}
_LLAMA = {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 4096, "tie_word_embeddings": False}


class Sizes(NamedTuple):
    """A method and the sizes of its backbone."""

    method: str
    family: dict[str, Any]
    hidden: int
    layers: int
    heads: int
    inner: int

    def backbone(self) -> dict[str, Any]:
        """The backbone's config."""
        return self.family | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inner,
        }


SHAPES = {
    "70m": Sizes("adaponder", _NEOX, 512, 6, 8, 2048),
    "410m": Sizes("adaponder", _NEOX, 1024, 24, 16, 4096),
    "ouro-1.4b": Sizes("ouro", _LLAMA, 2048, 24, 16, 5632),
    "tiny": Sizes("adaponder", _NEOX | {"vocab_size": 61, "max_position_embeddings": 512}, 16, 2, 2, 24),
}


def sizes_of(name: str) -> Sizes:
    """The shape of this name; raises if there is none."""
    if name not in SHAPES:
        raise InputError(f"--shape {name}: {choice(name, list(SHAPES))}")
    return SHAPES[name]


def config_of(name: str, *, vanilla: bool = False) -> AdaPonderConfig:
    """The config of a shape with its method, or of the plain decoder."""
    sizes = sizes_of(name)
    method = "vanilla" if vanilla else sizes.method
    return AdaPonderConfig(backbone_config=sizes.backbone(), method=method, iterations=ITERATIONS)


def build(config: AdaPonderConfig, *, device: torch.device, dtype: torch.dtype, seed: int) -> AdaPonderForCausalLM:
    """A model with random weights."""
    torch.manual_seed(seed)
    with device:
        model = AdaPonderForCausalLM(config)
    nn.Module.to(model, dtype)
    return model.eval()


def build_stock(config: AdaPonderConfig, *, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The plain decoder of the same shape, as Hugging Face has it."""
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config.backbone_config, dtype=dtype)
    return model.eval()
