"""Builds the model of a recipe: from scratch, or from a checkpoint."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from adaponder.backbones.initialisation import depth_scaled_
from adaponder.config import AdaPonderConfig
from adaponder.conversion.open import describe, open_checkpoint
from adaponder.errors import ConfigError, did_you_mean
from adaponder.fields import Recurrence
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import Recipe, load_recipe


def with_method(recipe: Recipe, out: Path | None = None, resume: str | None = None) -> Recipe:
    """Returns the recipe; if its ``model.method`` is ``None``, sets it to the method of the checkpoint to train from.

    A resumed run takes the method from its folder ``out`` or from the checkpoint that ``resume`` names, so that it
    continues even if the checkpoint with which it began is gone.
    """
    if recipe.model.method is not None:
        return recipe
    source, method = recipe.model.backbone, None
    if resume == "auto" and out is not None and (out / "recipe.yaml").is_file():
        earlier = load_recipe(str(out / "recipe.yaml")).model
        method = earlier.method if earlier.backbone == source else None
    elif resume not in (None, "auto") and Path(resume).is_dir():
        source = resume
    return replace(recipe, model=replace(recipe.model, method=method or describe(source).method))


def build_model(recipe: Recipe, vocabulary: int) -> AdaPonderForCausalLM:
    """Returns the recipe's model on the default device, initialised from its seed."""
    torch.manual_seed(recipe.train.seed)
    config = config_of(recipe, vocabulary)
    if config is None:
        model = _from_checkpoint(recipe.model.backbone, settings_of(recipe))
    else:
        model = AdaPonderForCausalLM(config)
        if recipe.model.init == "depth_scaled":
            depth_scaled_(model.backbone, iterations=model.config.iterations, seed=recipe.train.seed)
    if model.config.vocab_size < vocabulary:
        raise ConfigError(
            f"model.backbone.vocab_size={model.config.vocab_size} must be at least the tokenizer's {vocabulary}"
        )
    nn.Module.to(model, weights_dtype(recipe))
    return model.train()


def weights_dtype(recipe: Recipe) -> torch.dtype:
    """Returns the dtype of the weights in training: float64 if ``train.dtype`` is float64, else float32."""
    return torch.float64 if recipe.train.dtype == "float64" else torch.float32


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Returns the model settings of the recipe as keyword arguments of the config."""
    return recipe.model.settings | {"ponder_on": recipe.train.ponder_on}


def config_of(recipe: Recipe, vocabulary: int | None = None) -> AdaPonderConfig | None:
    """Returns the config of a recipe that trains from scratch, or ``None`` if its backbone is a checkpoint.

    By default, vocab_size is ``vocabulary`` rounded up to a multiple of 128. ``vocabulary=None`` (not known yet) means
    the smallest vocabulary that the recipe allows.
    """
    if isinstance(recipe.model.backbone, str):
        return None
    if vocabulary is None:
        vocabulary = int(recipe.model.pause_token_id or 0) + 1
    backbone = {"vocab_size": -(-vocabulary // 128) * 128} | recipe.model.backbone
    _refuse_unknown(backbone)
    try:
        config = AdaPonderConfig(backbone_config=backbone, **settings_of(recipe))
    except ConfigError as error:
        # In the recipe the field is called model.backbone.
        raise ConfigError(str(error).replace("backbone_config", "model.backbone")) from None
    # Padding uses the data's end token (see align). The family's padding id is an ordinary token here, but some
    # families would initialise its embedding with zeros.
    config.pad_token_id = None
    return config


def _refuse_unknown(backbone: dict[str, Any]) -> None:
    """Raises on a field that the decoder family does not have, which Hugging Face would silently accept."""
    if backbone.get("model_type") not in CONFIG_MAPPING:
        return  # the config raises, and lists the types
    known = CONFIG_MAPPING[backbone["model_type"]]().to_dict()
    for key in backbone:
        if key not in known:
            hint = did_you_mean(key, known, "model.backbone.")
            raise ConfigError(f"model.backbone.{key}: {backbone['model_type']} has no such field{hint}")


def _from_checkpoint(name: str, settings: dict[str, Any]) -> AdaPonderForCausalLM:
    """Returns a model with a recipe's ``settings`` and the weights of a checkpoint.

    If ``settings`` has another method than the checkpoint, only the weights of its backbone are used.
    """
    opened = open_checkpoint(name, dtype="float32")
    model = opened.model
    if not isinstance(model, AdaPonderForCausalLM) or opened.recurrence["method"] != settings["method"]:
        return opened.wrapped(**settings)
    current = {item.name: getattr(model.config, item.name) for item in fields(Recurrence)}
    after = AdaPonderConfig(backbone_config=model.config.backbone_config, **current | settings)
    # gate_bias only initialises gates: it does not apply to trained ones.
    differing = [name for name in settings if name != "gate_bias" and getattr(after, name) != current[name]]
    if not differing:
        return model
    changed = AdaPonderForCausalLM.from_backbone(model.backbone, **current | settings)
    try:
        changed.method.load_state_dict(model.method.state_dict())
    except RuntimeError:
        changes = ", ".join(f"model.{name}={settings[name]}" for name in differing)
        raise ConfigError(
            f"{changes}: the parameters of {model.config.method} have another shape in the checkpoint; drop these "
            "fields, or start from its backbone (adaponder convert --method backbone)"
        ) from None
    return changed
