"""A recipe is one complete run as data: model, data, schedule, seed. Its hash names the run."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from adaponder.errors import ConfigError
from adaponder.settings import scale_from_scratch

# What says nothing of what is computed: no part of the hash, and free to change when a run is resumed.
FREE_TRAIN = ("eval_every", "eval_tokens", "save_every", "keep", "log_every", "keep_logits", "compile_by")


@dataclass(frozen=True)
class ModelRecipe:
    """What is trained.

    Attributes:
        method: adaponder, ponder, loop, pause, mor, ouro or vanilla.
        backbone: a Hugging Face config as a mapping (training from scratch; ``vocab_size`` defaults to the tokenizer's,
            rounded up to 128), or a checkpoint folder or hub name (continued pretraining).
        iterations … expectation_top_k, reuse: as in :class:`adaponder.config.AdaPonderConfig`; ``None`` takes what
            the source was trained with, or that class's default.
        embedding_scale: a number, ``sqrt(d)`` or ``sqrt(2.5 d)``.
        init: ``depth_scaled`` (PonderLM's) or ``stock`` (the backbone's own); only from scratch.
    """

    backbone: Any
    method: str = "adaponder"
    iterations: int | None = None
    tau: float | None = None
    gate_bias: float | None = None
    gate_width: int | None = None
    shared_gate: bool | None = None
    embedding_scale: float | str | None = None
    initial_multiplier: float | None = None
    expectation_top_k: int | None = None
    reuse: str | None = None
    init: Literal["depth_scaled", "stock"] = "depth_scaled"


@dataclass(frozen=True)
class DataRecipe:
    """What it is trained on.

    Attributes:
        source: a folder made by ``adaponder prepare``, or what to prepare one from (``stdlib``, files, folders).
        tokenizer: folder, hub name, path of a tokenizer.json, or ``train-bpe:N``; ignored for a prepared folder.
        sequence: tokens that a row predicts.
        attend_across_documents: as Pythia does; off, documents packed into one row do not see each other.
        validation: share of documents held out when preparing.
    """

    source: str
    tokenizer: str = "train-bpe:4096"
    sequence: int = 2048
    attend_across_documents: bool = True
    validation: float = 0.01


@dataclass(frozen=True)
class TrainRecipe:
    """How it is trained; steps count optimizer updates.

    Attributes:
        steps: updates in all.
        global_batch: rows per update, over all processes.
        micro_batch: at most so many rows per process at once; ``None``: the process's whole share.
        lr, gate_lr: peak learning rates of the backbone and of what the method adds (``None``: the same).
        min_lr_ratio: the cosine's floor as a share of the peak.
        warmup: linear warm-up; below 1 a share of the steps, else steps.
        weight_decay, betas, clip: AdamW's, and the gradient norm's bound (``None``: none).
        dtype: bfloat16 autocasts on a GPU (a CPU computes in float32 and says so); float32; float64 for tests.
        execution: ``dense`` computes every token and masks; ``compact`` computes active rows only, with the same
            gradients: cheaper once many tokens halt.
        compile: torch.compile the passes over the backbone and what stands between them; each shape compiles once.
        compile_by: if compiled: ``layer``, one for all; or ``pass``, one graph of all layers, in minutes instead of
            seconds: faster where the host is slower than the GPU, as with small models.
        memory_budget: compiled, the share of activations kept for backward; the rest is computed again.
        gradient_checkpointing: replay each iteration in backward.
        keep_logits: adaponder and ponder, keep the vocabulary's logits of every iteration for backward instead of
            computing them again: faster, the same bits, tokens x vocabulary x 2 bytes (bfloat16) more per iteration.
        parallel: ``ddp`` or ``fsdp``, when there are several processes.
        ponder_weight: the paper's lambda. k_max: the share of gates bottom-K averages, once warm.
        ponder_start, ponder_full: S0 and S1: stage 2 begins, and k has reached k_max.
        ponder_on: probabilities or logits. ponder_scope: rank gates over all processes of a micro-step (``micro``) or
            each process for itself (``process``).
        gate_start: what the method adds is not updated before this step; gates then stay as open as they began.
            ``None``: a third into stage 1 where a ponder loss is to come, as measured (experiments/), else at once.
        halt_before_ponder: whether gates may halt tokens in stage 1.
        target_depth: steer ponder_weight and k_max, once k is warm, towards this mean depth (``None``: do not).
        target_gain, target_every: how fast, and after how many steps each time; see training/controller.py.
        freeze_backbone_steps: train what the method adds alone for so long.
        capacity_warmup: mor, steps over which capacity shrinks from 1. exit_stage: ouro's stage.
        seed: of weights and of the data's order.
        eval_every, save_every, log_every: steps between (0: only at the end).
        eval_tokens: tokens of a validation. keep: checkpoints kept.
    """

    steps: int
    global_batch: int
    micro_batch: int | None = None
    lr: float = 1e-3
    gate_lr: float | None = None
    min_lr_ratio: float = 0.1
    warmup: float = 0.02
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    execution: Literal["dense", "compact"] = "dense"
    compile: bool = False
    compile_by: Literal["layer", "pass"] = "layer"
    memory_budget: float = 1.0
    gradient_checkpointing: bool = False
    keep_logits: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    ponder_weight: float = 0.1
    k_max: float = 0.1
    ponder_start: int = 0
    ponder_full: int = 0
    ponder_on: Literal["probabilities", "logits"] = "probabilities"
    ponder_scope: Literal["micro", "process"] = "micro"
    gate_start: int | None = None
    halt_before_ponder: bool = False
    target_depth: float | None = None
    target_gain: float = 0.5
    target_every: int = 10
    freeze_backbone_steps: int = 0
    capacity_warmup: int = 0
    exit_stage: int = 1
    seed: int = 0
    eval_every: int = 0
    eval_tokens: int = 131_072
    save_every: int = 0
    keep: int = 2
    log_every: int = 10

    @property
    def gates_begin(self) -> int:
        """The step from which on gates learn."""
        if self.gate_start is not None:
            return self.gate_start
        return 0 if self.freeze_backbone_steps or not self.ponder_weight else self.ponder_start // 3

    def __post_init__(self) -> None:
        def require(holds: bool, message: str) -> None:
            if not holds:
                raise ConfigError(f"train.{message}")

        require(self.steps >= 1, f"steps={self.steps}: at least one is needed")
        require(self.global_batch >= 1, f"global_batch={self.global_batch}: at least one row is needed")
        require(self.lr > 0, f"lr={self.lr}: must be positive")
        require(0 <= self.min_lr_ratio <= 1, f"min_lr_ratio={self.min_lr_ratio}: lies between 0 and 1")
        require(0 <= self.k_max <= 1, f"k_max={self.k_max}: lies between 0 and 1")
        require(self.ponder_weight >= 0, f"ponder_weight={self.ponder_weight}: must not be negative")
        require(
            0 <= self.ponder_start <= self.ponder_full,
            f"ponder_full={self.ponder_full} lies before ponder_start={self.ponder_start}",
        )
        require(
            (self.gate_start or 0) >= 0 and not (self.gate_start and self.freeze_backbone_steps),
            f"gate_start={self.gate_start}: a step, and 0 where "
            f"freeze_backbone_steps={self.freeze_backbone_steps} trains gates alone first",
        )
        require(
            0 <= self.freeze_backbone_steps <= self.steps,
            f"freeze_backbone_steps={self.freeze_backbone_steps}: lies between 0 and steps={self.steps}",
        )
        require(
            self.target_depth is None or (self.target_depth >= 1 and self.ponder_weight > 0 and self.k_max > 0),
            f"target_depth={self.target_depth}: at least 1, and ponder_weight and k_max above 0 to steer with",
        )
        require(self.target_gain > 0, f"target_gain={self.target_gain}: must be positive")
        require(self.target_every >= 1, f"target_every={self.target_every}: at least one step")
        require(
            not (self.execution == "compact" and self.parallel == "fsdp"),
            "execution=compact with parallel=fsdp: a process whose tokens have all halted would leave the others "
            "waiting for its shards; use parallel=ddp",
        )
        require(
            0 < self.memory_budget <= 1 and (self.compile or self.memory_budget == 1),
            f"memory_budget={self.memory_budget}: a share above 0 and up to 1, and below 1 only with compile=true",
        )
        micro = self.micro_batch
        require(micro is None or micro >= 1, f"micro_batch={micro}: at least one row is needed")


@dataclass(frozen=True)
class Recipe:
    """One run. ``provenance`` says of each value of a paper's recipe where it is from."""

    name: str
    model: ModelRecipe
    data: DataRecipe
    train: TrainRecipe
    about: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The recipe as data, with the embedding scale that training from scratch uses where none is given.

        So records and hashes tell runs of different scales apart.
        """
        values = dataclasses.asdict(self)
        if self.model.embedding_scale is None and not isinstance(self.model.backbone, str):
            values["model"]["embedding_scale"] = scale_from_scratch(self.model.method)
        return values

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the result: not the name, prose, how often is logged or what is kept.

        Fields left open (``None``) are not part of it, so that a later field does not rename the runs before it.
        """
        sections = self.as_dict()
        decisive = {
            section: {key: value for key, value in sections[section].items() if value is not None}
            for section in ("model", "data", "train")
        }
        for key in FREE_TRAIN:
            decisive["train"].pop(key, None)
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        return yaml.safe_dump(json.loads(json.dumps(self.as_dict())), sort_keys=False)


def recipe_names() -> list[str]:
    """The recipes that ship, as ``folder/name``."""
    root = resources.files("adaponder") / "recipes"
    folders = (folder for folder in root.iterdir() if folder.is_dir())
    return sorted(
        f"{folder.name}/{file.name.removesuffix('.yaml')}"
        for folder in folders
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    )


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or path, with ``section.field=value`` overrides; unknown fields are errors.

    A recipe may name a ``base``: it then says only what differs from it.
    """
    raw = _read(name)
    for override in overrides:
        _override(raw, override)
    return _build(Recipe, raw, "")


def _read(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The recipe as written, laid over its base."""
    if name in above:
        raise ConfigError(f"{name}: its bases run in a circle, {' → '.join((*above, name))}")
    if Path(name).is_file():
        text, called = Path(name).read_text(), Path(name).stem
    elif name in recipe_names():
        text, called = (resources.files("adaponder") / "recipes" / f"{name}.yaml").read_text(), name
    else:
        near = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see adaponder recipes"
        raise ConfigError(f"{name}: neither a recipe that ships nor a file{hint}")
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: a mapping is needed")
    base = raw.pop("base", None)
    merged = raw if base is None else _merge(_read(base, (*above, name)), raw)
    return merged | {"name": called}


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged field by field; a backbone is replaced whole where it changes family."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict) and "model_type" not in value:
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _override(raw: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals or "." not in path:
        raise ConfigError(f"--set {override}: section.field=value is needed, e.g. train.steps=100")
    *sections, last = path.split(".")
    place = raw
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
    try:
        place[last] = _number(yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: {error}") from None


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as a string (it wants 1.0e-3); everybody means a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _build(kind: Any, raw: Mapping[str, Any], path: str) -> Any:
    known = {item.name: item for item in fields(kind)}
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in raw.items():
        where = f"{path}{key}"
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {path}{near[0]}?" if near else ""
            raise ConfigError(f"{where}: no such field{hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: a section is needed")
            values[key] = _build(hints[key], value, f"{where}.")
        else:
            values[key] = _typed(_number(value) if hints[key] is not str else value, hints[key], where)
    for name, item in known.items():
        if name not in values and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}{name} is missing")
    return kind(**values)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """The value as the field's type, or an error that names the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or origin in (Mapping, dict):
        return value
    if origin is types.UnionType:
        if value is None and type(None) in arguments:
            return None
        kinds = [argument for argument in arguments if argument is not type(None)]
        # A number or a word: words are tried where the value is one.
        return _typed(value, str if isinstance(value, str) and str in kinds else kinds[0], where)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where}={value!r}: choose one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(arguments):
            raise ConfigError(f"{where}={value!r}: {len(arguments)} numbers are needed")
        return tuple(_typed(part, a, where) for part, a in zip(value, arguments, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value == int(value):
        return int(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where}={value!r}: {hint.__name__} is needed")
    return value
