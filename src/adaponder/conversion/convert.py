"""Converts stock decoders and published looped models to our methods and back; checks the result before writing it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaponder.checkpoints.loading import has_tokenizer, tokenizer_of
from adaponder.checkpoints.manifest import saving, write_manifest
from adaponder.checkpoints.special_tokens import SETTINGS, TOKENIZER, align, as_ids, read_special_tokens, with_padding
from adaponder.conversion.checks import (
    Check,
    compare,
    compare_with_loops,
    compare_with_ponderlm,
    probe_ids,
    require_checks,
)
from adaponder.conversion.open import OpenedCheckpoint, is_ours, open_checkpoint
from adaponder.errors import InputError
from adaponder.methods.adaponder import AdaPonder
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import FixedDepth
from adaponder.registry import DEFAULT_METHOD

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        kind: the source's method if the source is one of our models, else the ``kind`` of :class:`OpenedCheckpoint`.
        method: the method of the result, or ``backbone`` for a plain stock decoder.
        parameters: number of parameters of the result.
        added: number of parameters that the method adds to the backbone.
        gates_open: initial probability of continuing; ``None`` without gates.
        losses: ``losses[n-1]`` is the loss at depth n on the given text; empty without a text.
        remarks: descriptions of changes made so that configs and tokenizer agree.
    """

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


def convert(
    source: str,
    out: str | Path,
    *,
    method: str | None = None,
    text: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    **recurrence: Any,
) -> Conversion:
    """Converts a checkpoint, checks that it computes what its source computes, and saves it with its tokenizer.

    ``method="backbone"`` saves the plain stock decoder. ``method=None`` keeps the method of a published looped model
    and means ``adaponder`` for any other source. ``text`` is a text on which the loss at each depth is measured.
    ``recurrence`` are fields of :class:`AdaPonderConfig`. Nothing is written unless every check holds.
    """
    out = Path(out)
    require_empty(out)
    settings = {key: value for key, value in recurrence.items() if value is not None}
    if method == "backbone" and (unused := [*settings, *(["text"] if text is not None else [])]):
        raise InputError(f"--{unused[0].replace('_', '-')} has no effect with --method backbone; leave it out")
    opened = open_checkpoint(source, revision=revision, dtype=dtype)
    if method is None:
        method = str(opened.recurrence["method"]) if opened.loops else DEFAULT_METHOD
    text_ids = None if text is None else _tokens_of(text, opened.folder)
    torch.manual_seed(seed)  # for the parameters that the method adds
    ids = probe_ids(opened.model.config.get_text_config().vocab_size).to(opened.model.device)
    if method == "backbone":
        converted, checks = _to_backbone(opened, ids)
    else:
        converted, checks = _to_family(opened, method, settings, ids)
    require_checks(checks, out)
    remarks = _save(converted, out, opened.folder)
    kind = opened.recurrence["method"] if is_ours(opened.model) else opened.kind
    summary = Conversion(source, kind, str(out), method, 1, converted.num_parameters(), 0, None, tuple(checks))
    if not is_ours(converted):
        return summary
    has_gates = isinstance(converted.method, AdaPonder) and bool(converted.method.gates)
    return replace(
        summary,
        iterations=converted.config.iterations,
        added=sum(parameter.numel() for parameter in converted.method.parameters()),
        gates_open=float(torch.sigmoid(torch.tensor(converted.config.gate_bias))) if has_gates else None,
        losses=() if text_ids is None else loss_by_depth(converted, text_ids),
        remarks=tuple(remarks),
    )


def require_empty(out: Path) -> None:
    """Raises unless ``out`` does not exist or is an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is not empty: name a new folder")


def _to_family(
    opened: OpenedCheckpoint, method: str, recurrence: dict[str, Any], ids: Tensor
) -> tuple[AdaPonderForCausalLM, list[Check]]:
    """Returns the checkpoint's backbone wrapped with ``method``, and the checks against the source."""
    if opened.recurrence.get("method") == method and opened.kind == "adaponder":
        trained, iterations = opened.recurrence["iterations"], recurrence.get("iterations")
        if iterations in (None, trained):
            raise InputError(f"--method {method}: {opened.folder} has this method already")
        raise InputError(
            f"--iterations {iterations}: K = {trained} of {opened.folder} is fixed by training; to lower it at run "
            "time, use --max-iterations of generate, eval and analyze"
        )
    model = opened.wrapped(**recurrence, method=method).eval()
    with torch.no_grad():
        if opened.kind == "ponderlm":
            return model, compare_with_ponderlm(model, model.backbone, ids, opened.recurrence)
        if opened.loops:
            return model, compare_with_loops(model, model.backbone, ids, opened.recurrence, opened.parameters)
        options, source_scale = {}, 1.0
        if is_ours(opened.model):
            options, source_scale = {"max_iterations": 1}, opened.model.config.input_scale
        ours, theirs = model(ids, max_iterations=1).logits, opened.model(ids, **options).logits
    # A different embedding scale gives a different function: the difference is reported without a bound.
    same = model.config.input_scale == source_scale
    return model, [compare("one iteration equals the source", ours, theirs, bounded=same)]


def _to_backbone(opened: OpenedCheckpoint, ids: Tensor) -> tuple[PreTrainedModel, list[Check]]:
    """Returns the stock decoder inside one of our models, and a check of its logits on ``ids`` against one iteration.

    Multiplies the embedding scale into the decoder's input embedding, in place.
    """
    model = opened.model
    if not is_ours(model):
        raise InputError(f"--method backbone: {opened.folder} is a {opened.kind} checkpoint, without a method of ours")
    with torch.no_grad():
        expected = model(ids, max_iterations=1).logits
        if (scale := model.config.input_scale) != 1.0 and model.backbone.config.tie_word_embeddings:
            raise InputError(
                f"--method backbone: embedding_scale * initial_multiplier = {scale:g} would have to go into the "
                "embedding table, which this backbone shares with its head"
            )
        model.get_input_embeddings().weight.mul_(scale)
        plain_logits = model.backbone(ids).logits
    config = model.backbone.config
    if getattr(config, "pad_token_id", None) in as_ids(getattr(config, "eos_token_id", None)):
        config.pad_token_id = None  # a stock decoder would give the end token's embedding no gradient
    return model.backbone, [compare("the plain backbone equals one iteration", plain_logits, expected)]


def _tokens_of(text: str, folder: Path) -> Tensor:
    """Tokenizes a text with the checkpoint's tokenizer, ``int64[1, tokens]``; raises for fewer than two tokens."""
    if not has_tokenizer(folder):
        raise InputError(f"--text: {folder} has no tokenizer to encode it with")
    ids = tokenizer_of(str(folder))(text, return_tensors="pt").input_ids
    if ids.shape[1] < 2:
        raise InputError("--text: at least two tokens are needed to predict one")
    return ids


@torch.no_grad()
def loss_by_depth(model: AdaPonderForCausalLM, ids: Tensor) -> tuple[float, ...]:
    """Returns K mean losses on ``ids [1, tokens]``: with all tokens at depth 1, with all at depth 2, … K."""
    ids = ids[:, : model.config.max_position_embeddings or ids.shape[1]].to(model.device)
    depths = range(1, model.config.iterations + 1)
    if model.method.halts:
        return tuple(float(model(ids, labels=ids, policy=FixedDepth(depth)).loss) for depth in depths)
    return tuple(float(model(ids, labels=ids, max_iterations=depth).loss) for depth in depths)


def _save(model: PreTrainedModel, out: Path, source: Path) -> list[str]:
    """Writes model and tokenizer to ``out``; an interrupted conversion leaves no folder that looks complete.

    Returns a description of each change made so that config, generation config and tokenizer agree.
    """
    remarks = []
    with saving(out, intact="nothing was written") as partial:
        if is_ours(model) and (tokens := read_special_tokens(source)) is not None and tokens.end is not None:
            remarks = align(model, tokens.end, tokens.padding)
        without_manifest: dict[str, Any] = {"manifest": False} if is_ours(model) else {}  # the manifest is written last
        model.save_pretrained(partial, **without_manifest)
        copy_tokenizer(source, partial, model if is_ours(model) else None)
        write_manifest(partial)
    return remarks


def copy_tokenizer(source: Path, folder: Path, model: PreTrainedModel | None) -> None:
    """Copies the tokenizer's files; if a ``model`` is given, adds padding settings that the files lack."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if model is None:
        return
    paths = {name: folder / name for name in (TOKENIZER, SETTINGS) if (folder / name).is_file()}
    files = {name: path.read_bytes().decode("utf-8") for name, path in paths.items()}
    for name, content in with_padding(files, model).items():
        (folder / name).write_bytes(content.encode("utf-8"))
