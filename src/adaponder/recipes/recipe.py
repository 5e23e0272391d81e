"""A recipe is one complete run as data: model, data, schedule, seed. Its hash names the run."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from adaponder.errors import ConfigError
from adaponder.files import parse_yaml, read_yaml
from adaponder.settings import PonderOn, Recurrence, check_fields, fits, limited, scale_from_scratch, shown

STEPS = 1_000_000_000

# What says nothing of what is computed: no part of the hash, and free to change when a run is resumed.
FREE_TRAIN = ("eval_every", "eval_tokens", "save_every", "keep", "log_every", "keep_logits", "compile_by")


@dataclass(frozen=True, kw_only=True)
class ModelRecipe(Recurrence):
    """What is trained: a backbone, and every setting of :class:`adaponder.settings.Recurrence`.

    Attributes:
        backbone: a Hugging Face config as a mapping (training from scratch; ``vocab_size`` defaults to the tokenizer's,
            rounded up to 128), or a checkpoint folder or hub name (continued pretraining).
        init: ``depth_scaled`` (PonderLM's) or ``stock`` (the backbone's own); only from scratch.
    """

    backbone: Any
    init: Literal["depth_scaled", "stock"] = "depth_scaled"

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        if isinstance(self.backbone, str) and self.backbone:
            return
        if not isinstance(self.backbone, Mapping):
            raise ConfigError(
                f"model.backbone={shown(self.backbone)}: a mapping with model_type, or a checkpoint's folder or name, "
                "is needed"
            )
        if not isinstance(self.backbone.get("model_type"), str):
            raise ConfigError("model.backbone.model_type is missing: name the decoder family, e.g. gpt_neox")
        _check_numbers(self.backbone, "model.backbone")

    @property
    def settings(self) -> dict[str, Any]:
        """What the recipe says of the recurrence, as arguments of the config; what it leaves open is not there."""
        said = {item.name: getattr(self, item.name) for item in fields(Recurrence)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in said.items()
            if value is not None
        }


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
    sequence: int = limited(1, 10_000_000, default=2048, because="a row must predict at least one token")
    attend_across_documents: bool = True
    validation: float = limited(0, 1, default=0.01, below=True, because="something must be left to train on")

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        for name in ("source", "tokenizer"):
            if not getattr(self, name).strip() or "\0" in getattr(self, name):
                raise ConfigError(f"data.{name}={getattr(self, name)!r}: a name or path is needed")


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
        joint_warmup: the same once more where joint training begins after ``freeze_backbone_steps``, on top of the
            schedule: the optimizer's averages begin anew there (``None``: none).
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
        exit_entropy: ouro, beta at the beginning and at the end (``None``: always ``model.exit_entropy_weight``).
        exit_entropy_steps: where it goes from one to the other, linearly; twice the same step is a jump there
            (``None``: over the whole run).
        seed: of weights and of the data's order.
        eval_every, save_every, log_every: steps between (0: only at the end).
        eval_tokens: tokens of a validation. keep: checkpoints kept.
    """

    steps: int = limited(1, STEPS, default=MISSING)
    global_batch: int = limited(1, 1_000_000, default=MISSING, because="at least one row is needed")
    micro_batch: int | None = limited(1, 1_000_000, because="at least one row is needed")
    lr: float = limited(0, 100, default=1e-3, above=True)
    gate_lr: float | None = limited(0, 100)
    min_lr_ratio: float = limited(0, 1, default=0.1)
    warmup: float = limited(0, STEPS, default=0.02)
    joint_warmup: float | None = limited(0, STEPS)
    weight_decay: float = limited(0, 100, default=0.1)
    betas: tuple[float, float] = limited(0, 1, default=(0.9, 0.95), below=True)
    clip: float | None = limited(0, 1_000_000_000, default=1.0, above=True, because="null turns clipping off")
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    execution: Literal["dense", "compact"] = "dense"
    compile: bool = False
    compile_by: Literal["layer", "pass"] = "layer"
    memory_budget: float = limited(0, 1, default=1.0, above=True)
    gradient_checkpointing: bool = False
    keep_logits: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    ponder_weight: float = limited(0, 1_000_000, default=0.1)
    k_max: float = limited(0, 1, default=0.1)
    ponder_start: int = limited(0, STEPS, default=0)
    ponder_full: int = limited(0, STEPS, default=0)
    ponder_on: PonderOn = "probabilities"
    ponder_scope: Literal["micro", "process"] = "micro"
    gate_start: int | None = limited(0, STEPS)
    halt_before_ponder: bool = False
    target_depth: float | None = limited(1, 1024)
    target_gain: float = limited(0, 1000, default=0.5, above=True)
    target_every: int = limited(1, STEPS, default=10)
    freeze_backbone_steps: int = limited(0, STEPS, default=0)
    capacity_warmup: int = limited(0, STEPS, default=0)
    exit_stage: Literal[1, 2] = 1
    exit_entropy: tuple[float, float] | None = limited(0, 1_000_000)
    exit_entropy_steps: tuple[int, int] | None = limited(0, STEPS)
    seed: int = limited(0, 2**63 - 1, default=0)
    eval_every: int = limited(0, STEPS, default=0)
    eval_tokens: int = limited(1, 10**15, default=131_072)
    save_every: int = limited(0, STEPS, default=0)
    keep: int = limited(1, 1_000_000, default=2)
    log_every: int = limited(0, STEPS, default=10)

    @property
    def gates_begin(self) -> int:
        """The step from which on gates learn."""
        if self.gate_start is not None:
            return self.gate_start
        return 0 if self.freeze_backbone_steps or not self.ponder_weight else self.ponder_start // 3

    def __post_init__(self) -> None:
        check_fields(self, "train.")

        def require(holds: bool, message: str) -> None:
            if not holds:
                raise ConfigError(f"train.{message}")

        for name in ("warmup", "joint_warmup"):
            given = getattr(self, name) or 0
            require(
                given < 1 or (given <= self.steps and given == int(given)),
                f"{name}={given}: a share below 1, or whole steps up to steps={self.steps}",
            )
        require(
            self.ponder_start <= self.ponder_full,
            f"ponder_full={self.ponder_full} lies before ponder_start={self.ponder_start}",
        )
        require(
            not (self.gate_start and self.freeze_backbone_steps),
            f"gate_start={self.gate_start}: 0 where freeze_backbone_steps={self.freeze_backbone_steps} trains gates "
            "alone first",
        )
        require(
            self.freeze_backbone_steps <= self.steps,
            f"freeze_backbone_steps={self.freeze_backbone_steps}: lies between 0 and steps={self.steps}",
        )
        require(
            self.target_depth is None or (self.ponder_weight > 0 and self.k_max > 0),
            f"target_depth={self.target_depth}: ponder_weight and k_max above 0 are needed to steer with",
        )
        first, last = self.exit_entropy_steps or (0, 0)
        require(first <= last, f"exit_entropy_steps=[{first}, {last}]: the second lies before the first")
        require(
            self.exit_entropy_steps is None or self.exit_entropy is not None,
            "exit_entropy_steps: exit_entropy is missing, the two values to go between",
        )
        require(
            not (self.execution == "compact" and self.parallel == "fsdp"),
            "execution=compact with parallel=fsdp: a process whose tokens have all halted would leave the others "
            "waiting for its shards; use parallel=ddp",
        )
        require(
            self.compile or self.memory_budget == 1,
            f"memory_budget={self.memory_budget}: below 1 only with compile=true",
        )


@dataclass(frozen=True)
class Source:
    """Where a value of a paper's recipe is from.

    Attributes:
        kind: ``stated`` in the paper; from a public ``release`` (PonderLM's unless the note says whose); ``inferred``:
            in neither, and the note says why this one.
        value: what the source says. A test holds it against what the recipe resolves to.
    """

    kind: Literal["stated", "inferred", "release"]
    value: Any = None
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """One run. ``provenance`` says of each ``section.field`` of a paper's recipe where it is from.

    (``code.…`` names what no field can change.)
    """

    name: str
    model: ModelRecipe
    data: DataRecipe
    train: TrainRecipe
    about: str = ""
    provenance: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        depth, deepest = self.train.target_depth, self.model.iterations
        if depth is not None and deepest is not None and depth > deepest:
            raise ConfigError(f"train.target_depth={depth}: no token can exceed model.iterations={deepest}")
        if self.train.eval_tokens < self.data.sequence:
            raise ConfigError(
                f"train.eval_tokens={self.train.eval_tokens}: at least one row of data.sequence={self.data.sequence}"
            )

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


def base_of(name: str) -> str | None:
    """The recipe that this one says it differs from."""
    return _written(name)[0].get("base")


def _written(name: str) -> tuple[dict[str, Any], str]:
    """(a recipe as it is written, its name)."""
    if _is_file(name):
        raw, called = read_yaml(Path(name), ConfigError), Path(name).stem
    elif name in recipe_names():
        raw, called = copy.deepcopy(_shipped(name)), name
    else:
        near = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see adaponder recipes"
        raise ConfigError(f"{name}: neither a recipe that ships nor a file{hint}")
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: a mapping is needed")
    if not isinstance(raw.get("base", ""), str):
        raise ConfigError(f"{name}: base={shown(raw['base'])}: the name of a recipe is needed")
    return raw, called


@cache
def _shipped(name: str) -> Any:
    text = (resources.files("adaponder") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_yaml(text, name, ConfigError)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _read(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The recipe as written, laid over its base."""
    if name in above:
        raise ConfigError(f"{name}: its bases run in a circle, {' → '.join((*above, name))}")
    raw, called = _written(name)
    base = raw.pop("base", None)
    merged = raw if base is None else _merge(_read(base, (*above, name)), raw)
    return merged | {"name": called}


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged field by field; a backbone that changes family and a source are replaced whole."""
    merged = dict(below)
    for key, value in above.items():
        whole = isinstance(value, dict) and ("model_type" in value or "kind" in value)
        if isinstance(value, dict) and isinstance(merged.get(key), dict) and not whole:
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _override(raw: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    option = f"--set {override if len(override) <= 80 else override[:79] + '…'}"
    if not equals or "." not in path:
        raise ConfigError(f"{option}: section.field=value is needed, e.g. train.steps=100")
    *sections, last = path.split(".")
    place = raw
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{option}: {section} is not a section")
    place[last] = parse_yaml(value, option, ConfigError)


# --- from plain data to a recipe -----------------------------------------------------------------------------------

_SECTIONS = {"model": ModelRecipe, "data": DataRecipe, "train": TrainRecipe}


def _build(kind: Any, raw: Mapping[str, Any], path: str) -> Any:
    known = {item.name: item for item in fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(f"{path}{key}: no such field{_meant(str(key), path, known)}")
        if key in _SECTIONS and kind is Recipe:
            values[key] = _build(_SECTIONS[key], _mapping(value, key), f"{key}.")
        elif key == "provenance" and kind is Recipe:
            sources = _mapping(value, key).items()
            values[key] = {
                name: _build(Source, _mapping(source, f"provenance.{name}"), f"provenance.{name}.")
                for name, source in sources
            }
        else:
            values[key] = _numbers(value) if key == "backbone" else _coerced(value, hints[key])
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{path}{name} is missing")
    made = kind(**values)
    check_fields(made, path)  # the sections have done so; a source knows its name only here
    return made


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={shown(value)}: a section is needed")
    return value


def _meant(key: str, path: str, known: Mapping[str, Any]) -> str:
    """A suggestion: the field of that name in another section, else the one spelled most alike in this."""
    elsewhere = [
        f"{section}.{key}" for section, kind in _SECTIONS.items() if key in {item.name for item in fields(kind)}
    ]
    near = elsewhere or [f"{path}{name}" for name in difflib.get_close_matches(key, known, n=1)]
    return f"; did you mean {near[0]}?" if near else ""


def _coerced(value: Any, hint: Any) -> Any:
    """The value as the field's type where it means the same: 3 for 3.0, a list for a tuple, text that is a number."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        tried = [(argument, _coerced(value, argument)) for argument in arguments]
        return next((made for argument, made in tried if fits(made, argument, None)), value)
    if origin is tuple and isinstance(value, list):
        hints = [arguments[0]] * len(value) if ... in arguments else arguments
        same = len(hints) == len(value)
        return tuple(_coerced(part, each) for part, each in zip(value, hints, strict=True)) if same else value
    if hint in (int, float):
        number = _number(value)
        if hint is int and isinstance(number, float) and number.is_integer():
            return int(number)
        if hint is float and isinstance(number, int) and not isinstance(number, bool):
            return float(number) if abs(number) < 1e300 else number
        return number
    return value


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as a string (it wants 1.0e-3); everybody means a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _numbers(value: Any) -> Any:
    """As :func:`_number`, for everything in a backbone's mapping; whole numbers stay whole."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    number = _number(value)
    return int(number) if isinstance(value, str) and isinstance(number, float) and number.is_integer() else number


def _check_numbers(value: Any, where: str) -> None:
    """Raises where a number of a backbone's mapping is not finite, or larger than any size or id."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_numbers(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_numbers(inner, where)
    elif isinstance(value, (int, float)) and not abs(value) <= 1e15:
        raise ConfigError(f"{where}={shown(value)}: a finite number is needed")
