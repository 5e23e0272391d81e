"""Defines a recipe: one complete training run as data (model, data, schedule, seed). Its hash names the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import yaml

from adaponder.errors import ConfigError, shown
from adaponder.fields import REMOVED, PonderOn, Recurrence, check_fields, fields_of, setting
from adaponder.registry import check_method, scale_from_scratch

STEPS = "[0, 1_000_000_000]"

# Fields of train that do not change the result: not part of the hash, and free to change when a run is resumed.
FREE_TRAIN = ("eval_every", "eval_tokens", "save_every", "keep", "log_every", "keep_logits", "compile_by")


def _open_recurrence() -> Any:
    """Makes a frozen dataclass with the fields of ``Recurrence``, all ``None`` (unset) by default except ``method``.

    An unset field means the value that the checkpoint was trained with, or the config's default if training starts from
    scratch.
    ``method`` may be unset only for a checkpoint. ``ponder_on`` is left out, because the section ``train`` has it.
    """
    open_fields: list[Any] = []
    for item in fields(Recurrence):
        if item.name != "ponder_on":
            default = item.default if item.name == "method" else None
            open_field = dataclasses.field(default=default, metadata=item.metadata)
            open_fields.append((item.name, fields_of(Recurrence)[item.name].type | None, open_field))
    return dataclasses.make_dataclass("OpenRecurrence", open_fields, frozen=True, kw_only=True)


OpenRecurrence: Any = _open_recurrence()


@dataclass(frozen=True, kw_only=True)
class ModelRecipe(OpenRecurrence):
    """The model to train: a backbone, and every setting of :class:`adaponder.fields.Recurrence`."""

    backbone: Any = setting(
        MISSING,
        "a Hugging Face config as a mapping (training from scratch; vocab_size defaults to the tokenizer's, rounded up "
        "to a multiple of 128), or a checkpoint folder or hub name (continued pretraining)",
    )
    init: Literal["depth_scaled", "stock"] = setting(
        "depth_scaled", "initial weights from scratch: depth_scaled (PonderLM's rule) or stock (the backbone's own)"
    )

    def __post_init__(self) -> None:
        if self.method is not None or not isinstance(self.backbone, str):
            check_method(self.method, "model.")
        check_fields(self, "model.")
        if isinstance(self.backbone, str) and self.backbone:
            return
        if not isinstance(self.backbone, dict):
            raise ConfigError(
                f"model.backbone={shown(self.backbone)} must be a mapping with model_type, or name a checkpoint"
            )
        if not isinstance(self.backbone.get("model_type"), str):
            raise ConfigError("model.backbone.model_type is missing: name the decoder family, e.g. gpt_neox")
        _check_numbers(self.backbone, "model.backbone")

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the keyword arguments of ``AdaPonderConfig`` for the recurrence fields that are set."""
        values = {item.name: getattr(self, item.name) for item in fields(OpenRecurrence)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class DataRecipe:
    """The data to train on."""

    source: str = setting(
        MISSING, "a folder made by adaponder prepare, or an input to prepare (stdlib, a puzzle, a file or a folder)"
    )
    tokenizer: str = setting(
        "train-bpe:4096", "folder, hub name, path of a tokenizer.json, or train-bpe:N; ignored for a prepared folder"
    )
    sequence: int = setting(
        2048, "predicted tokens per window", "[1, 10_000_000]", why="a window must predict at least one token"
    )
    attend_across_documents: bool = setting(
        True, "whether tokens attend to earlier documents of their window, as in Pythia"
    )
    validation: float = setting(
        0.01, "share of documents held out for validation", "[0, 1)", why="something must be left to train on"
    )

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        for name in ("source", "tokenizer"):
            if not getattr(self, name).strip() or "\0" in getattr(self, name):
                raise ConfigError(f"data.{name}={getattr(self, name)!r} must be a name or path")


@dataclass(frozen=True)
class TrainRecipe:
    """The settings of training; a step is one update by the optimizer."""

    steps: int = setting(MISSING, "number of updates", "[1, 1_000_000_000]")
    global_batch: int = setting(
        MISSING, "windows per update, over all processes", "[1, 1_000_000]", why="at least one window is needed"
    )
    micro_batch: int | None = setting(
        None,
        "maximum windows per process and forward; None: the process's whole share of an update",
        "[1, 1_000_000]",
        why="at least one window is needed",
    )
    lr: float = setting(1e-3, "peak learning rate of the backbone", "(0, 100]")
    gate_lr: float | None = setting(
        None, "peak learning rate of the method's own parameters; None: the same as lr", "[0, 100]"
    )
    min_lr_ratio: float = setting(0.1, "final learning rate of the cosine as a share of the peak", "[0, 1]")
    warmup: float = setting(0.02, "linear warm-up: a share of all steps if below 1, else a number of steps", STEPS)
    joint_warmup: float | None = setting(
        None,
        "a second warm-up after freeze_backbone_steps, when joint training begins with a new optimizer; it multiplies "
        "the schedule; None: no second warm-up",
        STEPS,
    )
    weight_decay: float = setting(0.1, "AdamW's weight decay of matrices", "[0, 100]")
    betas: tuple[float, float] = setting((0.9, 0.95), "AdamW's beta_1 and beta_2", "[0, 1)")
    clip: float | None = setting(1.0, "maximum gradient norm", "(0, 1_000_000_000]", why="null turns clipping off")
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", "bfloat16: autocast on a GPU (a CPU computes in float32 and says so); float32; float64: for tests"
    )
    execution: Literal["dense", "compact"] = setting(
        "dense",
        "dense: compute every token and mask the halted ones; compact: compute active rows only, with the same "
        "gradients, which is cheaper once many tokens halt",
    )
    compile: bool = setting(False, "torch.compile the backbone's passes and the computation between them")
    compile_by: Literal["layer", "pass"] = setting(
        "layer",
        "layer: compile one layer and use it for all; pass: compile one graph of all layers, which takes minutes "
        "instead of seconds and is faster if the host is slower than the GPU (small models)",
    )
    memory_budget: float = setting(
        1.0, "with compile, the share of activations kept for backward; the others are computed again", "(0, 1]"
    )
    cuda_graphs: bool | None = setting(
        None,
        "on one GPU, run forward and backward as CUDA graphs once the objective has been the same for 16 forwards, so "
        "that the device does not wait for the host; takes up to twice the activation memory; None: no graphs",
    )
    gradient_checkpointing: bool = setting(
        False, "compute each iteration again in backward instead of keeping its activations"
    )
    keep_logits: bool = setting(
        False,
        "for adaponder and ponder, keep every iteration's logits for backward instead of computing them again: faster, "
        "bitwise equal, and per iteration tokens x vocabulary x 2 bytes (bfloat16) more memory",
    )
    parallel: Literal["ddp", "fsdp"] = setting("ddp", "how several processes share the work: DDP or FSDP")
    ponder_weight: float = setting(0.1, "weight of the ponder loss, the paper's lambda", "[0, 1_000_000]")
    k_max: float = setting(0.1, "final k: the ponder loss is the mean of the lowest share k of gates", "[0, 1]")
    ponder_start: int = setting(
        0, "the paper's S0, the step at which stage 2 begins; until then no token halts, see halt_before_ponder", STEPS
    )
    ponder_full: int = setting(0, "the paper's S1, the step at which k reaches k_max", STEPS)
    ponder_on: PonderOn = setting("probabilities", "whether the ponder loss acts on gate probabilities or on logits")
    ponder_scope: Literal["micro", "process"] = setting(
        "micro", "rank the gates of a micro-step over all processes (micro), or within each process (process)"
    )
    gate_start: int | None = setting(
        None,
        "the first step that updates the method's own parameters; gates keep their initial values until then. None: "
        "after a third of stage 1 if the loss has a ponder term, else step 0",
        STEPS,
    )
    halt_before_ponder: bool = setting(False, "whether gates may halt tokens in stage 1")
    target_depth: float | None = setting(
        None, "from ponder_full on, steer ponder_weight and k towards this mean depth; None: no steering", "[1, 1024]"
    )
    target_gain: float = setting(0.5, "gain of the steering; see training/controller.py", "(0, 1000]")
    target_every: int = setting(10, "steps between two updates of the steering", "[1, 1_000_000_000]")
    freeze_backbone_steps: int = setting(0, "number of first steps that train the method's own parameters alone", STEPS)
    freeze_gates: bool | None = setting(
        None, "whether the method's own parameters keep the checkpoint's values; None: they train"
    )
    lora_rank: int | None = setting(
        None, "train adapters of this rank on the backbone's linear layers; None: train the weights", "[1, 65_536]"
    )
    lora_alpha: float | None = setting(
        None, "adapters are scaled by lora_alpha / lora_rank; None: twice the rank", "(0, 1_000_000]"
    )
    capacity_warmup: int = setting(
        0,
        "for mor, number of first steps over which capacities shrink from 1 to model.capacities; for anytime, over "
        "which random halts become as frequent as model.halt_prior says",
        STEPS,
    )
    exit_stage: Literal[1, 2] = setting(
        1, "for ouro, the training stage; stage 2 trains the exits alone, with freeze_backbone_steps = steps"
    )
    exit_entropy: tuple[float, float] | None = setting(
        None, "for ouro, beta at the beginning and at the end; None: model.exit_entropy_weight always", "[0, 1_000_000]"
    )
    exit_entropy_steps: tuple[int, int] | None = setting(
        None, "the two steps between which beta changes linearly (equal: in one jump); None: first and last", STEPS
    )
    seed: int = setting(0, "seed of the initial weights and of the data order", "[0, 9_223_372_036_854_775_807]")
    eval_every: int = setting(0, "steps between validations; 0: only at the end", STEPS)
    eval_tokens: int = setting(131_072, "tokens of one validation", "[1, 1_000_000_000_000_000]")
    save_every: int = setting(0, "steps between checkpoints; 0: only at the end", STEPS)
    keep: int = setting(2, "number of checkpoints to keep", "[1, 1_000_000]")
    log_every: int = setting(10, "steps between logs; 0: only at the end", STEPS)

    def gates_begin(self, *, pressed: bool) -> int:
        """Returns the first step that updates the method's parameters; ``pressed``: with a ponder term."""
        if self.gate_start is not None:
            return self.gate_start
        waits = pressed and self.ponder_weight and not self.freeze_backbone_steps
        return self.ponder_start // 3 if waits else 0

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        for problem in self._contradictions():
            raise ConfigError(f"train.{problem}")

    def _contradictions(self) -> Iterator[str]:
        """Yields an error message for each violated rule about several fields."""
        for name in ("warmup", "joint_warmup"):
            warmup = getattr(self, name) or 0
            if warmup >= 1 and (warmup > self.steps or warmup != int(warmup)):
                yield f"{name}={warmup} must be a share below 1, or whole steps up to steps={self.steps}"
        if self.ponder_start > self.ponder_full:
            yield f"ponder_full={self.ponder_full} must not be less than ponder_start={self.ponder_start}"
        frozen = f"freeze_backbone_steps={self.freeze_backbone_steps}"
        if self.gate_start and self.freeze_backbone_steps:
            yield f"gate_start={self.gate_start} must be 0: {frozen} trains gates alone first"
        if self.freeze_backbone_steps > self.steps:
            yield f"{frozen} must be between 0 and steps={self.steps}"
        if self.target_depth is not None and not (self.ponder_weight and self.k_max):
            yield f"target_depth={self.target_depth} needs ponder_weight and k_max above 0 to steer with"
        first, last = self.exit_entropy_steps or (0, 0)
        if first > last:
            yield f"exit_entropy_steps=[{first}, {last}] must not decrease"
        if self.exit_entropy_steps is not None and self.exit_entropy is None:
            yield "exit_entropy_steps needs exit_entropy, the two values between which beta changes"
        if self.freeze_gates and self.ponder_weight:
            yield (
                f"freeze_gates with ponder_weight={self.ponder_weight}: frozen gates cannot learn to close; set "
                "train.ponder_weight=0"
            )
        if self.freeze_gates and self.freeze_backbone_steps:
            yield f"freeze_gates with {frozen}: nothing would train"
        if self.lora_alpha is not None and self.lora_rank is None:
            yield "lora_alpha needs lora_rank"
        if self.lora_rank is not None and (self.compile or self.parallel == "fsdp"):
            yield f"lora_rank={self.lora_rank} cannot be combined with compile or parallel=fsdp"
        if self.execution == "compact" and self.parallel == "fsdp":
            yield (
                "execution=compact with parallel=fsdp: a process whose tokens have all halted would leave the others "
                "waiting for its shards; use parallel=ddp"
            )
        if self.cuda_graphs and self.gradient_checkpointing:
            yield "cuda_graphs with gradient_checkpointing: a graph cannot compute a pass again; use memory_budget"
        if self.cuda_graphs and self.target_depth is not None:
            yield "cuda_graphs with target_depth: steering changes the objective too often for a graph; leave one out"
        if self.cuda_graphs and self.execution == "compact" and self.dtype != "bfloat16":
            yield "cuda_graphs with execution=compact needs dtype=bfloat16, the only precision of its kernels"
        if self.memory_budget < 1 and not self.compile:
            yield f"memory_budget={self.memory_budget} below 1 needs compile=true"


@dataclass(frozen=True)
class Origin:
    """The origin of a value in a paper's recipe.

    A value is ``stated`` in the paper, taken from a ``release`` of code or configs (PonderLM's unless ``note`` names
    another), or ``inferred`` for the reason in ``note``. A test requires that ``value`` is the value in the recipe.
    """

    kind: Literal["stated", "inferred", "release"]
    value: Any = None
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """One training run as data; in a paper's recipe ``provenance`` maps each ``section.field`` to its origin."""

    name: str
    model: ModelRecipe
    data: DataRecipe
    train: TrainRecipe
    about: str = ""
    provenance: Mapping[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        depth, deepest = self.train.target_depth, self.model.iterations
        if depth is not None and deepest is not None and depth > deepest:
            raise ConfigError(f"train.target_depth={depth} must be at most model.iterations={deepest}")
        sequence, backbone = self.data.sequence, self.model.backbone
        if isinstance(backbone, Mapping):
            longest = backbone.get("max_position_embeddings", sequence)
            if not isinstance(longest, int) or isinstance(longest, bool):
                raise ConfigError(f"model.backbone.max_position_embeddings={longest!r} must be a whole number")
            if sequence > longest:
                raise ConfigError(f"data.sequence={sequence} exceeds model.backbone.max_position_embeddings={longest}")
        if self.train.eval_tokens < sequence:
            raise ConfigError(
                f"train.eval_tokens={self.train.eval_tokens} must hold at least one window of data.sequence={sequence}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Returns the recipe as plain data; if it trains from scratch, an unset embedding scale becomes its default.

        A change of the default embedding scale therefore changes the hash and the records of a run.
        """
        values = dataclasses.asdict(self)
        if self.model.embedding_scale is None and not isinstance(self.model.backbone, str):
            values["model"]["embedding_scale"] = scale_from_scratch(self.model.method)
        return values

    @property
    def fingerprint(self) -> str:
        """Returns a hash of the fields that affect the result: all of model, data and train except ``FREE_TRAIN``.

        Unset fields (``None``) are left out, and removed fields are included with their last default, so that neither
        adding nor removing a field changes the hash of older runs.
        """
        sections = self.as_dict()
        decisive = {
            section: {key: value for key, value in sections[section].items() if value is not None}
            for section in ("model", "data", "train")
        }
        for path, (default, _) in REMOVED.items():
            section, _, name = path.partition(".")
            if default is not None and section != "model":  # model fields are unset by default, so not hashed
                decisive[section][name] = default
        for key in FREE_TRAIN:
            decisive["train"].pop(key, None)
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        return yaml.safe_dump(json.loads(json.dumps(self.as_dict())), sort_keys=False)


def _check_numbers(value: Any, path: str) -> None:
    """Raises if a number in a backbone's mapping is not finite or its magnitude exceeds 1e15."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_numbers(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_numbers(inner, path)
    elif isinstance(value, (int, float)) and not abs(value) <= 1e15:
        raise ConfigError(f"{path}={shown(value)} must be a finite number")
