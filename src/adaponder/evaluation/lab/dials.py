"""A dial maps a mean depth to a setting of one policy, by quantiles of signals recorded at full depth.

Mean depth is the mean of ``1 + [signal 0 >= threshold] + [signals 0 and 1 >= threshold] + …``. So the threshold that
gives a depth on recorded signals is an order statistic of their running minima, exactly, however crowded they are near
0 or 1. Halting changes what later tokens attend to, so scoring with that threshold gives a depth close by;
:func:`adaponder.evaluation.lab.dials.tune` corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaponder.evaluation.lab.halves import Half
from adaponder.evaluation.scoring import Scores, ScoringOptions
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import (
    Change,
    Confidence,
    Divergence,
    Entropy,
    Geometric,
    LearnedGate,
    Policy,
    PolicyInput,
    Random,
    Ranked,
    Schedule,
    Shares,
    Similarity,
    Uniform,
    thresholds_for,
)
from adaponder.policies.values import unit_hash

_SIGNALS: dict[str, Callable[[PolicyInput], Tensor]] = {
    "gate": lambda inputs: inputs.gate.float(),
    "entropy": Entropy.measure,
    "kl": Divergence.measure,
    "change": Change.measure,
    "confidence": lambda inputs: -Confidence.measure(inputs),
    "similarity": lambda inputs: -Similarity.measure(inputs),
    "random": lambda inputs: -unit_hash(inputs.position, inputs.seed, inputs.iteration),
}

# The least mean depth of rules that compare two iterations; every other can halt all tokens after the first.
SHALLOWEST = {"kl": 2.0, "change": 2.0, "similarity": 2.0}


class FullDepth(NamedTuple):
    """A half scored at full depth: losses ``[n, K]``, and the values of each signal ``[n, K-1]``, by name."""

    nll: np.ndarray
    signals: dict[str, np.ndarray]

    @property
    def iterations(self) -> int:
        return self.nll.shape[1]

    @property
    def gates(self) -> Tensor:
        return torch.from_numpy(self.signals["gate"])


@dataclass(frozen=True)
class _Recorder(Policy):
    """Halts no token and appends the value of every signal to ``kept``, once per batch and iteration."""

    kept: list[dict[str, np.ndarray]]

    def __call__(self, inputs: PolicyInput) -> Tensor:
        self.kept.append({name: signal(inputs).flatten().cpu().numpy() for name, signal in _SIGNALS.items()})
        return torch.ones_like(inputs.active)


def at_full_depth(
    model: AdaPonderForCausalLM,
    half: Half,
    *,
    batch_size: int,
    seed: int,
    advance: Callable[[int], None] = lambda predictions: None,
) -> FullDepth:
    """Scores ``half`` with K iterations for every token and records the signals that policies decide by."""
    kept: list[dict[str, np.ndarray]] = []
    how = ScoringOptions(policy=_Recorder(kept), seed=seed)
    scores = half.score(model, how, batch_size=batch_size, detail=True, advance=advance)
    assert scores.nll_by_iteration is not None  # detail asks for it
    gates = scores.nll_by_iteration.shape[1] - 1
    fresh = [batch.fresh.flatten() for batch in half.windows.batches(half.text, batch_size)]
    signals = {}
    for name in _SIGNALS:
        # No token halts and nothing is padded, so every call had all tokens of its batch, in their order.
        batches = [np.stack([call[name] for call in kept[i : i + gates]], -1) for i in range(0, len(kept), gates)]
        signals[name] = np.concatenate([values[new] for values, new in zip(batches, fresh, strict=True)])
    nll = scores.nll_by_iteration
    if scores.counted is not None:
        nll = nll * scores.counted[:, None]  # what does not count gains nothing at any depth
    return FullDepth(nll, signals)


class Setting(NamedTuple):
    """A policy with its threshold set: in words, and as a policy (``None`` for the oracle, which needs the losses)."""

    words: str
    policy: Policy | None
    price: float = 0.0

    @property
    def spec(self) -> str | None:
        return None if self.policy is None else self.policy.as_line()

    def options(self, half: Half, losses: np.ndarray | None, *, iterations: int, seed: int) -> ScoringOptions:
        """Options that score ``half`` at this setting; ``losses``, its own at full depth, are for the oracle alone."""
        if self.policy is not None:
            return ScoringOptions(policy=self.policy, seed=seed)
        assert losses is not None
        return ScoringOptions(depths=half.everywhere(priced_depths(losses, self.price), iterations), seed=seed)


@dataclass(frozen=True)
class Dial:
    """One rule with a free threshold. ``at(depth)`` is the setting with this mean depth on the recorded signals.

    Attributes:
        name: in tables and legends.
        shallowest: the least mean depth it can be set to; at that depth and at K the measured depth is exact.
    """

    name: str
    at: Callable[[float], Setting]
    causal: bool = True
    shallowest: float = 1.0


def gate_dial(full: FullDepth, name: str = "learned gate") -> Dial:
    return _threshold_dial(name, full.signals["gate"], LearnedGate, "tau", lowest=0.0)


def entropy_dial(full: FullDepth) -> Dial:
    return _threshold_dial("entropy", full.signals["entropy"], Entropy, "nats")


def divergence_dial(full: FullDepth) -> Dial:
    return _threshold_dial("KL between iterations", full.signals["kl"], Divergence, "nats", shallowest=SHALLOWEST["kl"])


def change_dial(full: FullDepth) -> Dial:
    return _threshold_dial(
        "hidden-state change", full.signals["change"], Change, "relative", shallowest=SHALLOWEST["change"]
    )


def confidence_dial(full: FullDepth) -> Dial:
    return _ceiling_dial("top-two gap", full.signals["confidence"], Confidence, "gap")


def similarity_dial(full: FullDepth) -> Dial:
    return _ceiling_dial(
        "hidden-state similarity", full.signals["similarity"], Similarity, "cosine", shallowest=SHALLOWEST["similarity"]
    )


def random_dial(full: FullDepth) -> Dial:
    def at(depth: float) -> Setting:
        # A token continues where its number is below ``keep``: the least such ``keep`` is one step of the hash above.
        highest = -threshold_at(full.signals["random"], depth)
        keep = min(1.0, max(0.0, highest + 2.0**-24))
        return Setting(f"keep {keep:.4f}", Random(keep))

    return Dial("random", at)


def uniform_dial(full: FullDepth, *, ranked: bool = False) -> Dial:
    """After every iteration the same share continues (section 5.2): at depth d, ``(d - 1) / (K - 1)`` of all tokens."""
    gates = full.iterations - 1

    def at(depth: float) -> Setting:
        keep = min(1.0, max(0.0, (depth - 1.0) / gates))
        return Setting(f"keep {keep:.4f}", _scheduled(Uniform(keep=keep), full, ranked))

    return Dial(f"uniform, {_manner(ranked)}", at, causal=not ranked)


def geometric_dial(full: FullDepth, *, ranked: bool = False) -> Dial:
    """The share that continues decays as ``r, r^2, …``; the depth decides ``r``."""
    powers = np.arange(1, full.iterations)

    def at(depth: float) -> Setting:
        low, high = 0.0, 1.0
        for _ in range(60):
            rate = (low + high) / 2
            low, high = (rate, high) if (rate**powers).sum() < depth - 1.0 else (low, rate)
        return Setting(f"rate {high:.4f}", _scheduled(Geometric(rate=high), full, ranked))

    return Dial(f"geometric, {_manner(ranked)}", at, causal=not ranked)


def decaying_dial(full: FullDepth, rate: float, *, ranked: bool = False) -> Dial:
    """The share that continues decays as ``c, c r, c r^2, …`` with ``r = rate``; the depth decides ``c``."""
    decay = tuple(float(rate**i) for i in range(full.iterations - 1))

    def at(depth: float) -> Setting:
        shares = scaled_shares(decay, depth - 1.0)
        return Setting(f"first share {shares[0]:.4f}", _scheduled(Shares(shares=shares), full, ranked))

    return Dial(f"geometric at {rate:g}, {_manner(ranked)}", at, causal=not ranked)


def shares_dial(full: FullDepth, shape: tuple[float, ...], name: str = "learned gate, tau per iteration") -> Dial:
    """The learned gate with a tau for each iteration, such that shares of active tokens are in these proportions."""

    def at(depth: float) -> Setting:
        taus = thresholds_for(Shares(shares=scaled_shares(shape, depth - 1.0)), full.gates)
        return Setting("tau " + " ".join(f"{tau:.4g}" for tau in taus), LearnedGate(taus))

    return Dial(name, at)


def oracle_dial(full: FullDepth) -> Dial:
    """Each token gets the depth that is best for its own loss at a price per iteration; it knows the next token."""

    def at(depth: float) -> Setting:
        low, high = -100.0, 100.0
        for _ in range(60):
            price = (low + high) / 2
            low, high = (price, high) if priced_depths(full.nll, price).mean() > depth else (low, price)
        return Setting(f"{high:.2g} nats an iteration", None, price=high)

    return Dial("oracle by NLL", at, causal=False)


def priced_depths(nll: np.ndarray, price: float) -> np.ndarray:
    """Equals ``argmin over d of nll[d - 1] + price * (d - 1)``, the shallowest of equals."""
    return 1 + (nll + price * np.arange(nll.shape[1])).argmin(1)


def threshold_at(signal: np.ndarray, depth: float) -> float:
    """The threshold at which tokens of these signals ``[n, gates]`` have this mean depth if they continue while ``>=``.

    Where several are equal all of them continue, so the depth may be a little above ``depth``.
    """
    lowest = np.minimum.accumulate(signal, axis=1).ravel()
    count = round((depth - 1.0) * len(signal))
    if count <= 0:
        return math.inf
    if count >= lowest.size:
        return -math.inf
    return float(-np.partition(-lowest, count - 1)[count - 1])


def scaled_shares(shape: tuple[float, ...], total: float) -> tuple[float, ...]:
    """Equals ``min(1, c * shape)`` with the ``c`` for which they add up to ``total``; a falling shape stays falling."""
    weights = np.array(shape)
    if total >= len(weights) or not weights.any():
        return tuple([1.0] * len(weights) if total > 0 else [0.0] * len(weights))
    low, high = 0.0, 1.0
    # Entries that are zero in the shape grow only once all others have reached 1.
    weights = np.maximum(weights, 1e-9 * weights.max())
    while np.minimum(1.0, high * weights).sum() < total:
        high *= 2
    for _ in range(80):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(1.0, scale * weights).sum() < total else (low, scale)
    return tuple(float(share) for share in np.minimum(1.0, high * weights))


def _threshold_dial(
    name: str,
    signal: np.ndarray,
    make: Callable[[float], Policy],
    unit: str,
    *,
    shallowest: float = 1.0,
    lowest: float = -math.inf,
) -> Dial:
    def at(depth: float) -> Setting:
        threshold = max(lowest, threshold_at(signal, depth))
        return Setting(f"{unit} {threshold:.4g}", make(threshold))

    return Dial(name, at, shallowest=shallowest)


def _ceiling_dial(
    name: str, negated: np.ndarray, make: Callable[[float], Policy], unit: str, *, shallowest: float = 1.0
) -> Dial:
    """Of a rule that reads on while its measure is at most the threshold; ``negated`` is minus that measure."""

    def at(depth: float) -> Setting:
        threshold = -threshold_at(negated, depth)
        return Setting(f"{unit} {threshold:.4g}", make(threshold))

    return Dial(name, at, shallowest=shallowest)


def _scheduled(schedule: Schedule, full: FullDepth, ranked: bool) -> Policy:
    if ranked:
        return Ranked(schedule)
    thresholds = thresholds_for(schedule, full.gates)
    if isinstance(schedule, Uniform):
        return Uniform(thresholds, keep=schedule.keep)
    if isinstance(schedule, Geometric):
        return Geometric(thresholds, rate=schedule.rate)
    assert isinstance(schedule, Shares)
    return Shares(thresholds, shares=schedule.shares)


def _manner(ranked: bool) -> str:
    return "ranked" if ranked else "thresholds"


# A mean depth within CLOSE of the budget ends the search; one further away than REACHED is called missed.
CLOSE, REACHED = 0.004, 0.02
MOST_RUNS = 6
# Settings that were scored already cost nothing to come back to.
_LOOKS = 40


class Tuned(NamedTuple):
    """A dial set to a budget on the tuning half.

    Attributes:
        scores: of the tuning half at this setting; ``None`` where the budget lies outside what the dial can do.
        runs: how many scorings of the tuning half were needed.
        missed: why the budget was not reached; ``None`` where it was.
    """

    dial: Dial
    budget: float
    setting: Setting
    scores: Scores | None
    runs: int
    missed: str | None

    @property
    def depth(self) -> float | None:
        return None if self.scores is None else float(self.scores.depth.mean())


def too_shallow(budget: float, shallowest: float) -> str | None:
    """Why a rule of this least mean depth cannot meet ``budget``; ``None`` if it can."""
    return f"reads every token at least {shallowest:g} times" if budget < shallowest - REACHED else None


def tune(
    dial: Dial, budget: float, measure: Callable[[Setting], Scores], *, iterations: int, most: int = MOST_RUNS
) -> Tuned:
    """The setting of ``dial`` whose measured mean depth is nearest to ``budget``, by false position."""
    if (why := too_shallow(budget, dial.shallowest)) is not None:
        return Tuned(dial, budget, dial.at(dial.shallowest), None, 0, why)
    aim = min(max(budget, dial.shallowest), float(iterations))
    low, high = (dial.shallowest, dial.shallowest), (float(iterations), float(iterations))
    measured: dict[str, tuple[float, Setting, Scores]] = {}
    for _ in range(_LOOKS):
        setting = dial.at(aim)
        again = (key := repr(setting)) in measured
        if not again:
            if len(measured) == most:
                break
            scores = measure(setting)
            measured[key] = float(scores.depth.mean()), setting, scores
        depth = measured[key][0]
        # A short text's mean depth moves in steps: less than one is asked for only where the budget would be missed.
        step = iterations / len(measured[key][2].depth)
        if abs(depth - budget) <= max(CLOSE, min(REACHED, step)):
            break
        low, high = ((aim, depth), high) if depth < budget else (low, (aim, depth))
        # Equal signals make one setting of many aims: then halving leads fastest to the next one.
        aim = (low[0] + high[0]) / 2 if again else _between(low, high, budget)
    depth, setting, scores = min(measured.values(), key=lambda run: abs(run[0] - budget))
    missed = None if abs(depth - budget) <= REACHED else f"nearest depth {depth:.3f}: no setting was measured closer"
    return Tuned(dial, budget, setting, scores, len(measured), missed)


def _between(low: tuple[float, float], high: tuple[float, float], budget: float) -> float:
    """Where the line through two (aim, depth) points meets the budget, kept a little away from both ends."""
    width = high[0] - low[0]
    rise = high[1] - low[1]
    fraction = (budget - low[1]) / rise if rise > 0 else 0.5
    return low[0] + width * min(0.95, max(0.05, fraction))
