"""Checkpoint folders: a run killed at any instant leaves its last complete checkpoint whole.

A checkpoint is written under another name, flushed to disk, sealed with a manifest of sizes and checksums, and renamed.
A folder without a matching manifest is not a checkpoint. Safetensors and JSON only.
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
from adaponder.errors import CheckpointError
from adaponder.files import read_json
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.training.lora import LORA

OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
_PARTIAL = ".partial-"


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
    """Writes a checkpoint; on a failure nothing of it is left.

    ``texts`` are further files by name, such as the tokenizer's; ``adapters`` what :mod:`adaponder.training.lora`
    resumes from.
    """
    partial = folder.with_name(f"{_PARTIAL}{folder.name}")
    with saving(folder, partial, intact="earlier checkpoints are untouched", make_way=shutil.rmtree):
        model.save_pretrained(partial, state_dict=weights, manifest=False)  # sealed below, all at once
        if optimizer is not None:
            save_file(optimizer, partial / OPTIMIZER)
        if adapters:
            save_file(adapters, partial / LORA)
        for name, content in ({STATE: json.dumps(state, indent=1)} | (texts or {})).items():
            (partial / name).write_text(content, encoding="utf-8")
        write_manifest(partial, step=state["step"])


def verify_checkpoint(folder: Path, *, weights_only: bool = False) -> dict[str, Any]:
    """The checkpoint's state, if every file is as it was written; else an error that names the file.

    ``weights_only`` can do without the optimizer's file.
    """
    _require_whole(folder)
    if not weights_only and OPTIMIZER in read_manifest(folder)["files"] and not (folder / OPTIMIZER).exists():
        raise CheckpointError(f"{folder / OPTIMIZER} is missing: exact resume is impossible; use --weights-only")
    verify_files(folder, may_be_missing=(OPTIMIZER,))
    return read_json(folder / STATE)


def _require_whole(folder: Path) -> None:
    """Raises unless the manifest lists a state, a config and weights."""
    files = read_manifest(folder)["files"]
    if not {STATE, "config.json"} <= files.keys() or not any("model" in name for name in files):
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest of a whole checkpoint")


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint that is whole, for each newer one why it was passed over)."""
    passed_over = []
    for folder in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return folder, passed_over
    return None, passed_over


def prune(run: Path, keep: int, *, saved: Path) -> None:
    """Removes all but the newest ``keep`` checkpoints up to the one just saved, and what interrupted saves left.

    Checkpoints of later steps are broken, or of steps that were taken back: they would be taken for newer ones.
    """
    folders = sorted((run / "checkpoints").glob("step-*"))
    current = [folder for folder in folders if folder.name <= saved.name]
    for folder in [*current[: -max(1, keep)], *folders[len(current) :]]:
        shutil.rmtree(folder)
    for leftover in (run / "checkpoints").glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)


# --- optimizer and weights, by parameter name ----------------------------------------------------------------------


def full(tensor: Tensor) -> Tensor:
    """A copy on the CPU of the whole tensor, which may be sharded over processes."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().to("cpu", copy=True).contiguous()


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's whole state dict, on the CPU; a weight of two names (a tied head) is one tensor, to be saved once."""
    weights = model.state_dict(keep_vars=True)  # so that a tied weight is one object under both names
    whole = {id(value): full(value) for value in weights.values()}
    return {name: whole[id(value)] for name, value in weights.items()}


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's moments and step counts as ``parameter name|moment``."""
    moments = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for moment, value in optimizer.state[parameter].items():
                moments[f"{name}|{moment}"] = full(value)
    return moments


def load_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Loads the moments saved in ``folder`` into ``optimizer``; raises where one is missing."""
    saved = load_file(folder / OPTIMIZER)
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            moments = {}
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                if f"{name}|{moment}" not in saved:
                    raise CheckpointError(f"{folder / OPTIMIZER}: no {moment} for {name}: exact resume is impossible")
                value = saved[f"{name}|{moment}"]
                moments[moment] = value if moment == "step" else _like(value, parameter)
            optimizer.state[parameter] = moments
    # A fused step counter lives on the device of its parameter.
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].to(parameter.device)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device, parameter.dtype)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.to(parameter.device, parameter.dtype)
