"""Loading weights never executes code, never guesses a key, and says what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adaponder.config import AdaPonderConfig
from adaponder.errors import CheckpointError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
_LARGEST_HEADER = 100_000_000


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


def refuse_unsafe(folder: Path) -> None:
    """Refuses a checkpoint folder that could execute code or reach outside itself; reads nothing but its metadata."""
    config = read_json(folder / "config.json")
    for part in (config, config.get("backbone_config") or {}):
        if "auto_map" in part:
            raise CheckpointError(f"{folder}/config.json: auto_map asks to run code from the checkpoint; remove it")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        found = (
            f"; {', '.join(pickles)} would execute code when loaded: convert to safetensors first" if pickles else ""
        )
        raise CheckpointError(f"{folder}: no .safetensors file{found}")
    for index in folder.glob("*.safetensors.index.json"):
        for name in set(read_json(index).get("weight_map", {}).values()):
            if Path(name).name != name:
                raise CheckpointError(f"{index}: shard {name!r} lies outside the checkpoint folder")
            if not (folder / name).is_file():
                raise CheckpointError(f"{index}: shard {name!r} is missing")
    for path in weights:
        _check_header(path)


def _check_header(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if size < 8 or header > min(_LARGEST_HEADER, size - 8):
        raise CheckpointError(f"{path}: the safetensors header claims {header} bytes of {size}; truncated or not one")


def read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: not a model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: an object is needed, found {type(loaded).__name__}")
    return loaded


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
