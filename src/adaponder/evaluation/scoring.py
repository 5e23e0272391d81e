"""Scores every prediction of a text once, with any checkpoint and any policy; long scorings can be resumed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adaponder.backbones.shape import Shape
from adaponder.errors import EvaluationError, InputError
from adaponder.evaluation.meter import Meter, Spent
from adaponder.evaluation.text import Text, WindowBatch, Windows
from adaponder.journal import Journal
from adaponder.methods import Iteration
from adaponder.methods.cost import Cost
from adaponder.modeling import AdaPonderForCausalLM, PolicyLike
from adaponder.ops.precision import widened
from adaponder.policies import ForcedDepths

# Bounds the float32 copy of logits: about 200 MB.
_CHUNK = 50_000_000


@dataclass(frozen=True)
class ScoringOptions:
    """Settings of a scoring: policy, maximum iterations, and execution (``None``: the model's own).

    ``depths`` (one per prediction of the text) forces the depth of each token instead of a policy.
    """

    policy: PolicyLike | None = None
    max_iterations: int | None = None
    execution: str | None = None
    seed: int = 0
    depths: np.ndarray | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns keyword arguments of the model's ``forward``, without ``depths``."""
        return {"max_iterations": self.max_iterations, "execution": self.execution, "seed": self.seed} | (
            {} if self.policy is None else {"policy": self.policy}
        )


OWN = ScoringOptions()


@dataclass(frozen=True)
class Scores:
    """Scores with one entry per prediction of the text, in its order.

    Attributes:
        nll: ``float64[n]``, nats.
        depth: ``int64[n]``: iterations of the token that predicts.
        spent: cost of the forwards per scored token, including context that sliding windows repeat.
        gates: ``float32[n, gates]`` with ``detail``: the gates' probabilities, of halted tokens too.
        nll_by_iteration: ``float64[n, passes]`` with ``detail``: the loss after each iteration.
        entropy: ``float32[n, passes]`` with ``detail``: of the next-token distribution, nats.
        counted: ``bool[n]``: predictions included in the mean loss; ``None``: all.
    """

    nll: np.ndarray
    depth: np.ndarray
    spent: Spent
    gates: np.ndarray | None = None
    nll_by_iteration: np.ndarray | None = None
    entropy: np.ndarray | None = None
    counted: np.ndarray | None = None

    @property
    def loss(self) -> float:
        return float((self.nll if self.counted is None else self.nll[self.counted]).mean())


def default_length(model: AdaPonderForCausalLM) -> int:
    """Returns the number of positions of the backbone, at most 2,048; pause tokens share their token's position."""
    return min(2048, model.config.max_position_embeddings or 2048)


@torch.inference_mode()
def score(
    model: AdaPonderForCausalLM,
    text: Text,
    windows: Windows,
    *,
    how: ScoringOptions = OWN,
    batch_size: int = 8,
    detail: bool = False,
    shape: Shape | None = None,
    advance: Callable[[int], None] = lambda predictions: None,
) -> Scores:
    """Scores ``text`` window by window. ``detail`` collects gates, and losses and entropies of every iteration.

    ``shape`` is the backbone's, passed by callers that score repeatedly. ``advance`` is called with the number of
    predictions of each batch, for progress bars.
    """
    if batch_size < 1:
        raise InputError(f"--batch-size {batch_size} must be at least 1")
    check_fits(model, text, windows)
    nll = np.zeros(text.predictions)
    depth = np.zeros(text.predictions, np.int64)
    extra: dict[str, np.ndarray] = {}
    scored, dense = 0, how.execution == "dense"
    meter = Meter(model.config, dtype=model.dtype, device=model.device, shape=shape)
    training = model.training
    model.eval()
    try:
        for batch in windows.batches(text, batch_size):
            index = _prediction_index(batch)[batch.fresh]
            passes: list[dict[str, Tensor]] = []
            targets = batch.targets.to(model.device)
            watch = _watcher(model, targets, passes) if detail else None
            with meter:
                output = _forward(model, batch, how, detail, watch)
            meter.add(
                output.depth, max_iterations=how.max_iterations, every_gate=detail, dense=dense, policy=how.policy
            )
            nll[index] = _nll(output.logits, targets).cpu().numpy()[batch.fresh]
            depth[index] = output.depth.cpu().numpy()[batch.fresh]
            if detail:
                _collect(extra, index, batch, passes, output.gates, text.predictions)
            scored += len(index)
            advance(len(index))
    finally:
        model.train(training)
    if not np.isfinite(nll).all():
        raise EvaluationError(
            f"the loss of prediction {int(np.argmax(~np.isfinite(nll)))} is not finite: the model overflows in "
            f"{str(model.dtype).removeprefix('torch.')}; try --dtype float32"
        )
    return Scores(nll, depth, meter.spent(scored), counted=text.learned, **extra)


class SummedLoss(NamedTuple):
    """Sum of the losses of a batch in float64, number of its predictions, and every token's depth."""

    nll: Tensor
    predictions: Tensor
    depth: Tensor


@torch.no_grad()
def score_sum(model: AdaPonderForCausalLM, input_ids: Tensor, targets: Tensor, **arguments: Any) -> SummedLoss:
    """Equals the sum of :func:`score`'s losses over targets that are not -100, but never holds all logits.

    The model must be in evaluation mode; ``arguments`` are further ones of its ``forward``.
    """
    arguments |= {"num_items_in_batch": 1, "output_logits": False, "output_gates": False}
    output = model(input_ids, targets=targets, **arguments)
    return SummedLoss(output.loss.double(), (targets != -100).sum(), output.depth)


def check_fits(model: AdaPonderForCausalLM, text: Text, windows: Windows) -> None:
    """Raises for windows longer than the backbone's positions, and for ids outside its embedding table."""
    limit = model.config.max_position_embeddings
    if limit is not None and windows.length > limit:
        raise InputError(f"--window {windows.length} must be at most {limit}, the positions of the backbone")
    highest = int(text.stream.max())
    if highest >= model.config.vocab_size:
        raise InputError(
            f"token id {highest} is outside the model's vocabulary of {model.config.vocab_size}: "
            "this is not the checkpoint's tokenizer; pass the right one with --tokenizer"
        )


def _forward(
    model: AdaPonderForCausalLM,
    batch: WindowBatch,
    how: ScoringOptions,
    detail: bool,
    watch: Callable[[Iteration], None] | None,
) -> Any:
    arguments: dict[str, Any] = how.arguments() | {"output_gates": detail, "on_iteration": watch}
    if batch.documents is not None:
        arguments["document_ids"] = batch.documents.to(model.device)
    if how.depths is not None:
        arguments["policy"] = ForcedDepths(torch.from_numpy(how.depths[_prediction_index(batch)]))
    return model(batch.input_ids.to(model.device), **arguments)


def _prediction_index(batch: WindowBatch) -> np.ndarray:
    """Returns ``int64[windows, length]``: the index of each entry of the batch among the text's predictions."""
    return batch.first[:, None] + np.arange(batch.input_ids.shape[1])


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns per-token losses in float64, computed in chunks: no float32 copy of all logits is made."""
    flat_logits, flat_targets = logits.flatten(0, 1), targets.flatten()
    size = max(1, _CHUNK // flat_logits.shape[-1])
    parts = [
        nn.functional.cross_entropy(widened(flat_logits[i : i + size]), flat_targets[i : i + size], reduction="none")
        for i in range(0, len(flat_logits), size)
    ]
    return torch.cat(parts).double().view(targets.shape)


def _entropy(logits: Tensor) -> Tensor:
    """Returns the entropy of the next-token distribution of each token, in nats."""
    flat = logits.flatten(0, -2)
    size = max(1, _CHUNK // flat.shape[-1])
    parts = []
    for i in range(0, len(flat), size):
        log_p = torch.log_softmax(widened(flat[i : i + size]), dim=-1)
        parts.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(parts).view(logits.shape[:-1])


def _watcher(model: AdaPonderForCausalLM, targets: Tensor, passes: list[dict[str, Tensor]]) -> Any:
    """Returns a hook that appends losses and entropies after each iteration; logits are not stored."""

    def watch(iteration: Iteration) -> None:
        logits = model.wrapped.logits(iteration.hidden)
        passes.append({"nll_by_iteration": _nll(logits, targets), "entropy": _entropy(logits).float()})

    return watch


def _collect(
    extra: dict[str, np.ndarray],
    index: np.ndarray,
    batch: WindowBatch,
    passes: list[dict[str, Tensor]],
    gates: Tensor | None,
    predictions: int,
) -> None:
    """Writes the batch's fresh predictions into ``extra``, whose arrays have an entry per prediction of the text."""
    details = {name: torch.stack([values[name] for values in passes], dim=-1) for name in passes[0]}
    if gates is not None:
        details["gates"] = gates.float()
    for name, value in details.items():
        array = value.cpu().numpy()
        if name not in extra:
            extra[name] = np.zeros((predictions, array.shape[-1]), array.dtype)
        extra[name][index] = array[batch.fresh]


def fingerprint(model: AdaPonderForCausalLM, text: Text) -> str:
    """Returns the SHA-256 of the model's config and weights and of the text's tokens and learned mask."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for array in (text.stream, text.starts, *(() if text.learned is None else (text.learned,))):
        digest.update(array.tobytes())
    return digest.hexdigest()


# Batches per portion: enough that saving costs little beside scoring.
BATCHES = 32
_OPTIONAL = ("gates", "nll_by_iteration", "entropy")


def portions(windows: Windows, predictions: int, batch_size: int) -> list[Windows]:
    """Splits the windows round robin into portions of at most :data:`BATCHES` batches."""
    count = max(1, math.ceil(len(windows.starts(predictions)) / (max(1, batch_size) * BATCHES)))
    return [replace(windows, every=count, offset=offset) for offset in range(count)]


def score_portions(
    model: AdaPonderForCausalLM,
    text: Text,
    windows: Windows,
    *,
    how: ScoringOptions,
    name: str,
    batch_size: int,
    journal: Journal | None = None,
    advance: Callable[[int], None] = lambda predictions: None,
) -> Scores:
    """Equals ``score(..., detail=True)``, but skips portions that ``journal`` holds and saves the others there."""
    whole: dict[str, np.ndarray] = {}
    spent: list[Spent] = []
    for part in portions(windows, text.predictions, batch_size):
        chosen = part.scored(text.predictions)
        key = f"{name}, portion {part.offset + 1} of {part.every}"
        saved = None if journal is None else journal.load(key)
        if saved is not None:
            arrays, cost = saved.arrays, _spent(saved.facts)
            advance(int(chosen.sum()))
        else:
            scores = score(model, text, part, how=how, batch_size=batch_size, detail=True, advance=advance)
            arrays, cost = _arrays(scores, chosen), scores.spent
            if journal is not None:
                journal.save(key, asdict(cost), arrays)
        for field, values in arrays.items():
            target = whole.setdefault(field, np.zeros((text.predictions, *values.shape[1:]), values.dtype))
            target[chosen] = values
        spent.append(cost)
    return Scores(**whole, spent=reduce(_sum, spent))


def _arrays(scores: Scores, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays of ``scores`` at the chosen predictions."""
    arrays = {name: getattr(scores, name) for name in ("nll", "depth", *_OPTIONAL)}
    return {name: values[chosen] for name, values in arrays.items() if values is not None}


def _spent(facts: dict) -> Spent:
    """The inverse of ``dataclasses.asdict``."""
    return Spent(**(facts | {"cost": Cost(**facts["cost"]), "histogram": tuple(facts["histogram"])}))


def _sum(left: Spent, right: Spent) -> Spent:
    """Adds the costs of two portions of one scoring."""
    assert left.scored is not None  # score() sets it
    assert right.scored is not None
    return replace(
        left,
        cost=left.cost + right.cost,
        histogram=tuple(a + b for a, b in zip(left.histogram, right.histogram, strict=True)),
        seconds=left.seconds + right.seconds,
        deepest=max(left.deepest, right.deepest),
        scored=left.scored + right.scored,
    )
