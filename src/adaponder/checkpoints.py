"""Loading weights never executes code, never guesses a key, and says what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from adaponder.config import AdaPonderConfig
from adaponder.errors import CheckpointError, InputError
from adaponder.files import read_json

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
# What loading may need of a hub repository: no pickle, no source file.
NEEDED = ("*.json", "*.safetensors", "*.txt", "tokenizer.model")


def find_checkpoint(folder: Path) -> Path:
    """The model folder meant by a model folder, a step folder, or a run folder (its final, else its newest step)."""
    if (folder / "config.json").is_file():
        return folder
    if (folder / "final" / "config.json").is_file():
        return folder / "final"
    steps = sorted(path.parent for path in folder.glob("checkpoints/step-*/config.json"))
    if not steps:
        raise CheckpointError(f"{folder}: neither a model folder (config.json) nor a run folder (final/, checkpoints/)")
    return steps[-1]


def fetch(name: str | Path, patterns: tuple[str, ...] = NEEDED, **hub: Any) -> Path:
    """The model folder of a checkpoint: found here, or a hub repository's snapshot without anything that could execute.

    ``hub`` goes to the hub's client: revision, cache_dir, token, local_files_only.
    """
    folder = Path(name)
    if folder.is_dir():
        return find_checkpoint(folder)
    name = str(name)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name}: not a checkpoint folder")
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), **hub))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{name}: not a folder here, and the hub did not give it ({error})") from error


def refuse_unsafe(folder: Path) -> None:
    """Refuses a checkpoint folder that could execute code or reach outside itself; reads nothing but its metadata."""
    config = read_json(folder / "config.json")
    for part in (config, config.get("backbone_config")):
        if isinstance(part, dict):
            _refuse_code(folder, part)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        cure = f"; {', '.join(pickles)} would execute code when loaded: convert to safetensors" if pickles else ""
        raise CheckpointError(f"{folder}: no .safetensors file{cure}")
    for index in folder.glob("*.safetensors.index.json"):
        _check_index(index)
    for path in weights:
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            with path.open("rb") as file:
                claimed = int.from_bytes(file.read(8), "little")
            raise CheckpointError(
                f"{path}: truncated or not a safetensors file: its header claims {claimed} bytes of "
                f"{path.stat().st_size} ({error})"
            ) from error


def _refuse_code(folder: Path, config: dict[str, Any]) -> None:
    where = f"{folder}/config.json"
    if "auto_map" in config:
        raise CheckpointError(f"{where}: auto_map asks to run code from the checkpoint; remove it")
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        if config.get(key) not in (None, "eager", "sdpa"):
            raise CheckpointError(f"{where}: {key}={config[key]!r} could load a kernel from elsewhere; remove it")
    elsewhere = config.get("transformers_weights")
    if elsewhere is not None and Path(str(elsewhere)).name != elsewhere:
        raise CheckpointError(f"{where}: transformers_weights={elsewhere!r} lies outside the checkpoint folder")


def _check_index(index: Path) -> None:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index}: weight_map must name a shard for each tensor")
    for name in sorted(set(shards.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index}: shard {name!r} lies outside the checkpoint folder")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: shard {name!r} is missing")


def require_exact_keys(where: str, info: dict[str, Any]) -> None:
    """Raises unless every parameter was found and every tensor used: ``info`` is Hugging Face's loading report."""
    problems = []
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := info.get(f"{kind}_keys"):
            listed = [key if isinstance(key, str) else _mismatch(key) for key in keys]
            problems.append(f"{kind}: " + ", ".join(sorted(listed)))
    if problems:
        raise CheckpointError(f"{where} does not fit the model; " + "; ".join(problems))


def _mismatch(key: Any) -> str:
    name, found, wanted = key
    return f"{name} is {tuple(found)}, the model has {tuple(wanted)}"


def model_card(config: AdaPonderConfig, parameters: int, added: int) -> str:
    """The README of a saved checkpoint."""
    backbone = config.backbone_config
    return f"""---
library_name: transformers
tags: [adaponder, {config.method}, adaptive-computation]
pipeline_tag: text-generation
---
# A {backbone.model_type} backbone read up to {config.iterations} times per token ({config.method})

| | |
|---|---|
| backbone | {backbone.model_type}, {backbone.num_hidden_layers} layers, hidden size {backbone.hidden_size} |
| vocabulary | {backbone.vocab_size} |
| method | {config.method} |
| iterations (K) | {config.iterations} |
| parameters | {parameters:,} (of which the method adds {added:,}) |

```python
import adaponder  # registers the Auto classes
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH")
output = model(input_ids)
output.depth  # how often each token was read
```
"""
