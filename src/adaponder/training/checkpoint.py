"""Writes, verifies and loads checkpoints; a run killed at any time leaves its last complete checkpoint intact.

A checkpoint is written under another name, flushed to disk, sealed with a manifest of sizes and checksums, and renamed.
A folder without a matching manifest is not a checkpoint. Files are safetensors, JSON or text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaponder.checkpoints.manifest import MANIFEST, read_manifest, saving, verify_files, write_manifest
from adaponder.checkpoints.special_tokens import with_padding
from adaponder.data import Shards
from adaponder.errors import CheckpointError, TrainingError
from adaponder.files import read_json
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.finite import first_not_finite
from adaponder.recipes import Recipe
from adaponder.training.controller import DepthController
from adaponder.training.distributed import World
from adaponder.training.lora import LORA, adapters_of, merged

OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
_PARTIAL = ".partial-"
CPU = "cpu"


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def save_checkpoint(
    folder: Path,
    model: AdaPonderForCausalLM,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor] | None,
    state: dict[str, Any],
    texts: dict[str, str] | None = None,
    adapters: dict[str, Tensor] | None = None,
) -> None:
    """Writes a checkpoint atomically; ``texts`` maps the names of further files to their contents."""
    partial = folder.with_name(f"{_PARTIAL}{folder.name}")
    with saving(folder, partial=partial, intact="earlier checkpoints are untouched", overwrite=True):
        model.save_pretrained(partial, state_dict=weights, manifest=False)  # the manifest is written last
        if optimizer is not None:
            save_file(optimizer, partial / OPTIMIZER)
        if adapters:
            save_file(adapters, partial / LORA)
        for name, content in ({STATE: json.dumps(state, indent=1)} | (texts or {})).items():
            (partial / name).write_text(content, encoding="utf-8")
        write_manifest(partial, step=state["step"])


def verify_checkpoint(folder: Path, *, weights_only: bool = False) -> dict[str, Any]:
    """Returns the checkpoint's state; raises if a file is missing or was changed.

    With ``weights_only`` the optimizer's file may be missing.
    """
    files = read_manifest(folder)["files"]
    if not {STATE, "config.json"} <= files.keys() or not any("model" in name for name in files):
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest of a whole checkpoint")
    if not weights_only and OPTIMIZER in files and not (folder / OPTIMIZER).exists():
        raise CheckpointError(f"{folder / OPTIMIZER} is missing: exact resume is impossible; use --weights-only")
    verify_files(folder, may_be_missing=(OPTIMIZER,))
    return read_json(folder / STATE)


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """Returns (the newest complete checkpoint or ``None``, the errors of newer but incomplete ones)."""
    skipped = []
    for folder in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return folder, skipped
    return None, skipped


def prune(run: Path, count: int, *, saved: Path) -> None:
    """Keeps ``saved``, the checkpoint just written, and the ``count - 1`` before it; removes all others.

    Checkpoints of later steps are removed too, because they are damaged or their steps are trained again, and so are
    the leftovers of interrupted saves.
    """
    folders = sorted((run / "checkpoints").glob("step-*"))
    current = [folder for folder in folders if folder.name <= saved.name]
    for folder in [*current[: -max(1, count)], *folders[len(current) :]]:
        shutil.rmtree(folder)
    for leftover in (run / "checkpoints").glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def cpu_copy(tensor: Tensor) -> Tensor:
    """Returns a CPU copy of a tensor, gathered from all processes if it is sharded."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().to("cpu", copy=True).contiguous()


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the model's state dict, gathered on the CPU; a tied weight is the same tensor under both names."""
    weights = model.state_dict(keep_vars=True)  # with keep_vars, tied weights are one object
    copies = {id(value): cpu_copy(value) for value in weights.values()}
    return {name: copies[id(value)] for name, value in weights.items()}


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns Adam's moments and step counts, keyed by ``parameter name|moment``."""
    moments = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for moment, value in optimizer.state[parameter].items():
                moments[f"{name}|{moment}"] = cpu_copy(value)
    return moments


def load_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Loads the moments saved in ``folder`` into ``optimizer``; raises if a moment is missing."""
    saved = load_file(folder / OPTIMIZER)
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            try:
                moments = {moment: saved[f"{name}|{moment}"] for moment in ("step", "exp_avg", "exp_avg_sq")}
            except KeyError as missing:
                raise CheckpointError(f"{folder / OPTIMIZER}: no {missing}: exact resume is impossible") from None
            for moment in ("exp_avg", "exp_avg_sq"):
                moments[moment] = _like(moments[moment], parameter)
            if group.get("fused"):  # fused AdamW keeps its step counter on the device
                moments["step"] = moments["step"].to(parameter.device)
            optimizer.state[parameter] = moments


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns ``value`` with the device, dtype and sharding of ``parameter``."""
    value = value.to(parameter.device, parameter.dtype)
    if not hasattr(parameter, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def random_states(world: World) -> list[dict[str, str]]:
    """Returns the generator states (CPU and device) of each process as hexadecimal text; every process must call it."""
    states = {CPU: torch.get_rng_state()}
    if world.device.type != CPU:
        states[world.device.type] = torch.get_device_module(world.device).get_rng_state(world.device)
    gathered = {kind: world.gather(state) for kind, state in states.items()}
    return [
        {kind: by_rank[rank].numpy().tobytes().hex() for kind, by_rank in gathered.items()}
        for rank in range(world.size)
    ]


def restore_random_state(states: dict[str, str], device: torch.device) -> None:
    """Restores one process's entry of :func:`random_states`: the CPU's state and, if saved, the device's."""
    tensors = {kind: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for kind, state in states.items()}
    torch.set_rng_state(tensors[CPU])
    if device.type != CPU and device.type in tensors:
        torch.get_device_module(device).set_rng_state(tensors[device.type], device)


class Saver:
    """Saves ``model`` to the run folder; all processes gather the tensors, and the leading process writes them."""

    def __init__(self, recipe: Recipe, run: Path, world: World, model: AdaPonderForCausalLM, shards: Shards):
        self.recipe, self.run, self.world, self.model, self.shards = recipe, run, world, model, shards
        self.tokenizer_files = with_padding(shards.tokenizer_files(), model)

    def save(self, step: int, controller: DepthController | None, optimizer: torch.optim.Optimizer | None) -> Path:
        """Writes the checkpoint of ``step`` and removes old ones; if ``optimizer`` is ``None``, writes the final model.

        Returns the folder. Raises if a weight or a moment is not finite.
        """
        folder = self.run / "final" if optimizer is None else step_folder(self.run, step)
        weights, moments = weights_of(self.model), optimizer and optimizer_state(optimizer)
        if (overflow := first_not_finite((weights | (moments or {})).items())) is not None:
            # An update can overflow even if its gradient was finite.
            raise TrainingError(
                f"step {step - 1}: {overflow.name} is not finite; the run stops, its last checkpoint is intact"
            )
        state = self._state(step, controller)
        if self.world.leads:
            adapters = {} if optimizer is None else {name: weights[name] for name in adapters_of(self.model)}
            plain = merged(self.model, weights)
            save_checkpoint(folder, self.model, plain, moments, state, self.tokenizer_files, adapters)
            if optimizer is not None:
                prune(self.run, self.recipe.train.keep, saved=folder)
        self.world.wait()
        return folder

    def _state(self, step: int, controller: DepthController | None) -> dict[str, Any]:
        """Returns the content of ``state.json``, which a resumed run compares and restores."""
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
