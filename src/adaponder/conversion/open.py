"""Opens any checkpoint (stock, PonderLM, Ouro, Nanbeige, ours) as a model; raises on missing or unexpected keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from adaponder.checkpoints.loading import (
    NOT_NEEDED,
    fetch,
    in_our_words,
    refuse_code,
    refuse_unsafe,
    require_exact_keys,
    require_finite,
    require_room,
)
from adaponder.checkpoints.looped import (
    LAYOUTS,
    Layout,
    layout_of,
    require_flags,
    translated_config,
    translated_recurrence,
)
from adaponder.checkpoints.manifest import verify_files
from adaponder.config import AdaPonderConfig
from adaponder.conversion.narrow import narrow
from adaponder.devices import as_device, as_dtype
from adaponder.errors import CheckpointError, listed, shown
from adaponder.files import checksums_wanted, read_json
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.registry import PLAIN_METHOD

_PONDERLM_FLAGS = ("ponderinglm", "pondering_steps", "scale_embeds", "mutiply_pondering_steps")
# PonderLM's released weights contain a projection that no forward uses.
_PONDERLM_UNUSED = {"adapter.weight"}


@dataclass
class OpenedCheckpoint:
    """The model of a checkpoint, and how the checkpoint was trained."""

    kind: str  # stock, ponderlm, ouro, nanbeige or adaponder
    folder: Path
    model: PreTrainedModel  # the stock decoder; for adaponder an AdaPonderForCausalLM
    recurrence: dict[str, Any] = field(default_factory=dict)  # the config fields of training; empty for stock
    parameters: dict[str, Tensor] = field(default_factory=dict)  # the published exit gate's, by our names; may be empty

    @property
    def loops(self) -> bool:
        """Returns whether this is a published looped model, which opens as it was trained."""
        return self.kind in LAYOUTS

    def wrapped(self, **settings: Any) -> AdaPonderForCausalLM:
        """Returns the decoder wrapped as in training, changed by ``settings``; a stock decoder becomes ``vanilla``."""
        trained = dict(self.recurrence)
        if trained.get("method") == PLAIN_METHOD:
            trained.pop("iterations")  # always 1 for this method; another method has its own default
        settings = {"method": PLAIN_METHOD} | trained | settings
        stock = self.model.backbone if is_ours(self.model) else self.model
        model = AdaPonderForCausalLM.from_backbone(stock, **settings)
        if self.loops and settings["method"] == "ouro":
            gate = self.parameters or {name: torch.zeros_like(x) for name, x in model.method.state_dict().items()}
            model.method.load_state_dict(gate)
        return model


def open_checkpoint(name: str, *, revision: str | None = None, dtype: str = "auto") -> OpenedCheckpoint:
    """Opens a stock, published looped or AdaPonder checkpoint; raises on missing or unexpected keys."""
    precision = as_dtype(dtype)
    folder = fetch(name, revision=revision)
    refuse_unsafe(folder)
    raw = read_json(folder / "config.json")
    if raw.get("model_type") == "adaponder":
        model: Any = AdaPonderForCausalLM.from_pretrained(folder, dtype=precision)
        names = ("method", "iterations", "tau", "embedding_scale", "initial_multiplier", "expectation_top_k")
        return OpenedCheckpoint("adaponder", folder, model, {key: getattr(model.config, key) for key in names})
    if checksums_wanted():
        verify_files(folder, may_be_missing=NOT_NEEDED)
    layout = layout_of(raw)
    config = _stock_config(folder, raw)
    ponders = bool(raw.get("ponderinglm"))
    for flag in _PONDERLM_FLAGS:
        if hasattr(config, flag):
            delattr(config, flag)
    config.architectures = None
    parameters = {} if layout is None else _published_gate(folder, raw, layout)
    if ponders and raw.get("model_type") == "gpt_neox":
        _published_tensors(folder, raw, "embed_out.weight", "gpt_neox.embed_in.weight")
    with in_our_words(folder):
        require_room(folder, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=precision,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # require_exact_keys lists all of them
            key_mapping=None if layout is None else layout.names,
        )
    model, info = loaded
    kind, unused = ("ponderlm", _PONDERLM_UNUSED) if ponders else ("stock", set())
    if layout is not None:
        kind, unused = raw["model_type"], set(layout.gate)
    info["unexpected_keys"] = set(info["unexpected_keys"]).difference(unused)
    require_exact_keys(str(folder), info, {} if layout is None else layout.names)
    require_finite(str(folder), [*model.state_dict().items(), *parameters.items()])
    model.eval()
    parameters = {name: tensor.to(model.dtype) for name, tensor in parameters.items()}
    return OpenedCheckpoint(kind, folder, model, _recurrence(folder, raw, config), parameters)


def _published_tensors(folder: Path, raw: dict[str, Any], head: str, table: str, *names: str) -> dict[str, Tensor]:
    """Returns the stored tensors called ``names``, and the head; raises if this contradicts ``tie_word_embeddings``.

    A tied ``head`` must be absent or equal to the embedding ``table``; an untied head must be stored.
    """
    tied, tensors = raw.get("tie_word_embeddings", False), dict[str, Tensor]()
    needed = {*names, *((head, table) if tied else (head,))}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in needed.intersection(file.keys())}
    config = folder / "config.json"
    if not tied and head not in tensors:
        raise CheckpointError(f"{config}: tie_word_embeddings={tied}, but the weights have no {head}")
    if tied and head in tensors and not torch.equal(tensors[head], tensors.get(table, tensors[head][:0])):
        raise CheckpointError(f"{config}: tie_word_embeddings={tied}, but {head} differs from {table}")
    return tensors


def _published_gate(folder: Path, raw: dict[str, Any], layout: Layout) -> dict[str, Tensor]:
    """Returns the exit gate's tensors under our parameter names; raises if one is missing or of another shape."""
    tensors = _published_tensors(folder, raw, "lm_head.weight", "model.embed_tokens.weight", *layout.gate)
    if missing := sorted(layout.gate.keys() - tensors):
        raise CheckpointError(f"{folder} has no exit gate: {listed(missing)} missing")
    shapes = {"exit.weight": (1, raw["hidden_size"]), "exit.bias": (1,)}
    for name, ours in layout.gate.items():
        if tuple(tensors[name].shape) != shapes[ours]:
            raise CheckpointError(f"{folder}: {name} is {tuple(tensors[name].shape)}, the gate is {shapes[ours]}")
    return {ours: tensors[name] for name, ours in layout.gate.items()}


def describe(name: str, *, verify: bool | None = None) -> AdaPonderConfig:
    """Returns the :class:`AdaPonderConfig` that :func:`load` would give the checkpoint's model; reads no weights."""
    folder = fetch(name, ("*.json",))
    refuse_code(folder)
    if checksums_wanted() if verify is None else verify:
        verify_files(folder, only=["config.json"])
    raw = read_json(folder / "config.json")
    if raw.get("model_type") == "adaponder":
        with in_our_words(folder):
            return AdaPonderConfig.from_pretrained(folder)
    config = _stock_config(folder, raw)
    plain = {"method": PLAIN_METHOD, "embedding_scale": 1.0}
    return AdaPonderConfig(backbone_config=config, **(plain | _recurrence(folder, raw, config)))


def _stock_config(folder: Path, raw: dict[str, Any]) -> PreTrainedConfig:
    """Returns the config of a stock decoder; raises on an unknown ``model_type`` and on impossible sizes."""
    family = raw.get("model_type")
    if (layout := layout_of(raw)) is not None:
        backbone = translated_config(folder / "config.json", raw, layout) | {"model_type": layout.family}
        return AdaPonderConfig(backbone_config=backbone, method=PLAIN_METHOD, embedding_scale=1.0).backbone_config
    if family is not None and (not isinstance(family, str) or family not in CONFIG_MAPPING):
        raise CheckpointError(f"{folder}/config.json: model_type={family!r} is unknown to this version of transformers")
    with in_our_words(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        AdaPonderConfig(backbone_config=config, method=PLAIN_METHOD, embedding_scale=1.0)
    return config


def _recurrence(folder: Path, raw: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the config fields of a published model's recurrence; empty for a stock decoder."""
    if (layout := layout_of(raw)) is not None:
        return translated_recurrence(folder / "config.json", raw, layout)
    return _ponderlm_recurrence(raw, config) if raw.get("ponderinglm") else {}


def _ponderlm_recurrence(raw: dict[str, Any], config) -> dict[str, Any]:
    """Translates the flags of a PonderLM config to fields of :class:`AdaPonderConfig`."""
    steps = raw.get("pondering_steps")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 1024:
        raise CheckpointError(f"config.json: pondering_steps={shown(steps)} must be a whole number from 0 to 1023")
    require_flags("config.json", raw, "scale_embeds", "mutiply_pondering_steps")
    return {
        "method": "ponder",
        "iterations": steps + 1,
        "embedding_scale": math.sqrt(config.hidden_size) if raw.get("scale_embeds") else 1.0,
        "initial_multiplier": float(max(1, steps)) if raw.get("mutiply_pondering_steps") else 1.0,
    }


def load(
    name: str, *, revision: str | None = None, dtype: str = "auto", device: str = "cpu", weights: str | None = None
) -> tuple[AdaPonderForCausalLM, Path]:
    """Returns (model, folder) of any checkpoint: published models as they were trained, a stock decoder as ``vanilla``.

    ``dtype="auto"`` is the saved precision, but at least float32 on a CPU, since many CPUs are slow in half precision.
    ``weights`` is passed to :func:`~adaponder.conversion.narrow.narrow`, which quantises the model.
    """
    target = as_device(device)
    opened = open_checkpoint(name, revision=revision, dtype=dtype)
    model = opened.model if is_ours(opened.model) else opened.wrapped()
    if dtype == "auto" and target.type == "cpu" and model.dtype.itemsize < 4:
        nn.Module.to(model, torch.float32)
        model.config.dtype = torch.float32
    nn.Module.to(model, target)
    if weights is not None:
        narrow(model, weights)
    return model.eval(), opened.folder


def is_ours(model: PreTrainedModel) -> TypeGuard[AdaPonderForCausalLM]:
    """Returns whether ``model`` is an :class:`AdaPonderForCausalLM`, not a stock decoder."""
    return isinstance(model, AdaPonderForCausalLM)
