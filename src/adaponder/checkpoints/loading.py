"""Finds checkpoints and checks them before loading: no code is executed, and every key must match exactly."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from adaponder.checkpoints.looped import is_published_auto_map, refuse_other_loops
from adaponder.checkpoints.manifest import verify_files
from adaponder.checkpoints.shipped import NAMES, full_name, shipped
from adaponder.config import AdaPonderConfig, is_our_auto_map
from adaponder.errors import AdaPonderError, CheckpointError, InputError, did_you_mean, in_one_line, listed, shortened
from adaponder.files import checksums_wanted, open_plain, read_json
from adaponder.ops.finite import first_not_finite

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
# The files of a hub repository that loading may need: no pickles, no source files.
NEEDED = ("*.json", "*.safetensors", "*.txt", "tokenizer.model", "*.jinja")
_OF_A_TOKENIZER = tuple(pattern for pattern in NEEDED if pattern != "*.safetensors")
# A manifest may list these, but loading does not need them.
NOT_NEEDED = ("README.md", "optimizer.safetensors")
_NEGLIGIBLE = 2**24  # numbers that a model may have beyond twice its saved weights: 64 MiB in float32
# The most bytes of safetensors headers that are read, enough for 100,000 tensors.
_HEADERS = 12_000_000
# The most tensors of a checkpoint per tensor of its model; experts may be stored singly and loaded as one tensor.
_PER_TENSOR = 200
# Errors that Hugging Face's loaders raise on impossible configs and files.
_LOADER_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, ArithmeticError)
_LOADER_ERRORS = (*_LOADER_ERRORS, RuntimeError, AssertionError, SafetensorError, StrictDataclassError)


def find_checkpoint(folder: Path) -> Path:
    """Returns ``folder`` if it has a model, or the final model or newest checkpoint of a run folder; else raises."""
    if (folder / "config.json").is_file():
        return folder
    if (folder / "final" / "config.json").is_file():
        return folder / "final"
    steps = sorted(path.parent for path in folder.glob("checkpoints/step-*/config.json"))
    if not steps:
        _refuse_adapter(folder)
        raise CheckpointError(
            f"{folder}: neither a model folder (config.json) nor a run folder (final/, checkpoints/){_hint(folder)}"
        )
    return steps[-1]


def _hint(path: Path) -> str:
    """Returns a hint for an error: the packaged checkpoint called ``path``, or a similar packaged or sibling name."""
    name = str(path)
    if name in NAMES:
        return f"; the checkpoint that comes with adaponder is {full_name(name)}"
    siblings = [str(other) for other in path.parent.iterdir() if other.is_dir()] if os.path.isdir(path.parent) else []
    return "" if os.path.exists(path) else did_you_mean(name, [*NAMES, *siblings])


def fetch(name: str | Path, patterns: tuple[str, ...] = NEEDED, **hub: Any) -> Path:
    """Returns the model folder of a checkpoint: local, packaged, or a hub repository's snapshot without source files.

    A name such as ``sample`` means the packaged checkpoint unless a local folder has that name. ``hub`` are options of
    ``snapshot_download``: revision, cache_dir, token, local_files_only.
    """
    if (packaged := shipped(name)) is not None:
        return packaged
    folder = Path(name)
    if os.path.isdir(folder):  # false for a name that no file can have
        return find_checkpoint(folder)
    name = str(name)
    if os.path.exists(folder) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name}: not a checkpoint folder{_hint(folder)}")
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), **hub))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        name, hint = shortened(name, 200), _hint(folder) or f" ({in_one_line(error)})"
        raise CheckpointError(f"{name}: not a local folder, and the hub did not provide it{hint}") from error


def refuse_unsafe(folder: Path) -> None:
    """Refuses a folder that could run code or lead to files outside it; reads JSON and safetensors headers only."""
    read_json(folder / "config.json")
    refuse_code(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        cure = f"; {', '.join(pickles)} would execute code when loaded: convert to safetensors" if pickles else ""
        raise CheckpointError(f"{folder}: no .safetensors file{cure}")
    for index in folder.glob("*.safetensors.index.json"):
        _check_index(index)
    if (headers := sum(map(_header_bytes, weights))) > _HEADERS:
        raise CheckpointError(f"{folder}: .safetensors headers of {headers:,} bytes, at most {_HEADERS:,} are read")
    for path in weights:
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: truncated or not a safetensors file of {path.stat().st_size} bytes ({error})"
            ) from error


def refuse_code(folder: Path) -> None:
    """Refuses a folder that has settings to run code, links out of it, special files, or an adapter."""
    for pattern in (*NEEDED, "additional_chat_templates/*"):
        for path in sorted(folder.glob(pattern)):
            _require_inside(path, folder.resolve())
    for path in sorted(folder.glob("*config*.json")):
        settings = read_json(path)
        if path.name == "config.json":
            refuse_other_loops(path, settings)
            if is_published_auto_map(settings):
                del settings["auto_map"]
        _refuse_code_in(path, settings)
    _refuse_adapter(folder)


def _refuse_adapter(folder: Path) -> None:
    if os.path.lexists(folder / "adapter_config.json"):
        raise CheckpointError(f"{folder}/adapter_config.json: an adapter names another model to load; merge it first")


def _require_inside(path: Path, folder: Path) -> None:
    """Refuses a special file or a link that leads out of ``folder``, except to the blobs of the hub's cache."""
    target, blobs = path.resolve(), folder.parent.parent / "blobs"
    of_the_hub = folder.parent.name == "snapshots" and target.is_relative_to(blobs)
    if not of_the_hub and not target.is_relative_to(folder):
        raise CheckpointError(f"{path} is a link out of the checkpoint folder: put the file itself there")
    open_plain(path).close()


def _refuse_code_in(path: Path, settings: dict[str, Any]) -> None:
    """Refuses settings, nested ones too, that would make a library run or fetch code."""
    levels: list[Any] = [settings]
    for level in levels:  # grows during the loop
        for value in level.values():
            levels += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
        if "auto_map" in level and not is_our_auto_map(level["auto_map"]):
            raise CheckpointError(f"{path}: auto_map asks to run code from the checkpoint; remove it")
        for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
            if level.get(key) not in (None, "eager", "sdpa"):
                raise CheckpointError(f"{path}: {key}={level[key]!r} could load a kernel from elsewhere; remove it")
        if level.get("quantization_config") is not None:
            raise CheckpointError(
                f"{path}: quantization_config asks for another library's weights; open the original checkpoint, with "
                "--weights int8 or fp8"
            )
        if isinstance(level.get("custom_generate"), str):
            raise CheckpointError(f"{path}: custom_generate asks to run code from the checkpoint; remove it")
        if (weights := level.get("transformers_weights")) is not None and not _is_own_weights(weights):
            raise CheckpointError(
                f"{path}: transformers_weights={weights!r} lies outside the checkpoint folder or is not safetensors"
            )


def _is_own_weights(name: Any) -> bool:
    """Returns whether ``name`` names a safetensors file or index in the checkpoint's own folder."""
    return (
        isinstance(name, str)
        and Path(name).name == name
        and "\0" not in name
        and name.endswith((".safetensors", ".safetensors.index.json"))
    )


def _check_index(index: Path) -> None:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index}: weight_map must name a shard for each tensor")
    for name in sorted(set(shards.values())):
        if not _is_own_weights(name):
            raise CheckpointError(
                f"{index}: shard {name!r} lies outside the checkpoint folder or is not a .safetensors file"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: shard {name!r} is missing")


def _header_bytes(path: Path) -> int:
    """Returns the header size that a safetensors file states in its first 8 bytes; 0 if the file is smaller."""
    with open_plain(path) as file:
        stated = int.from_bytes(file.read(8), "little")
    return stated if stated <= path.stat().st_size else 0


def require_room(folder: Path, config: PreTrainedConfig) -> None:
    """Refuses a config whose model would be much larger than the saved weights, before that model is allocated.

    Each layer has a tensor, so there cannot be more layers than tensors. Models of up to twice the weights' size pass;
    smaller differences are found when keys and shapes are compared after loading.
    """
    numel: list[int] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            numel += [math.prod(file.get_slice(key).get_shape()) for key in file.keys()]  # noqa: SIM118 - no mapping
    tensors, numbers = len(numel), sum(numel)
    text = config.get_text_config()
    if text.num_hidden_layers > tensors:
        raise CheckpointError(
            f"{folder}: config.json says num_hidden_layers={text.num_hidden_layers}, the weights hold {tensors} tensors"
        )
    from adaponder.backbones.shape import meta_twin  # here: importing Auto classes imports adaponder.modeling.model

    twin = meta_twin(text)  # nothing is allocated
    expected = (*twin.parameters(), *twin.buffers())
    if tensors > _PER_TENSOR * (len(expected) + 10):
        raise CheckpointError(
            f"{folder}: the weights hold {tensors:,} tensors, a model of config.json has {len(expected)}"
        )
    needed = sum(tensor.numel() for tensor in expected)
    if needed > 2 * numbers + _NEGLIGIBLE:
        names = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        sizes = ", ".join(f"{name}={getattr(text, name)}" for name in names if hasattr(text, name))
        raise CheckpointError(
            f"{folder}: a model as config.json says ({sizes}, …) has {needed:,} numbers, the weights hold {numbers:,}"
        )


def require_finite(where: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises if a tensor contains NaN or infinity; the error names the first such tensor."""
    if (tensor := first_not_finite(tensors)) is not None:
        content = tensor.holds if tensor.holds == "NaN" else f"{tensor.holds} (as {tensor.dtype})"
        raise CheckpointError(
            f"{where}: weights hold {content}: {tensor.name}; the model was damaged or diverged in training"
        )


@contextmanager
def in_our_words(folder: Path | str) -> Iterator[None]:
    """Context manager that turns errors of Hugging Face's loaders into a ``CheckpointError`` that names ``folder``."""
    try:
        yield
    except AdaPonderError:
        raise
    except _LOADER_ERRORS as error:
        raise CheckpointError(f"{folder} cannot be loaded: {type(error).__name__}: {in_one_line(error)}") from error


def tokenizer_of(name: str | Path, *, verify: bool | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a checkpoint, a tokenizer-only folder or a hub model; never runs remote code.

    ``verify``: whether to compare the files with the manifest; ``None``: unless ``ADAPONDER_VERIFY=0``.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = fetch(name, _OF_A_TOKENIZER)
    elif not has_tokenizer(folder):
        folder = find_checkpoint(folder)
    refuse_code(folder)
    verify = checksums_wanted() if verify is None else verify
    if verify and (folder / "config.json").is_file():  # prepared data has another kind of manifest
        verify_files(folder, skip=".safetensors", may_be_missing=NOT_NEEDED)
    if os.path.lexists(folder / "tokenizer.json"):
        read_json(folder / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Without files, transformers makes a tokenizer of some families that encodes every text as no token.
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty")
        return tokenizer
    except Exception as error:  # the tokenizers library raises bare Exception for anything it cannot read
        # Without files, transformers advises to install packages that would not help.
        why = f" that can be read ({in_one_line(error)})" if has_tokenizer(folder) else ""
        raise InputError(f"--tokenizer: {name} has no tokenizer{why}; name a folder or a hub model with one") from error


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def require_exact_keys(where: str, info: dict[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Raises on missing, unexpected or mismatched keys in ``info``, Hugging Face's loading info.

    ``names`` maps parts of the checkpoint's tensor names to the model's; the error uses the checkpoint's names.
    """
    problems = []
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := info.get(f"{kind}_keys"):
            described = (
                key if isinstance(key, str) else f"{key[0]} is {tuple(key[1])}, the model has {tuple(key[2])}"
                for key in keys
            )
            problem = listed(sorted(described))
            for published, ours in (names or {}).items():
                problem = problem.replace(ours, published)
            problems.append(f"{kind}: {problem}")
    if problems:
        raise CheckpointError(f"{where} does not fit the model; " + "; ".join(problems))


def model_card(config: AdaPonderConfig, parameters: int, added: int) -> str:
    """Returns the README of a saved checkpoint: ``card.md`` filled in."""
    tags = ", ".join(dict.fromkeys(("adaponder", config.method, "adaptive-computation")))
    card = resources.files("adaponder.checkpoints").joinpath("card.md").read_text("utf-8")
    return card.format(backbone=config.backbone_config, config=config, tags=tags, parameters=parameters, added=added)
