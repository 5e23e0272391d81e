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

# What says nothing of what is computed: no part of the hash, and free to change when a run is resumed.
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
        """What the recipe says of the recurrence, as arguments of the config; what it leaves open is not there."""
        said = {item.name: getattr(self, item.name) for item in fields(OpenRecurrence)}
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
        self._check_steps()
        self._check_objective()
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
    provenance: Mapping[str, Origin] = field(default_factory=dict)

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
