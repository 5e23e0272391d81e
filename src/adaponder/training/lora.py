"""Low-rank adapters (LoRA, through peft) on the linear maps of the backbone: they train, and what they adapt stays.

Checkpoints hold the merged model, which opens like any other; beside it ``lora.safetensors`` keeps the adapters and
what they adapt, as they were, so that a resumed run goes on with the same numbers.
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
    """Puts the adapters of ``train`` into the model's backbone, with a checkpoint's values if there is one."""
    if train.lora_rank is None:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError(
            "train.lora_rank: peft is not installed; pip install 'adaponder[finetune]', or leave it out"
        ) from None
    config = LoraConfig(
        r=train.lora_rank,
        lora_alpha=2 * train.lora_rank if train.lora_alpha is None else train.lora_alpha,  # pyright: ignore[reportArgumentType]
        target_modules="all-linear",  # but the head
    )
    inject_adapter_in_model(config, model.backbone, adapter_name=_ADAPTER)
    if resumed_from is not None:
        _restore(model, resumed_from)


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """The adapters and the weights that they adapt, by their names in the model; empty where there are none."""
    return {name: value for name, value in model.state_dict().items() if _is_adapter(name) or ".base_layer." in name}


def merged(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` of the model under a stock model's names, each adapter added to what it adapts."""
    plain = {name.replace(".base_layer.", "."): value for name, value in weights.items() if not _is_adapter(name)}
    for name, module in model.named_modules():
        if f"{name}.base_layer.weight" in weights:
            layer: Any = module
            delta = layer.get_delta_weight(_ADAPTER).detach()
            plain[f"{name}.weight"] = plain[f"{name}.weight"] + delta.to(plain[f"{name}.weight"])
    return plain


def trains(name: str, train: TrainRecipe, *, backbone_trains: bool) -> bool:
    """Whether the parameter of that name is updated: the method's, and the backbone's or the adapters in it."""
    if name.startswith("method."):
        return not train.freeze_gates
    return backbone_trains and (train.lora_rank is None or _is_adapter(name))


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _restore(model: AdaPonderForCausalLM, folder: Path) -> None:
    wanted = adapters_of(model)
    if not (folder / LORA).is_file():
        raise CheckpointError(f"{folder / LORA} is missing: exact resume is impossible; use --weights-only")
    saved = load_file(folder / LORA)
    if saved.keys() != wanted.keys() or any(saved[name].shape != value.shape for name, value in wanted.items()):
        raise CheckpointError(f"{folder / LORA} holds other adapters than the recipe's; use --weights-only")
    for name, value in wanted.items():
        value.copy_(saved[name])
