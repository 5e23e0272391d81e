"""Writes a checkpoint as a folder that ``trust_remote_code=True`` opens without this package, and checks that it is.

The code in it is two files of this room, copied. The package opens the folder too, by its own classes: the ``auto_map``
in its config.json is the one that :mod:`adaponder.config` knows, and is ignored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adaponder.backbones.wrapper import rounding_bound
from adaponder.checkpoints.loading import has_tokenizer
from adaponder.checkpoints.manifest import write_manifest
from adaponder.checkpoints.saving import saving
from adaponder.checkpoints.special_tokens import with_padding
from adaponder.config import OUR_AUTO_MAP, AdaPonderConfig
from adaponder.conversion.checks import Check, compare, probe_ids
from adaponder.conversion.convert import TOKENIZER_FILES
from adaponder.errors import CheckpointError, InputError, choice
from adaponder.export import modeling_adaponder as exported
from adaponder.files import read_json
from adaponder.methods import method_class
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.registry import method_names

CODE = ("configuration_adaponder.py", "modeling_adaponder.py")
# Decoder families that the exported file was held against the package with, in every test.
FAMILIES = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3")
# The card is edited on the hub, and the code is not downloaded by the package: neither is vouched for.
_NOT_LISTED = ("README.md", *CODE)


def require_exportable(config: AdaPonderConfig, source: str) -> None:
    """Raises, with the reason, where the exported file does not compute what a model of this config computes."""
    if not method_class(config.method).can_be_exported():
        those = [name for name in method_names() if method_class(name).can_be_exported()]
        raise InputError(
            f"{source}: method={config.method} cannot be exported, only {' and '.join(those)}: the exported file has "
            "no other recurrence; share the checkpoint itself, which opens where adaponder is installed"
        )
    family = config.backbone_config.model_type
    if family not in FAMILIES:
        raise InputError(f"{source}: backbone {family} cannot be exported; use {choice(family, FAMILIES)}")
    if config.reuse != "state":
        raise InputError(
            f"{source}: reuse={config.reuse} cannot be exported, only reuse=state: the exported file leaves halted "
            "tokens as they are"
        )


def export(
    model: AdaPonderForCausalLM, source: Path, out: Path, *, card: Callable[[], str], verify: bool = True
) -> list[Check]:
    """Writes ``model``, with the tokenizer in ``source``, to the new or empty folder ``out``; returns what was checked.

    ``card`` makes the text of its README.md. Nothing is written unless the exported code computes what the package
    computes, which ``verify=False`` takes on trust.
    """
    require_room(out)
    require_exportable(model.config, str(source))
    if not has_tokenizer(source):
        raise InputError(f"{source} has no tokenizer, without which nobody could use it: put its files there first")
    with saving(out, out.with_name(out.name + ".partial"), intact="nothing was written") as partial:
        model.save_pretrained(partial, manifest=False)
        settings = read_json(partial / "config.json") | {"auto_map": OUR_AUTO_MAP}
        (partial / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, content in _tokenizer(model, source).items():
            (partial / name).write_bytes(content)
        for name in CODE:
            shutil.copyfile(Path(exported.__file__).with_name(name), partial / name)
        checks = compare_with_package(partial, model) if verify else []
        if broken := [check for check in checks if not check.holds]:
            raise CheckpointError(
                "; ".join(f"{c.what}: differs by {c.difference:.1e}, {c.bound:.1e} allowed" for c in broken)
                + f"; nothing was written to {out}"
            )
        (partial / "README.md").write_text(card(), encoding="utf-8")
        write_manifest(partial, [path.name for path in partial.iterdir() if path.name not in _NOT_LISTED])
    return checks


def require_room(out: Path) -> None:
    """Raises unless ``out`` is a new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is not empty: name a new folder")


def _tokenizer(model: AdaPonderForCausalLM, source: Path) -> dict[str, bytes]:
    """The tokenizer's files by name, set to pad on the left with the model's padding token if they say nothing."""
    files = {name: (source / name).read_bytes() for name in TOKENIZER_FILES if (source / name).is_file()}
    texts = {name: content.decode("utf-8") for name, content in files.items() if name.endswith(".json")}
    return files | {name: text.encode("utf-8") for name, text in with_padding(texts, model).items()}


@torch.no_grad()
def compare_with_package(folder: Path, model: AdaPonderForCausalLM) -> list[Check]:
    """The exported code with the weights in ``folder`` against the package's ``model``, on the same tokens."""
    loaded: Any = exported.AdaPonderForCausalLM.from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    twin, info = loaded
    if wrong := {kind: keys for kind, keys in info.items() if keys and kind.endswith("_keys")}:
        raise CheckpointError(f"{folder}: weights do not fit the exported model: {wrong}")
    twin.to(model.device).eval()
    ids = probe_ids(model.config.vocab_size).to(model.device)
    ours, theirs = model.eval()(ids, execution="dense"), twin(ids)
    cached = twin(ids, use_cache=True)
    other = ours.depth != theirs.depth
    same = not bool(other.any())
    if ours.gates is not None:  # what rounding alone decided is no mistake
        tau = model.config.tau
        other &= ~((ours.gates - tau).abs() <= tau * rounding_bound(model.dtype)).any(-1)
    stays = same and bool((cached.depth == ours.depth).all())
    return [
        compare("the exported file's logits", theirs.logits, ours.logits, bounded=same),
        compare("its logits with a cache", cached.logits, ours.logits, bounded=stays),
        Check("its depths, share of tokens", float(other.float().mean()), 0.0),
    ]
