"""Scores every prediction of a text once, with any checkpoint and any policy; long scorings can be resumed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
from adaponder.modeling import AdaPonderForCausalLM, PolicyLike
from adaponder.ops.precision import widened
from adaponder.policies import FixedDepth, ForcedDepths, LearnedGate
from adaponder.policies.measures import entropy_of, in_chunks
from adaponder.terminal import counted


@dataclass(frozen=True)
class ScoringOptions:
    """Options for scoring a text; ``None`` means the model's default.

    ``depths`` (one per prediction) forces the depth of each token; ``policy`` is then ignored.
    """

    policy: PolicyLike | None = None
    max_iterations: int | None = None
    execution: str | None = None
    seed: int = 0
    depths: np.ndarray | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns keyword arguments for the model's ``forward``, without ``depths``."""
        return {"max_iterations": self.max_iterations, "execution": self.execution, "seed": self.seed} | (
            {} if self.policy is None else {"policy": self.policy}
        )


OWN = ScoringOptions()


def at_depth(model: AdaPonderForCausalLM, depth: int) -> dict[str, Any]:
    """Returns arguments of the model's ``forward`` that give every token this depth."""
    return {"policy": FixedDepth(depth)} if model.method.halts else {"max_iterations": depth}


@dataclass(frozen=True)
class Scores:
    """The scores of a text: arrays with one entry per prediction, in text order.

    Arrays marked (``detail``) are ``None`` unless scored with ``detail=True``. ``passes`` is K, or 1 for methods that
    do all iterations in one backbone pass.

    Attributes:
        nll: ``float64[n]``, the loss in nats.
        depth: ``int64[n]``, the depth of the input token at each prediction.
        spent: cost of the forwards, including context that sliding windows repeat.
        gates: ``float32[n, gates]``, the gates' probabilities, also of halted tokens (``detail``).
        nll_by_iteration: ``float64[n, passes]``, the loss after each iteration (``detail``).
        entropy: ``float32[n, passes]``, entropy of the next-token distribution in nats (``detail``).
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

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that are not ``None``, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def at(self, predictions: np.ndarray) -> Scores:
        """Selects the scores where ``predictions``, ``bool[n]``, is true; ``spent`` stays the cost of all n."""
        return replace(self, **{name: array[predictions] for name, array in self.arrays.items()})


def default_length(model: AdaPonderForCausalLM) -> int:
    """Returns the default window length: the backbone's number of positions, at most 2,048."""
    return min(2048, model.config.max_position_embeddings or 2048)


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
    """Scores ``text`` window by window; ``detail`` also returns gates, and loss and entropy after every iteration.

    Predictions that ``windows`` do not score get 0. Callers that score repeatedly pass the backbone's ``shape``, to
    compute it once. ``advance`` is called with the number of predictions of each batch, for progress bars.
    """
    if batch_size < 1:
        raise InputError(f"--batch-size {batch_size} must be at least 1")
    check_fits(model, text, windows)
    arrays: dict[str, np.ndarray] = {}
    scored = 0
    meter = Meter(model.config, dtype=model.dtype, device=model.device, shape=shape)
    training = model.training
    model.eval()
    try:
        for batch in windows.batches(text, batch_size):
            predictions = batch.index[batch.fresh]
            for name, value in _score_batch(model, batch, how, detail, meter).items():
                values = value.cpu().numpy()[batch.fresh]
                _array_of_text(arrays, name, values, text)[predictions] = values
            scored += len(predictions)
            advance(len(predictions))
    finally:
        model.train(training)
    finite = np.isfinite(arrays["nll"])
    if not finite.all():
        raise EvaluationError(
            f"the loss of prediction {int(np.argmin(finite))} is not finite: the model overflows in "
            f"{str(model.dtype).removeprefix('torch.')}; try --dtype float32"
        )
    return Scores(**arrays, spent=meter.spent(scored), counted=text.learned)


@torch.inference_mode()
def _score_batch(
    model: AdaPonderForCausalLM, batch: WindowBatch, how: ScoringOptions, detail: bool, meter: Meter
) -> dict[str, Tensor]:
    """Returns the arrays of :class:`Scores` for one batch, each ``[windows, length, …]``."""
    targets = batch.targets.to(model.device)
    passes: list[dict[str, Tensor]] = []

    def record(iteration: Iteration) -> None:
        logits = model.wrapped.logits(iteration.hidden)
        entropy = in_chunks(lambda rows: entropy_of(widened(rows)), logits)
        passes.append({"nll_by_iteration": _nll(logits, targets), "entropy": entropy.float()})

    arguments: dict[str, Any] = how.arguments() | {"output_gates": detail, "on_iteration": record if detail else None}
    if batch.documents is not None:
        arguments["document_ids"] = batch.documents.to(model.device)
    if how.depths is not None:
        arguments["policy"] = ForcedDepths(torch.from_numpy(how.depths[batch.index]))
    with meter:
        output = model(batch.input_ids.to(model.device), **arguments)
    dense = how.execution == "dense"
    meter.add(output.depth, max_iterations=how.max_iterations, every_gate=detail, dense=dense, policy=how.policy)
    values = {"nll": _nll(output.logits, targets), "depth": output.depth}
    if detail:
        values |= {name: torch.stack([values_of_pass[name] for values_of_pass in passes], dim=-1) for name in passes[0]}
        if output.gates is not None:
            values["gates"] = output.gates.float()
    return values


def _array_of_text(arrays: dict[str, np.ndarray], name: str, values: np.ndarray, text: Text) -> np.ndarray:
    """Returns ``arrays[name]``, with one entry per prediction of the text; creates it as zeros if it is missing."""
    return arrays.setdefault(name, np.zeros((text.predictions, *values.shape[1:]), values.dtype))


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns per-token losses in float64; computes them in chunks, so that no float32 copy of all logits exists."""

    def losses(rows: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(widened(rows), ids[:, 0], reduction="none")

    return in_chunks(losses, logits, targets[..., None]).double()


class SummedLoss(NamedTuple):
    """The sum of a batch's losses (float64), the number of losses in the sum, and the depth of every token."""

    nll: Tensor
    predictions: Tensor
    depth: Tensor


@torch.no_grad()
def score_sum(model: AdaPonderForCausalLM, input_ids: Tensor, targets: Tensor, **arguments: Any) -> SummedLoss:
    """Returns the sum of the losses over targets that are not -100, without holding all logits in memory at once.

    The model must be in evaluation mode; ``arguments`` are passed on to its ``forward``.
    """
    arguments |= {"num_items_in_batch": 1, "output_logits": False, "output_gates": False}
    output = model(input_ids, targets=targets, **arguments)
    return SummedLoss(output.loss.double(), (targets != -100).sum(), output.depth)


def check_fits(model: AdaPonderForCausalLM, text: Text, windows: Windows) -> None:
    """Raises if windows are longer than the backbone's positions, or ids are outside its embedding table."""
    limit = model.config.max_position_embeddings
    if limit is not None and windows.length > limit:
        raise InputError(f"--window {windows.length} must be at most {limit}, the positions of the backbone")
    highest = int(text.stream.max())
    if highest >= model.config.vocab_size:
        raise InputError(
            f"token id {highest} is outside the model's vocabulary of {model.config.vocab_size}: "
            "this is not the checkpoint's tokenizer; pass the right one with --tokenizer"
        )


def fingerprint(model: AdaPonderForCausalLM, text: Text) -> str:
    """Returns the SHA-256 of the model's config and weights and of the text's tokens and learned mask."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for array in (text.stream, text.starts, *(() if text.learned is None else (text.learned,))):
        digest.update(array.tobytes())
    return digest.hexdigest()


# Batches scored between two saves; at this number, saving takes little time compared to scoring.
BATCHES = 32


def portions(windows: Windows, predictions: int, batch_size: int) -> list[Windows]:
    """Splits the windows of a text round robin into portions of at most :data:`BATCHES` batches."""
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
    """Equals ``score(..., detail=True)``, but loads portions that are in ``journal``, and saves the others to it."""
    arrays_of_text: dict[str, np.ndarray] = {}
    spent: list[Spent] = []
    for portion in portions(windows, text.predictions, batch_size):
        predictions = portion.scored(text.predictions)
        key = f"{name}, portion {portion.offset + 1} of {portion.every}"
        saved = None if journal is None else journal.load(key)
        if saved is None:
            scores = score(model, text, portion, how=how, batch_size=batch_size, detail=True, advance=advance)
            arrays, cost = scores.at(predictions).arrays, scores.spent
            if journal is not None:
                journal.save(key, asdict(cost), arrays)
        else:
            arrays, cost = saved.arrays, Spent.from_dict(saved.facts)
            advance(int(predictions.sum()))
        spent.append(cost)
        for field, values in arrays.items():
            _array_of_text(arrays_of_text, field, values, text)[predictions] = values
    return Scores(**arrays_of_text, spent=sum(spent[1:], spent[0]))


# The two executions round differently, so a gate that nearly equals its threshold may be above it in only one of them.
# Such flips are counted, and allowed only if the gate is no further from the threshold than the measured gate noise.

# Allowed difference of mean losses by precision; lower precisions allow 1e-2, because single flips change the loss.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Agreement:
    """The differences between dense and compact execution on the same predictions.

    Attributes:
        loss_difference: absolute difference of the two mean losses; at most ``tolerance`` is allowed.
        worst: largest loss difference of a single prediction, among those with equal depth.
        flips: number of predictions whose depths differ.
        unexplained: number of flips at which the gate was further from its threshold than ``gate_noise``; ``None`` for
            policies other than the learned gate.
        gate_noise: largest gate difference, leaving out flipped predictions and all later ones in the same window.
    """

    tokens: int
    loss_difference: float
    worst: float
    flips: int
    unexplained: int | None
    gate_noise: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.loss_difference <= self.tolerance and not self.unexplained

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}

    def __str__(self) -> str:
        verdict = "agree" if self.holds else "DISAGREE"
        tokens = counted(self.tokens, "token")
        depths = f"{counted(self.flips, 'depth')} flipped" if self.flips else "every depth the same"
        if self.flips and self.unexplained is not None:
            depths += f" ({self.unexplained} not at a near tie)"
        return f"dense and skipping {verdict}: loss differs by {self.loss_difference:.1e} on {tokens}, {depths}"


def agreement(
    model: AdaPonderForCausalLM, text: Text, windows: Windows, *, how: ScoringOptions = OWN, batch_size: int = 8
) -> Agreement:
    """Compares the scores of ``text`` in dense and in compact execution."""
    dense, compact = (
        score(model, text, windows, how=replace(how, execution=execution), batch_size=batch_size, detail=True)
        for execution in ("dense", "compact")
    )
    flipped = dense.depth != compact.depth
    noise, unexplained = 0.0, None
    if dense.gates is not None and compact.gates is not None:
        noise = float(np.abs(dense.gates - compact.gates)[_untouched(flipped, windows)].max(initial=0.0))
        if (taus := gate_thresholds(model, how.policy, dense.gates.shape[1])) is not None:
            # The gate that decided differently is the one after the smaller depth.
            gate = np.minimum(dense.depth, compact.depth)[flipped] - 1
            rows, thresholds = np.nonzero(flipped)[0], np.array(taus)[gate]
            distances = [np.abs(gates[rows, gate] - thresholds) for gates in (dense.gates, compact.gates)]
            margin = np.minimum(*distances)
            unexplained = int((margin > noise + np.finfo(np.float32).eps).sum())
    return Agreement(
        tokens=text.predictions,
        loss_difference=abs(float(dense.nll.mean() - compact.nll.mean())),
        worst=float(np.abs(dense.nll - compact.nll)[~flipped].max(initial=0.0)),
        flips=int(flipped.sum()),
        unexplained=unexplained,
        gate_noise=noise,
        tolerance=_TOLERANCE.get(model.dtype, 1e-2),
    )


def _untouched(flipped: np.ndarray, windows: Windows) -> np.ndarray:
    """Returns ``bool[predictions]``: false for each flipped prediction and for later ones that can share its window."""
    index = np.arange(len(flipped))
    latest = np.maximum.accumulate(np.where(flipped, index, -1))
    start = index // windows.length * windows.length if windows.stride is None else index - windows.length + 1
    return latest < start


def gate_thresholds(model: AdaPonderForCausalLM, policy: PolicyLike | None, gates: int) -> tuple[float, ...] | None:
    """Returns the threshold of each gate; ``None`` for policies other than the learned gate."""
    policy = policy if policy is not None else model.method.default_policy(training=False)
    if not isinstance(policy, LearnedGate):
        return None
    return policy.tau[:gates] if isinstance(policy.tau, tuple) else (policy.tau,) * gates
