"""Writes a run's checkpoints and its final model: never one with a number that is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaponder.checkpoints.special_tokens import with_padding
from adaponder.data import Shards
from adaponder.errors import TrainingError
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.finite import first_not_finite
from adaponder.recipes import Recipe
from adaponder.training.checkpoint import optimizer_state, prune, save_checkpoint, step_folder, weights_of
from adaponder.training.controller import DepthController
from adaponder.training.distributed import World
from adaponder.training.lora import adapters_of, merged
from adaponder.training.randomness import random_states


class Saver:
    """Saves ``model`` to the run folder. All processes take part in gathering tensors; the leading one writes."""

    def __init__(self, recipe: Recipe, run: Path, world: World, model: AdaPonderForCausalLM, shards: Shards):
        self.recipe, self.run, self.world, self.model, self.shards = recipe, run, world, model, shards
        self.tokenizer_files = with_padding(shards.tokenizer_files(), model)

    def save_step(self, step: int, optimizer: torch.optim.Optimizer, controller: DepthController | None) -> None:
        """Writes the checkpoint of the boundary before ``step``, and removes those that the recipe does not keep."""
        weights, moments = weights_of(self.model), optimizer_state(optimizer)
        _require_finite(weights | moments, step)
        adapters = {name: weights[name] for name in adapters_of(self.model)}
        state = self._state(step, controller)
        if self.world.leads:
            folder = step_folder(self.run, step)
            plain = merged(self.model, weights)
            save_checkpoint(folder, self.model, plain, moments, state, self.tokenizer_files, adapters)
            prune(self.run, self.recipe.train.keep, saved=folder)
        self.world.wait()

    def save_final(self, step: int, controller: DepthController | None) -> Path:
        """Writes the final model, without an optimizer, and returns its folder."""
        weights = weights_of(self.model)
        _require_finite(weights, step)
        state = self._state(step, controller)
        if self.world.leads:
            plain = merged(self.model, weights)
            save_checkpoint(self.run / "final", self.model, plain, None, state, self.tokenizer_files)
        self.world.wait()
        return self.run / "final"

    def _state(self, step: int, controller: DepthController | None) -> dict[str, Any]:
        """The content of ``state.json``: what a resumed run must agree with, and the state it goes on from."""
        state: dict[str, Any] = {
            "step": step,
            "recipe": self.recipe.as_dict(),
            "fingerprint": self.recipe.fingerprint,
            "data": self.shards.content_hash(),
            "tokenizer": self.shards.tokenizer_hash,
            "tokenizer_name": self.shards.manifest.fingerprint.get("tokenizer"),
            "world": self.world.size,
            "rng": random_states(self.world),
            "torch": torch.__version__,
        }
        if controller:
            state["controller"] = controller.state(self.world.sum(controller.sums.to(self.world.device)))
        return state


def _require_finite(tensors: dict[str, Tensor], step: int) -> None:
    """Raises where a tensor is not finite: an update can overflow though its gradient was finite."""
    if (bad := first_not_finite(tensors.items())) is not None:
        raise TrainingError(
            f"step {step - 1}: {bad.name} is not finite; the run stops and its last checkpoint is untouched"
        )
