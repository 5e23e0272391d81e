"""Writes a checkpoint as a folder that ``trust_remote_code=True`` opens without this package, and uploads it.

The code in the folder is copied from :mod:`adaponder.conversion.exported`; the package itself opens the folder with its
own classes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from adaponder.backbones.wrapper import rounding_bound
from adaponder.checkpoints.loading import has_tokenizer
from adaponder.checkpoints.manifest import saving, write_manifest
from adaponder.config import OUR_AUTO_MAP, AdaPonderConfig
from adaponder.conversion.checks import Check, compare, probe_ids, require_checks
from adaponder.conversion.convert import copy_tokenizer, require_empty
from adaponder.conversion.exported import modeling_adaponder as exported
from adaponder.errors import AdaPonderError, CheckpointError, InputError, in_one_line
from adaponder.files import read_json
from adaponder.methods import method_class, method_names
from adaponder.modeling import AdaPonderForCausalLM

CODE = ("configuration_adaponder.py", "modeling_adaponder.py")
# Decoder families for which tests compare the exported file with the package.
FAMILIES = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3")
# Not listed in the manifest: people edit the card on the hub, and the package does not download the code.
_NOT_LISTED = ("README.md", *CODE)


def require_exportable(config: AdaPonderConfig, source: str) -> None:
    """Raises unless the exported code supports models of this config."""
    for field, value, supported in (
        ("method", config.method, [name for name in method_names() if method_class(name).can_be_exported()]),
        ("backbone", config.backbone_config.model_type, FAMILIES),
        ("reuse", config.reuse, ("state",)),
    ):
        if value not in supported:
            raise InputError(
                f"{source}: {field}={value} cannot be exported, only {', '.join(supported)}; share the checkpoint "
                "itself, which opens where adaponder is installed"
            )


def export(
    model: AdaPonderForCausalLM, source: Path, out: Path, *, card: Callable[[], str], verify: bool = True
) -> list[Check]:
    """Writes ``model``, with the tokenizer in ``source``, to the new or empty folder ``out``; returns the checks.

    ``card`` returns the text of the folder's README.md. Nothing is written unless the exported code computes the same
    logits and depths as the package; ``verify=False`` skips that comparison.
    """
    require_empty(out)
    require_exportable(model.config, str(source))
    if not has_tokenizer(source):
        raise InputError(f"{source} has no tokenizer: copy the tokenizer's files there first")
    with saving(out, intact="nothing was written") as partial:
        model.save_pretrained(partial, manifest=False)
        settings = read_json(partial / "config.json") | {"auto_map": OUR_AUTO_MAP}
        (partial / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        copy_tokenizer(source, partial, model)
        for name in CODE:
            shutil.copyfile(Path(exported.__file__).with_name(name), partial / name)
        checks = compare_with_package(partial, model) if verify else []
        require_checks(checks, out)
        (partial / "README.md").write_text(card(), encoding="utf-8")
        write_manifest(partial, [path.name for path in partial.iterdir() if path.name not in _NOT_LISTED])
    return checks


@torch.no_grad()
def compare_with_package(folder: Path, model: AdaPonderForCausalLM) -> list[Check]:
    """Compares the exported code, on the weights in ``folder``, with the package's ``model`` on the same tokens."""
    loaded: Any = exported.AdaPonderForCausalLM.from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    twin, info = loaded
    if wrong := {kind: keys for kind, keys in info.items() if keys and kind.endswith("_keys")}:
        raise CheckpointError(f"{folder}: weights do not fit the exported model: {wrong}")
    twin.to(model.device).eval()
    ids = probe_ids(model.config.vocab_size).to(model.device)
    ours, theirs = model.eval()(ids, execution="dense"), twin(ids)
    cached = twin(ids, use_cache=True)
    differs = ours.depth != theirs.depth
    same = not bool(differs.any())
    if ours.gates is not None:  # depths may differ if a gate is within rounding of tau
        tau = model.config.tau
        differs &= ~((ours.gates - tau).abs() <= tau * rounding_bound(model.dtype)).any(-1)
    same_cached = same and bool((cached.depth == ours.depth).all())
    return [
        compare("the exported file's logits", theirs.logits, ours.logits, bounded=same),
        compare("the exported file's logits with a cache", cached.logits, ours.logits, bounded=same_cached),
        Check("the exported file's depths: share of tokens that differ", float(differs.float().mean()), 0.0),
    ]


def require_name(name: str) -> None:
    """Raises unless ``name`` is a valid name of a hub repository, of the form OWNER/MODEL."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"--push {name}: {in_one_line(error)}") from None
    if name.count("/") != 1:
        raise InputError(f"--push {name} must be OWNER/MODEL, as in https://huggingface.co/OWNER/MODEL")


def push(folder: Path, name: str, *, private: bool = False, api: HfApi | None = None) -> str:
    """Uploads every file of ``folder`` to the hub's repository ``name``, creating it if necessary.

    Returns the URL of the commit. Authenticates by the token from ``hf auth login`` or ``HF_TOKEN``.
    """
    require_name(name)
    api = api or HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Model exported by adaponder", ignore_patterns=[".*"]
        )
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise AdaPonderError(
            f"--push {name}: the upload failed ({in_one_line(error)}); {folder} is complete: log in with "
            f"`hf auth login`, then `hf upload {name} {folder}`"
        ) from error
    return commit.commit_url
