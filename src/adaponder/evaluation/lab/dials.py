"""Tunes a policy's free threshold to a mean depth, by quantiles of signals recorded at full depth.

A token continues while its signal is at least the threshold t, so with signals s_0, s_1, … its depth is
``1 + [s_0 >= t] + [min(s_0, s_1) >= t] + …``, and the t for a mean depth is an order statistic of these minima.
Halting changes what later tokens attend to, so scoring with t gives a slightly different depth; :func:`tune` corrects
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaponder import policies
from adaponder.evaluation.lab.halves import Half
from adaponder.evaluation.scoring import Scores, ScoringOptions
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import Policy, PolicyInput, Schedule, Shares, thresholds_for
from adaponder.policies.measures import MeasureThreshold
from adaponder.policies.values import unit_hash

# A mean depth within CLOSE of the budget ends the search; a mean depth further away than REACHED counts as missed.
CLOSE, REACHED = 0.004, 0.02
# How a schedule selects its share of active tokens: by thresholds on gates or, if ``ranked``, by rank.
_SELECTION = {False: "thresholds", True: "ranked"}
# Maximum scorings of a search, and its maximum steps: a step at a setting that was scored before is free.
_MAX_RUNS, _MAX_STEPS = 6, 40


class Rule(NamedTuple):
    """A policy that compares one signal of each row with a threshold.

    Attributes:
        name: label in tables and legends.
        policy: builds the policy from a threshold.
        unit: unit of the threshold, as tables show it.
        signal: computes the signal of each row; a larger signal always favours continuing.
        ceiling: whether a token continues while a measure is at most the threshold; ``signal`` is then minus this
            measure.
        shallowest: the smallest mean depth; 2 for policies that compare an iteration with the one before it.
        lowest: the smallest threshold that the policy accepts.
    """

    name: str
    policy: Callable[[float], Policy]
    unit: str
    signal: Callable[[PolicyInput], Tensor]
    ceiling: bool = False
    shallowest: float = 1.0
    lowest: float = -math.inf


def _measure_rule(name: str, kind: type[MeasureThreshold], unit: str) -> Rule:
    """Returns the rule of the policy class ``kind``, which compares a measure with a threshold."""

    def signal(rows: PolicyInput) -> Tensor:
        return -kind.measure(rows) if kind.at_most else kind.measure(rows)

    return Rule(name, kind, unit, signal, kind.at_most, 2.0 if kind.reads_previous else 1.0)


def _random_signal(rows: PolicyInput) -> Tensor:
    return -unit_hash(rows.position, rows.seed, rows.iteration)


RULES: dict[str, Rule] = {
    "gate": Rule("learned gate", policies.LearnedGate, "tau", lambda rows: rows.gate.float(), lowest=0.0),
    "entropy": _measure_rule("entropy", policies.Entropy, "nats"),
    "kl": _measure_rule("KL between iterations", policies.Divergence, "nats"),
    "change": _measure_rule("hidden-state change", policies.Change, "relative"),
    "confidence": _measure_rule("top-two gap", policies.Confidence, "gap"),
    "similarity": _measure_rule("hidden-state similarity", policies.Similarity, "cosine"),
    "random": Rule("random", policies.Random, "keep", _random_signal, ceiling=True),
}


class FullDepth(NamedTuple):
    """Losses and signals of one half of a text, scored with depth K for every token.

    Attributes:
        nll: ``[n, K]``, the loss after each iteration; 0 for tokens outside the mean loss.
        signals: by key of :data:`RULES`, ``[n, K-1]``, the rule's signal after each iteration but the last.
    """

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
    """Halts no token and appends the value of every signal to ``recorded``, once per batch and iteration."""

    recorded: list[dict[str, np.ndarray]]

    def __call__(self, inputs: PolicyInput) -> Tensor:
        self.recorded.append({name: rule.signal(inputs).flatten().cpu().numpy() for name, rule in RULES.items()})
        return torch.ones_like(inputs.active)


def at_full_depth(
    model: AdaPonderForCausalLM,
    half: Half,
    *,
    batch_size: int,
    seed: int,
    advance: Callable[[int], None] = lambda predictions: None,
) -> FullDepth:
    """Scores ``half`` with K iterations for every token and records the signals of all rules."""
    recorded: list[dict[str, np.ndarray]] = []
    how = ScoringOptions(policy=_Recorder(recorded), seed=seed)
    scores = half.score(model, how, batch_size=batch_size, detail=True, advance=advance)
    assert scores.nll_by_iteration is not None  # detail=True
    gates = scores.nll_by_iteration.shape[1] - 1
    fresh = [batch.fresh.flatten() for batch in half.windows.batches(half.text, batch_size)]
    signals = {}
    for name in RULES:
        # No token halts and nothing is padded, so every call received all tokens of its batch, in order.
        calls = [np.stack([call[name] for call in recorded[i : i + gates]], -1) for i in range(0, len(recorded), gates)]
        signals[name] = np.concatenate([values[new] for values, new in zip(calls, fresh, strict=True)])
    nll = scores.nll_by_iteration
    if scores.counted is not None:
        nll = nll * scores.counted[:, None]  # for tokens outside the loss, all depths are equally good
    return FullDepth(nll, signals)


class Setting(NamedTuple):
    """A dial's setting: its description (``words``) and the policy with this setting.

    The oracle has no policy (``None``): each token gets the depth with the smallest loss plus ``price`` per iteration.
    """

    words: str
    policy: Policy | None
    price: float = 0.0

    @property
    def spec(self) -> str | None:
        return None if self.policy is None else self.policy.as_line()

    def options(self, half: Half, losses: np.ndarray | None, *, iterations: int, seed: int) -> ScoringOptions:
        """Returns options that score ``half`` at this setting.

        ``losses`` are the half's losses at every depth, which only the oracle needs.
        """
        if self.policy is not None:
            return ScoringOptions(policy=self.policy, seed=seed)
        assert losses is not None
        return ScoringOptions(depths=half.everywhere(priced_depths(losses, self.price), iterations), seed=seed)


@dataclass(frozen=True)
class Dial:
    """A policy with one free number, such as a threshold.

    Attributes:
        at: returns the setting that has a given mean depth according to the recorded signals.
        causal: whether the policy decides without looking at later tokens.
        shallowest: the smallest mean depth of any setting. At this depth and at K all tokens have the same depth, so
            the measured mean depth equals the requested one.
    """

    name: str
    at: Callable[[float], Setting]
    causal: bool = True
    shallowest: float = 1.0


def threshold_dial(full: FullDepth, word: str, name: str | None = None) -> Dial:
    """Returns the dial of ``RULES[word]``, named after the rule unless ``name`` is given."""
    rule, signal = RULES[word], full.signals[word]

    def at(depth: float) -> Setting:
        threshold = threshold_at(signal, depth)
        if word == "random":
            # Tokens continue if their hash is below ``keep``, so keep is the highest such hash plus the resolution.
            keep = min(1.0, max(0.0, 2.0**-24 - threshold))
            return Setting(f"keep {keep:.4f}", policies.Random(keep))
        threshold = -threshold if rule.ceiling else max(rule.lowest, threshold)
        return Setting(f"{rule.unit} {threshold:.4g}", rule.policy(threshold))

    return Dial(name or rule.name, at, shallowest=rule.shallowest)


def uniform_dial(full: FullDepth, *, ranked: bool = False) -> Dial:
    """Returns the dial with the same share of tokens active in each of the iterations 1 … K-1 (paper, section 5.2).

    The tokens with the highest gates are active; they are selected by thresholds or, if ``ranked``, by rank in the
    sequence.
    """

    def at(depth: float) -> Setting:
        keep = min(1.0, max(0.0, (depth - 1.0) / (full.iterations - 1)))
        return Setting(f"keep {keep:.4f}", _scheduled(policies.Uniform(keep=keep), full, ranked))

    return Dial(f"uniform, {_SELECTION[ranked]}", at, causal=not ranked)


def geometric_dial(full: FullDepth, *, ranked: bool = False) -> Dial:
    """Returns the dial with shares ``r, r^2, …`` of tokens active in iterations 1, 2, …; the mean depth sets ``r``."""
    powers = np.arange(1, full.iterations)

    def at(depth: float) -> Setting:
        rate = _bisect(0.0, 1.0, lambda rate: (rate**powers).sum() < depth - 1.0)
        return Setting(f"rate {rate:.4f}", _scheduled(policies.Geometric(rate=rate), full, ranked))

    return Dial(f"geometric, {_SELECTION[ranked]}", at, causal=not ranked)


def decaying_dial(full: FullDepth, rate: float, *, ranked: bool = False) -> Dial:
    """Returns the dial with shares ``c * rate^i``, at most 1, of tokens active in iteration ``i + 1``.

    The mean depth sets ``c``.
    """
    decay = tuple(float(rate**i) for i in range(full.iterations - 1))

    def at(depth: float) -> Setting:
        shares = scaled_shares(decay, depth - 1.0)
        return Setting(f"first share {shares[0]:.4f}", _scheduled(Shares(shares=shares), full, ranked))

    return Dial(f"geometric at {rate:g}, {_SELECTION[ranked]}", at, causal=not ranked)


def shares_dial(full: FullDepth, shape: tuple[float, ...], name: str) -> Dial:
    """Returns the dial of a learned gate with one tau per iteration.

    The taus make the shares of active tokens proportional to ``shape`` (at most 1).
    """

    def at(depth: float) -> Setting:
        taus = thresholds_for(Shares(shares=scaled_shares(shape, depth - 1.0)), full.gates)
        return Setting("tau " + " ".join(f"{tau:.4g}" for tau in taus), policies.LearnedGate(taus))

    return Dial(name, at)


def oracle_dial(full: FullDepth) -> Dial:
    """Returns the dial that gives each token the depth that minimises loss + price * depth; it needs the targets."""

    def at(depth: float) -> Setting:
        price = _bisect(-100.0, 100.0, lambda price: priced_depths(full.nll, price).mean() > depth)
        return Setting(f"{price:.2g} nats an iteration", None, price=price)

    return Dial("oracle by NLL", at, causal=False)


def _scheduled(schedule: Schedule, full: FullDepth, ranked: bool) -> Policy:
    if ranked:
        return policies.Ranked(schedule)
    return replace(schedule, thresholds=thresholds_for(schedule, full.gates))


def _bisect(low: float, high: float, too_low: Callable[[float], bool], steps: int = 60) -> float:
    """Returns the smallest number in ``low … high`` for which ``too_low`` is false, by ``steps`` bisections."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return high


def priced_depths(nll: np.ndarray, price: float) -> np.ndarray:
    """Returns for each token the smallest depth d that minimises ``nll[d - 1] + price * (d - 1)``."""
    return 1 + (nll + price * np.arange(nll.shape[1])).argmin(1)


def threshold_at(signal: np.ndarray, depth: float) -> float:
    """Returns the threshold at which tokens that continue while ``signal >= threshold`` have mean depth ``depth``.

    ``signal`` is ``[n, gates]``. Tokens with equal signals all continue, so the mean depth may be slightly higher.
    """
    lowest = np.minimum.accumulate(signal, axis=1).ravel()
    count = round((depth - 1.0) * len(signal))
    if count <= 0:
        return math.inf
    if count >= lowest.size:
        return -math.inf
    return float(-np.partition(-lowest, count - 1)[count - 1])


def scaled_shares(shape: tuple[float, ...], total: float) -> tuple[float, ...]:
    """Returns the shares ``min(1, c * shape)``, with ``c`` chosen so that they add up to ``total``."""
    weights = np.array(shape)
    if total >= len(weights) or not weights.any():
        return tuple([1.0] * len(weights) if total > 0 else [0.0] * len(weights))
    # Entries that are zero in the shape grow only once all others have reached 1.
    weights = np.maximum(weights, 1e-9 * weights.max())

    def too_low(scale: float) -> bool:
        return np.minimum(1.0, scale * weights).sum() < total

    high = 1.0
    while too_low(high):
        high *= 2
    return tuple(float(share) for share in np.minimum(1.0, _bisect(0.0, high, too_low, 80) * weights))


class Tuned(NamedTuple):
    """The setting of a dial whose mean depth on the tuning half came nearest to ``budget``.

    Attributes:
        scores: the tuning half's scores at ``setting``; ``None`` if the budget is below the dial's smallest mean depth.
        runs: number of times that the tuning half was scored.
        missed: the reason why the budget was not reached; ``None`` if it was.
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
    """Returns why a policy with the smallest mean depth ``shallowest`` cannot meet ``budget``; ``None`` if it can."""
    return f"has a mean depth of at least {shallowest:g}" if budget < shallowest - REACHED else None


def tune(dial: Dial, budget: float, measure: Callable[[Setting], Scores], *, iterations: int) -> Tuned:
    """Finds the setting of ``dial`` whose measured mean depth is nearest to ``budget``, by false position."""
    if (reason := too_shallow(budget, dial.shallowest)) is not None:
        return Tuned(dial, budget, dial.at(dial.shallowest), None, 0, reason)
    aim = min(max(budget, dial.shallowest), float(iterations))
    low, high = (dial.shallowest, dial.shallowest), (float(iterations), float(iterations))
    measured: dict[str, tuple[float, Setting, Scores]] = {}
    for _ in range(_MAX_STEPS):
        setting = dial.at(aim)
        key = repr(setting)
        repeated = key in measured
        if not repeated:
            if len(measured) == _MAX_RUNS:
                break
            scores = measure(setting)
            measured[key] = float(scores.depth.mean()), setting, scores
        depth = measured[key][0]
        # The mean depth of a short text changes in steps, so a distance below one step may be impossible to reach.
        step = iterations / len(measured[key][2].depth)
        if abs(depth - budget) <= max(CLOSE, min(REACHED, step)):
            break
        if depth < budget:
            low = (aim, depth)
        else:
            high = (aim, depth)
        # Equal signals give the same setting for many aims; bisection then reaches the next setting fastest.
        aim = (low[0] + high[0]) / 2 if repeated else _between(low, high, budget)
    depth, setting, scores = min(measured.values(), key=lambda run: abs(run[0] - budget))
    missed = None if abs(depth - budget) <= REACHED else f"nearest depth {depth:.3f}: no setting was measured closer"
    return Tuned(dial, budget, setting, scores, len(measured), missed)


def _between(low: tuple[float, float], high: tuple[float, float], budget: float) -> float:
    """Returns the depth to aim at for ``budget``, interpolated between two pairs of (aimed, measured) depth.

    The result is at least 5 % of their distance away from both aimed depths.
    """
    width = high[0] - low[0]
    rise = high[1] - low[1]
    fraction = (budget - low[1]) / rise if rise > 0 else 0.5
    return low[0] + width * min(0.95, max(0.05, fraction))
