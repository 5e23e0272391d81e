"""Checkpoints in and out: stock decoders and PonderLM become members of the family, and back; never unchecked."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from adaponder.backbones.wrapper import relative_difference, rounding_bound
from adaponder.checkpoints.loading import (
    NOT_NEEDED,
    fetch,
    has_tokenizer,
    in_our_words,
    refuse_code,
    refuse_unsafe,
    require_exact_keys,
    require_finite,
    require_room,
    tokenizer_of,
)
from adaponder.checkpoints.manifest import verify_files, write_manifest
from adaponder.checkpoints.special_tokens import SETTINGS, TOKENIZER, align, as_ids, read_words, with_padding
from adaponder.config import AdaPonderConfig
from adaponder.devices import as_device, as_dtype
from adaponder.errors import CheckpointError, InputError
from adaponder.files import checksums_wanted, read_json, replacing_folder
from adaponder.methods.adaponder import AdaPonder
from adaponder.modeling.model import AdaPonderForCausalLM
from adaponder.policies import FixedDepth

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_PONDERLM_FLAGS = ("ponderinglm", "pondering_steps", "scale_embeds", "mutiply_pondering_steps")
# PonderLM's release carries a projection that no forward uses.
_PONDERLM_UNUSED = {"adapter.weight"}


@dataclass
class Source:
    """A checkpoint as found: what it is, its model, and the recurrence it was trained with (empty for stock)."""

    kind: str
    folder: Path
    model: PreTrainedModel
    recurrence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One comparison on the same tokens: the largest difference of logits, relative to the largest logit."""

    what: str
    difference: float
    bound: float | None = None

    @property
    def holds(self) -> bool:
        return self.bound is None or self.difference <= self.bound


@dataclass(frozen=True)
class Conversion:
    """What a conversion did. ``losses[n-1]`` is the loss at depth n on the given text, if there was one."""

    source: str
    kind: str
    out: str
    method: str
    iterations: int
    parameters: int
    added: int
    gates_open: float | None
    checks: tuple[Check, ...]
    losses: tuple[float, ...] = ()
    remarks: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def open_source(name: str, *, revision: str | None = None, dtype: str = "auto") -> Source:
    """Opens a stock, PonderLM or AdaPonder checkpoint; every key must fit."""
    precision = as_dtype(dtype)
    folder = fetch(name, revision=revision)
    refuse_unsafe(folder)
    raw = read_json(folder / "config.json")
    if raw.get("model_type") == "adaponder":
        model: Any = AdaPonderForCausalLM.from_pretrained(folder, dtype=precision)
        names = ("method", "iterations", "tau", "embedding_scale", "initial_multiplier", "expectation_top_k")
        return Source("adaponder", folder, model, {key: getattr(model.config, key) for key in names})
    if checksums_wanted():
        verify_files(folder, may_be_missing=NOT_NEEDED)
    config = _stock_config(folder)
    ponders = bool(raw.get("ponderinglm"))
    for flag in _PONDERLM_FLAGS:
        if hasattr(config, flag):
            delattr(config, flag)
    config.architectures = None
    with in_our_words(folder):
        require_room(folder, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=precision,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that all of them are listed below
        )
    model, info = loaded
    if ponders:
        info["unexpected_keys"] = set(info["unexpected_keys"]) - _PONDERLM_UNUSED
    require_exact_keys(str(folder), info)
    require_finite(str(folder), model.state_dict().items())
    model.eval()
    return Source("ponderlm", folder, model, _ponderlm(raw, config)) if ponders else Source("stock", folder, model)


def describe(name: str, *, revision: str | None = None, verify: bool | None = None) -> AdaPonderConfig:
    """The config of any checkpoint as a member of the family; no weight is read."""
    folder = fetch(name, ("*.json",), revision=revision)
    refuse_code(folder)
    if checksums_wanted() if verify is None else verify:
        verify_files(folder, only=["config.json"])
    raw = read_json(folder / "config.json")
    if raw.get("model_type") == "adaponder":
        with in_our_words(folder):
            return AdaPonderConfig.from_pretrained(folder)
    config = _stock_config(folder)
    recurrence = _ponderlm(raw, config) if raw.get("ponderinglm") else {"method": "vanilla", "embedding_scale": 1.0}
    return AdaPonderConfig(backbone_config=config, **recurrence)


def _stock_config(folder: Path) -> PreTrainedConfig:
    """The config of a decoder that is not of the family, with sizes that a model can have."""
    family = read_json(folder / "config.json").get("model_type")
    if family is not None and (not isinstance(family, str) or family not in CONFIG_MAPPING):
        raise CheckpointError(f"{folder}/config.json: model_type={family!r}: this transformers knows no such family")
    with in_our_words(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        AdaPonderConfig(backbone_config=config, method="vanilla", embedding_scale=1.0)
    return config


def _ponderlm(raw: dict[str, Any], config) -> dict[str, Any]:
    """The flags of the release, as a recurrence."""
    steps = raw.get("pondering_steps")
    if not isinstance(steps, int) or steps < 0:
        raise CheckpointError(f"config.json: pondering_steps={steps!r}, a whole number is needed")
    return {
        "method": "ponder",
        "iterations": steps + 1,
        "embedding_scale": math.sqrt(config.hidden_size) if raw.get("scale_embeds") else 1.0,
        "initial_multiplier": float(max(1, steps)) if raw.get("mutiply_pondering_steps") else 1.0,
    }


def convert(
    source: str,
    out: str | Path,
    *,
    method: str = "adaponder",
    text: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    **recurrence: Any,
) -> Conversion:
    """Converts a checkpoint, checks that it computes what its source did, and saves it with its tokenizer.

    ``method="backbone"`` gives the plain stock decoder back. Other options are fields of :class:`AdaPonderConfig`.
    Nothing is written unless every check holds.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is not empty: name a new folder")
    opened = open_source(source, revision=revision, dtype=dtype)
    if text is not None and not has_tokenizer(opened.folder):
        raise InputError(f"--text: {opened.folder} has no tokenizer to read it with")
    torch.manual_seed(seed)  # of what the method adds
    ids = _probe(opened.model.config.get_text_config().vocab_size).to(opened.model.device)
    if method == "backbone":
        converted, checks = _to_backbone(opened, ids)
    else:
        known = {key: value for key, value in recurrence.items() if value is not None}
        converted, checks = _to_family(opened, method, known, ids)
    if broken := [check for check in checks if not check.holds]:
        raise CheckpointError(
            "; ".join(f"{c.what}: differs by {c.difference:.1e}, {c.bound:.1e} allowed" for c in broken)
            + f"; nothing was written to {out}"
        )
    remarks = _save(converted, out, opened.folder)
    ours = _ours(converted)
    gates = converted.method.gates if ours and isinstance(converted.method, AdaPonder) else None
    return Conversion(
        source=source,
        kind=opened.kind,
        out=str(out),
        method=method,
        iterations=converted.config.iterations if ours else 1,
        parameters=converted.num_parameters(),
        added=sum(p.numel() for p in converted.method.parameters()) if ours else 0,
        gates_open=float(torch.sigmoid(torch.tensor(converted.config.gate_bias))) if gates else None,
        checks=tuple(checks),
        losses=loss_by_depth(converted, out, text) if ours and text else (),
        remarks=tuple(remarks),
    )


def load(
    name: str, *, revision: str | None = None, dtype: str = "auto", device: str = "cpu"
) -> tuple[AdaPonderForCausalLM, Path]:
    """Any checkpoint as a member of the family, and its folder: stock is vanilla, PonderLM is ponder."""
    place = as_device(device)
    opened = open_source(name, revision=revision, dtype=dtype)
    model = opened.model
    if not _ours(model):
        model = AdaPonderForCausalLM.from_backbone(model, **({"method": "vanilla"} | opened.recurrence))
    nn.Module.to(model, place)
    return model.eval(), opened.folder


def _to_family(
    opened: Source, method: str, recurrence: dict[str, Any], ids: Tensor
) -> tuple[AdaPonderForCausalLM, list[Check]]:
    if opened.recurrence.get("method") == method and opened.kind == "adaponder":
        raise InputError(f"--method {method}: {opened.folder} is that already")
    settings = opened.recurrence | recurrence | {"method": method}
    if method == "vanilla":
        settings["iterations"] = 1
    stock = opened.model.backbone if isinstance(opened.model, AdaPonderForCausalLM) else opened.model
    if opened.kind == "stock":
        settings.setdefault("embedding_scale", 1.0)
    model = AdaPonderForCausalLM.from_backbone(stock, **settings).eval()
    checks = []
    with torch.no_grad():
        if opened.kind == "ponderlm":
            checks += _against_ponderlm(model, stock, ids, opened.recurrence)
        else:
            one = {"max_iterations": 1} if opened.kind == "adaponder" else {}
            # Another embedding scale is another function: the difference is then told, not held against a bound.
            source_scale = opened.model.config.input_scale if _ours(opened.model) else 1.0
            same = model.config.input_scale == source_scale
            ours, theirs = model(ids, max_iterations=1).logits, opened.model(ids, **one).logits
            checks.append(_compare("one iteration equals the source", ours, theirs, bounded=same))
    return model, checks


def _against_ponderlm(
    model: AdaPonderForCausalLM, stock: PreTrainedModel, ids: Tensor, source: dict[str, Any]
) -> list[Check]:
    def released(steps: int) -> Tensor:
        scale, multiplier = source["embedding_scale"], source["initial_multiplier"]
        return plain_ponder(stock, ids, steps=steps, scale=scale, multiplier=multiplier)

    names = ("embedding_scale", "initial_multiplier")
    same = all(getattr(model.config, name) == source[name] for name in names)
    one = _compare("one iteration equals PonderLM's", model(ids, max_iterations=1).logits, released(0), bounded=same)
    if model.config.method not in ("ponder", "adaponder") or model.config.iterations != source["iterations"]:
        return [one]
    expected = released(source["iterations"] - 1)
    if not isinstance(model.method, AdaPonder):
        return [one, _compare("full depth equals PonderLM", model(ids).logits, expected, bounded=same)]
    with _gates_at(model.method, 1e4):
        wide_open = _compare("full depth with gates at 1", model(ids).logits, expected, bounded=same)
    as_is = _compare("full depth with gates as they start", model(ids).logits, expected, bounded=False)
    # The gates weight each update by s, so the distance goes with 1 - s: half as far from 1 is about half as far off.
    with _gates_at(model.method, model.config.gate_bias + math.log(2)):
        halved = relative_difference(model(ids).logits, expected)
    bound = 0.75 * as_is.difference + rounding_bound(expected.dtype) if same else None
    return [one, wide_open, as_is, Check("the same, gates half as far from 1", halved, bound)]


@torch.no_grad()
def plain_ponder(stock: PreTrainedModel, ids: Tensor, *, steps: int, scale: float, multiplier: float) -> Tensor:
    """PonderLM as released, on the stock decoder alone: no wrapper, no cache, the whole vocabulary at once."""
    table = stock.get_input_embeddings()(torch.arange(stock.config.vocab_size, device=ids.device)) * scale
    embedding = table[ids] * multiplier
    for _ in range(steps):
        logits = stock(inputs_embeds=embedding, use_cache=False).logits
        embedding = embedding + torch.softmax(logits.float(), -1).to(table.dtype) @ table
    return stock(inputs_embeds=embedding, use_cache=False).logits


@contextmanager
def _gates_at(method: AdaPonder, logit: float) -> Iterator[None]:
    """Every gate says ``sigmoid(logit)`` of every token inside, and is itself again outside."""
    kept = [(gate.out, gate.out.weight.clone(), gate.out.bias.clone()) for gate in method.gates]
    try:
        for linear, _, _ in kept:
            linear.weight.zero_()
            linear.bias.fill_(logit)
        yield
    finally:
        for linear, weight, bias in kept:
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)


def _to_backbone(opened: Source, ids: Tensor) -> tuple[PreTrainedModel, list[Check]]:
    model = opened.model
    if not _ours(model):
        raise InputError(f"--method backbone: {opened.folder} is a {opened.kind} checkpoint already without a method")
    with torch.no_grad():
        expected = model(ids, max_iterations=1).logits
        scale = model.config.input_scale
        if scale != 1.0:
            if model.backbone.config.tie_word_embeddings:
                raise InputError(
                    f"--method backbone: embedding_scale * initial_multiplier = {scale:g} would have to go into the "
                    "embedding table, which this backbone shares with its head"
                )
            model.get_input_embeddings().weight.mul_(scale)
        got = model.backbone(ids).logits
    plain = model.backbone.config
    if getattr(plain, "pad_token_id", None) in as_ids(getattr(plain, "eos_token_id", None)):
        plain.pad_token_id = None  # a stock decoder would give the end token's embedding no gradient
    return model.backbone, [_compare("the plain backbone equals one iteration", got, expected)]


def _ours(model: PreTrainedModel) -> TypeGuard[AdaPonderForCausalLM]:
    return isinstance(model, AdaPonderForCausalLM)


def _probe(vocabulary: int) -> Tensor:
    """Tokens to compare on: random, the same every time."""
    return torch.randint(vocabulary, (2, 24), generator=torch.Generator().manual_seed(0), device="cpu")


def _compare(what: str, ours: Tensor, theirs: Tensor, *, bounded: bool = True) -> Check:
    return Check(what, relative_difference(ours, theirs), rounding_bound(theirs.dtype) if bounded else None)


@torch.no_grad()
def loss_by_depth(model: AdaPonderForCausalLM, folder: Path, text: str) -> tuple[float, ...]:
    """The loss on ``text`` when every token is read once, twice, … K times."""
    ids = tokenizer_of(str(folder))(text, return_tensors="pt").input_ids
    limit = model.config.max_position_embeddings or ids.shape[1]
    ids = ids[:, :limit].to(model.device)
    if ids.shape[1] < 2:
        raise InputError("--text: at least two tokens are needed to predict one")
    depths = range(1, model.config.iterations + 1)
    if model.method.halts:
        return tuple(float(model(ids, labels=ids, policy=FixedDepth(depth)).loss) for depth in depths)
    return tuple(float(model(ids, labels=ids, max_iterations=depth).loss) for depth in depths)


def _save(model: PreTrainedModel, out: Path, source: Path) -> list[str]:
    """Writes beside the target and renames: an interrupted conversion leaves no folder that looks whole.

    Returns what had to change so that config, generation config and tokenizer agree.
    """
    remarks = []
    with replacing_folder(out, out.with_name(out.name + ".partial")) as partial:
        if _ours(model) and (words := read_words(source)) is not None and words.end is not None:
            remarks = align(model, words.end, words.padding)
        without_manifest: dict[str, Any] = {"manifest": False} if _ours(model) else {}  # it is written below
        model.save_pretrained(partial, **without_manifest)
        for name in _TOKENIZER:
            if (source / name).is_file():
                shutil.copy(source / name, partial / name)
        if _ours(model):
            texts = {name: partial / name for name in (TOKENIZER, SETTINGS) if (partial / name).is_file()}
            files = {name: path.read_text(encoding="utf-8") for name, path in texts.items()}
            for name, content in with_padding(files, model).items():
                (partial / name).write_text(content, encoding="utf-8")
        write_manifest(partial)
    return remarks
