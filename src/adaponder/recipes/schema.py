"""A recipe is one complete training run as data: model, data, schedule, seed. Its hash names the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import yaml

from adaponder.errors import ConfigError, shown
from adaponder.registry import scale_from_scratch
from adaponder.settings import OpenRecurrence, PonderOn, check_fields, limited

STEPS = 1_000_000_000

# Fields of train that do not change the result: not part of the hash, and free to change when a run is resumed.
FREE_TRAIN = ("eval_every", "eval_tokens", "save_every", "keep", "log_every", "keep_logits", "compile_by")


@dataclass(frozen=True, kw_only=True)
class ModelRecipe(OpenRecurrence):
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
        """The settings of the recurrence as keyword arguments of the config; fields left open (``None``) are absent."""
        values = {item.name: getattr(self, item.name) for item in fields(OpenRecurrence)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }


@dataclass(frozen=True)
class DataRecipe:
    """The data that is trained on.

    Attributes:
        source: a folder made by ``adaponder prepare``, or what to prepare one from (``stdlib``, files, folders).
        tokenizer: folder, hub name, path of a tokenizer.json, or ``train-bpe:N``; ignored for a prepared folder.
        sequence: tokens that a window predicts.
        attend_across_documents: whether tokens attend to earlier documents of their window, as in Pythia.
        validation: share of documents held out when preparing.
    """

    source: str
    tokenizer: str = "train-bpe:4096"
    sequence: int = limited(1, 10_000_000, default=2048, because="a window must predict at least one token")
    attend_across_documents: bool = True
    validation: float = limited(0, 1, default=0.01, below=True, because="something must be left to train on")

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        for name in ("source", "tokenizer"):
            if not getattr(self, name).strip() or "\0" in getattr(self, name):
                raise ConfigError(f"data.{name}={getattr(self, name)!r}: a name or path is needed")


@dataclass(frozen=True)
class TrainRecipe:
    """How the model is trained; steps count optimizer updates.

    Attributes:
        steps: updates in all.
        global_batch: windows (sequences) per update, over all processes.
        micro_batch: windows per process and forward, at most; ``None``: the process's whole share of an update.
        lr, gate_lr: peak learning rates of the backbone and of the method's own parameters (``None``: the same).
        min_lr_ratio: the cosine's floor as a share of the peak.
        warmup: linear warm-up; below 1 a share of the steps, else steps.
        joint_warmup: the same once more where joint training begins after ``freeze_backbone_steps``, on top of the
            schedule: the optimizer's averages begin anew there (``None``: none).
        weight_decay, betas: of AdamW. clip: largest gradient norm (``None``: no clipping).
        dtype: bfloat16 autocasts on a GPU (a CPU computes in float32 and says so); float32; float64 for tests.
        execution: ``dense`` computes every token and masks; ``compact`` computes active rows only, with the same
            gradients: cheaper once many tokens halt.
        compile: torch.compile the passes over the backbone and what is computed between them.
        compile_by: ``layer`` compiles one layer and uses it for all; ``pass`` compiles one graph of all layers, which
            takes minutes instead of seconds and is faster where the host is slower than the GPU (small models).
        memory_budget: with ``compile``, the share of activations kept for backward; the rest is computed again.
        gradient_checkpointing: compute each iteration again in backward instead of keeping its activations.
        keep_logits: for adaponder and ponder, keep the vocabulary's logits of every iteration for backward instead of
            computing them again: faster, the same bits, tokens x vocabulary x 2 bytes (bfloat16) more per iteration.
        parallel: ``ddp`` or ``fsdp``, when there are several processes.
        ponder_weight: the paper's lambda.
        k_max: the share of gates that the ponder loss averages, the lowest, once it is full.
        ponder_start, ponder_full: the paper's S0 and S1, the steps where stage 2 begins and where k has reached k_max.
        ponder_on: whether the ponder loss is of gate probabilities or of logits.
        ponder_scope: rank gates over all processes of a micro-step (``micro``), or in each process (``process``).
        gate_start: the first step that updates the method's own parameters; until then gates stay as they began.
            ``None``: a third into stage 1 where a ponder loss is to come, as measured (experiments/), else step 0,
            as for every method whose loss has no ponder term.
        halt_before_ponder: whether gates may halt tokens in stage 1.
        target_depth: from ponder_full on, steer ponder_weight and k towards this mean depth (``None``: do not).
        target_gain, target_every: how strongly, and after how many steps each time; see training/controller.py.
        freeze_backbone_steps: the first steps, in which the method's own parameters train alone.
        freeze_gates: whether the method's own parameters stay as the checkpoint has them (``None``: they train).
        lora_rank: train low-rank adapters of the backbone's linear maps instead of its weights (``None``: the weights).
        lora_alpha: adapters weigh ``lora_alpha / lora_rank`` (``None``: twice the rank).
        capacity_warmup: for mor, steps over which capacity shrinks from 1; for anytime, over which random halts become
            as frequent as ``model.halt_prior`` says.
        exit_stage: for ouro, its training stage; 2 trains exits alone, with ``freeze_backbone_steps`` = ``steps``.
        exit_entropy: for ouro, beta at the beginning and at the end (``None``: ``model.exit_entropy_weight`` always).
        exit_entropy_steps: the steps between which beta changes linearly; equal ones are a jump (``None``: all steps).
        seed: of the weights and of the order of the data.
        eval_every, save_every, log_every: steps between validations, checkpoints, logs (0: only at the end).
        eval_tokens: tokens of one validation.
        keep: how many checkpoints are kept.
    """

    steps: int = limited(1, STEPS, default=MISSING)
    global_batch: int = limited(1, 1_000_000, default=MISSING, because="at least one window is needed")
    micro_batch: int | None = limited(1, 1_000_000, because="at least one window is needed")
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
    freeze_gates: bool | None = None
    lora_rank: int | None = limited(1, 65_536)
    lora_alpha: float | None = limited(0, 1_000_000, above=True)
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

    def gates_begin(self, *, pressed: bool) -> int:
        """The first step that updates the method's own parameters; ``pressed``: whether its loss has a ponder term."""
        if self.gate_start is not None:
            return self.gate_start
        waits = pressed and self.ponder_weight and not self.freeze_backbone_steps
        return self.ponder_start // 3 if waits else 0

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        self._check_steps()
        self._check_objective()
        self._check_frozen()
        self._check_computing()

    def _check_steps(self) -> None:
        """Raises where two fields that count steps contradict each other."""
        for name in ("warmup", "joint_warmup"):
            warmup = getattr(self, name) or 0
            _require(
                warmup < 1 or (warmup <= self.steps and warmup == int(warmup)),
                f"{name}={warmup}: a share below 1, or whole steps up to steps={self.steps}",
            )
        _require(
            self.ponder_start <= self.ponder_full,
            f"ponder_full={self.ponder_full} lies before ponder_start={self.ponder_start}",
        )
        _require(
            not (self.gate_start and self.freeze_backbone_steps),
            f"gate_start={self.gate_start}: 0 where freeze_backbone_steps={self.freeze_backbone_steps} trains gates "
            "alone first",
        )
        _require(
            self.freeze_backbone_steps <= self.steps,
            f"freeze_backbone_steps={self.freeze_backbone_steps}: lies between 0 and steps={self.steps}",
        )

    def _check_objective(self) -> None:
        """Raises where a field of the loss needs another one that is not set."""
        _require(
            self.target_depth is None or (self.ponder_weight > 0 and self.k_max > 0),
            f"target_depth={self.target_depth}: ponder_weight and k_max above 0 are needed to steer with",
        )
        first, last = self.exit_entropy_steps or (0, 0)
        _require(first <= last, f"exit_entropy_steps=[{first}, {last}]: the second lies before the first")
        _require(
            self.exit_entropy_steps is None or self.exit_entropy is not None,
            "exit_entropy_steps: exit_entropy is missing, the two values to go between",
        )

    def _check_frozen(self) -> None:
        """Raises where what is frozen leaves nothing to train, or nothing to press on."""
        _require(
            not (self.freeze_gates and self.ponder_weight),
            f"freeze_gates with ponder_weight={self.ponder_weight}: gates that stay cannot be pressed shut; set "
            "train.ponder_weight=0",
        )
        _require(
            not (self.freeze_gates and self.freeze_backbone_steps),
            f"freeze_gates with freeze_backbone_steps={self.freeze_backbone_steps}: nothing would train",
        )
        _require(self.lora_rank is not None or self.lora_alpha is None, "lora_alpha: lora_rank is missing")
        _require(
            self.lora_rank is None or not (self.compile or self.parallel == "fsdp"),
            f"lora_rank={self.lora_rank}: not with compile or parallel=fsdp",
        )

    def _check_computing(self) -> None:
        """Raises where two ways to compute a step exclude each other."""
        _require(
            not (self.execution == "compact" and self.parallel == "fsdp"),
            "execution=compact with parallel=fsdp: a process whose tokens have all halted would leave the others "
            "waiting for its shards; use parallel=ddp",
        )
        _require(
            self.compile or self.memory_budget == 1,
            f"memory_budget={self.memory_budget}: below 1 only with compile=true",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(f"train.{message}")


@dataclass(frozen=True)
class Origin:
    """Where a value of a paper's recipe comes from.

    Attributes:
        kind: ``stated`` in the paper; ``release``, from public code or configs (PonderLM's unless the note says whose);
            ``inferred``, in neither, and the note says why this one.
        value: the value there. A test compares it with the recipe's.
    """

    kind: Literal["stated", "inferred", "release"]
    value: Any = None
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """One training run as data.

    Attributes:
        provenance: for recipes of papers, the origin of each ``section.field`` (``code.…``: of what no field can set).
    """

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
            raise ConfigError(f"train.target_depth={depth}: no token can exceed model.iterations={deepest}")
        self._check_sequence()

    def _check_sequence(self) -> None:
        """Raises where a window has more tokens than the backbone has positions, or than one validation reads."""
        sequence, backbone = self.data.sequence, self.model.backbone
        if isinstance(backbone, Mapping):
            longest = backbone.get("max_position_embeddings", sequence)
            if not isinstance(longest, int) or isinstance(longest, bool):
                raise ConfigError(f"model.backbone.max_position_embeddings={longest!r}: a whole number is needed")
            if sequence > longest:
                raise ConfigError(f"data.sequence={sequence} exceeds model.backbone.max_position_embeddings={longest}")
        if self.train.eval_tokens < sequence:
            raise ConfigError(
                f"train.eval_tokens={self.train.eval_tokens}: at least one window of data.sequence={sequence}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain data; an embedding scale left open is the one that training from scratch uses.

        So records and hashes of runs with different scales differ.
        """
        values = dataclasses.asdict(self)
        if self.model.embedding_scale is None and not isinstance(self.model.backbone, str):
            values["model"]["embedding_scale"] = scale_from_scratch(self.model.method)
        return values

    @property
    def fingerprint(self) -> str:
        """Hash of all fields that decide the result: not of name, prose, or how often the run logs and saves.

        Fields left open (``None``) are not part of it, so that adding a field does not change the hash of older runs.
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
