"""Trains low-rank adapters (LoRA, with peft) on the linear layers of the backbone, whose own weights are frozen.

Checkpoints hold the merged model, which opens like any other; beside it ``lora.safetensors`` holds the adapters and
the weights that they adapt, so that a resumed run continues with the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from adaponder.errors import CheckpointError, InputError
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import TrainRecipe

LORA = "lora.safetensors"
_ADAPTER = "default"


def attach(model: AdaPonderForCausalLM, train: TrainRecipe, resumed_from: Path | None = None) -> None:
    """Adds the recipe's adapters, if any, to the backbone; loads their values from ``resumed_from``, if given."""
    if train.lora_rank is None:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError(
            "train.lora_rank needs peft: pip install 'adaponder[finetune]', or drop train.lora_rank"
        ) from None
    config = LoraConfig(
        r=train.lora_rank,
        lora_alpha=2 * train.lora_rank if train.lora_alpha is None else train.lora_alpha,  # pyright: ignore[reportArgumentType]
        target_modules="all-linear",  # except the head
    )
    inject_adapter_in_model(config, model.backbone, adapter_name=_ADAPTER)
    if resumed_from is None:
        return
    adapters, path = adapters_of(model), resumed_from / LORA
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: exact resume is impossible; use --weights-only")
    saved = load_file(path)
    if saved.keys() != adapters.keys() or any(saved[name].shape != value.shape for name, value in adapters.items()):
        raise CheckpointError(f"{path} holds other adapters than the recipe: use --weights-only")
    for name, value in adapters.items():
        value.copy_(saved[name])


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the adapters' tensors and the weights that they adapt, by name in the model."""
    return {name: value for name, value in model.state_dict().items() if _is_adapter(name) or ".base_layer." in name}


def merged(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns ``weights`` with adapters merged into the weights they adapt, under the names of a plain model."""
    plain = {name.replace(".base_layer.", "."): value for name, value in weights.items() if not _is_adapter(name)}
    for name, module in model.named_modules():
        if f"{name}.base_layer.weight" in weights:
            layer: Any = module
            delta = layer.get_delta_weight(_ADAPTER).detach()
            plain[f"{name}.weight"] = plain[f"{name}.weight"] + delta.to(plain[f"{name}.weight"])
    return plain


def trains(name: str, train: TrainRecipe, *, backbone_trains: bool) -> bool:
    """Returns whether the parameter ``name`` trains; the recipe may freeze gates, the phase the backbone.

    With LoRA, only the adapters in the backbone train.
    """
    if name.startswith("method."):
        return not train.freeze_gates
    return backbone_trains and (train.lora_rank is None or _is_adapter(name))


def _is_adapter(name: str) -> bool:
    return ".lora_" in name
