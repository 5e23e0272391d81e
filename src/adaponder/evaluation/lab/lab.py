"""Compares policies at equal mean depth, and calibrates a policy.

Each policy is tuned on one half of a text and measured on the other. Calibration of the learned gate tunes one tau for
all gates, and taus per iteration that it derives from the losses at full depth. Taus per iteration are chosen only if
their loss on the tuning half is significantly lower than that of one tau.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from adaponder.backbones.shape import shape_of
from adaponder.errors import InputError
from adaponder.evaluation.lab import dials
from adaponder.evaluation.lab.dials import Dial, FullDepth, Setting, Tuned
from adaponder.evaluation.lab.halves import Half, Halves
from adaponder.evaluation.meter import deciding_flops
from adaponder.evaluation.scoring import Scores, ScoringOptions
from adaponder.evaluation.summary import Difference, Interval, paired_difference, summarise
from adaponder.evaluation.text import Text
from adaponder.journal import Journal
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import FixedDepth, Policy, Shares, thresholds_for

RATES = (0.9, 0.5)
LEARNED, TRAINED = "learned gate", "learned gate as trained"


@dataclass(frozen=True)
class Measurement:
    """One policy at one budget, measured on the held-out half.

    Attributes:
        budget: mean depth that the policy was tuned to; ``None`` for an untuned policy.
        causal: whether the policy decides without looking at later tokens.
        setting: the tuned value, in words.
        spec: the policy as ``--policy`` accepts it; ``None`` for the oracle.
        runs: number of times that the tuning half was scored.
        tuning_depth: mean depth of the tuning half at ``setting``.
        difference: the policy's loss minus that of the learned gate at the same budget, paired by document.
        active: shares of tokens active in iterations 0 … K-1.
        mflops: MFLOPs per token, including logits computed only for the policy's decisions (``deciding_mflops``).
        missed: why the budget was not reached; the results are then missing or at another depth. ``None`` if it was
            reached.
    """

    policy: str
    causal: bool
    budget: float | None
    setting: str
    spec: str | None
    runs: int
    missed: str | None
    tuning_depth: float | None = None
    depth: float | None = None
    depth_interval: Interval | None = None
    loss: float | None = None
    loss_interval: Interval | None = None
    difference: Difference | None = None
    active: tuple[float, ...] = ()
    mflops: float | None = None
    deciding_mflops: float | None = None
    flops_ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        significant = None if self.difference is None else self.difference.significant
        return asdict(self) | {"told_apart": significant}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        """Inverts :meth:`as_dict`."""
        known: dict[str, Any] = {field.name: values[field.name] for field in fields(cls)}
        gap = known["difference"] and dict(known["difference"])
        for facts, name in ((known, "depth_interval"), (known, "loss_interval"), (gap, "interval")):
            if facts is not None and facts[name] is not None:
                facts[name] = Interval(*facts[name])
        return cls(**known | {"difference": gap and Difference(**gap), "active": tuple(known["active"])})


class Lab:
    """Tunes policies on one half of a text, with signals recorded at full depth, and measures them on the other half.

    To show progress, ``show(what, total)`` is called before each scoring of ``total`` predictions. The function that it
    returns is called after each batch, with the batch's number of predictions.
    """

    def __init__(
        self,
        model: AdaPonderForCausalLM,
        halves: Halves,
        *,
        batch_size: int = 8,
        seed: int = 0,
        show: Callable[[str, int], Callable[[int], None]] = lambda what, total: lambda predictions: None,
    ):
        require_halting(model)
        self.model, self.halves, self.batch_size, self.seed, self.show = model, halves, batch_size, seed, show
        self.iterations = model.config.iterations
        self.shape = shape_of(model.config)
        self.full_depth = self._at_full_depth(halves.tuning, "tuning half at full depth")

    def _at_full_depth(self, half: Half, what: str) -> FullDepth:
        advance = self.show(what, half.tokens)
        return dials.at_full_depth(self.model, half, batch_size=self.batch_size, seed=self.seed, advance=advance)

    @cached_property
    def held_out_losses(self) -> np.ndarray:
        """Returns the losses of the held-out half at every depth; only the oracle uses them."""
        return self._at_full_depth(self.halves.held_out, "held-out half at full depth").nll

    def tune(self, dial: Dial, budget: float) -> Tuned:
        def measure(setting: Setting) -> Scores:
            how = setting.options(self.halves.tuning, self.full_depth.nll, iterations=self.iterations, seed=self.seed)
            return self._score(self.halves.tuning, how, f"{dial.name} at {budget:g}: tuning")

        return dials.tune(dial, budget, measure, iterations=self.iterations)

    def held_out(self, tuned: Tuned, learned: Scores | None = None) -> tuple[Measurement, Scores | None]:
        """Measures a tuned setting on the held-out half; compares its loss with ``learned``, the learned gate's scores.

        If the budget is below the dial's smallest depth, the measurement has no results and the scores are ``None``.
        """
        dial, setting, half = tuned.dial, tuned.setting, self.halves.held_out
        planned = Measurement(
            dial.name, dial.causal, tuned.budget, setting.words, setting.spec, tuned.runs, tuned.missed, tuned.depth
        )
        if tuned.scores is None:
            return planned, None
        losses = self.held_out_losses if setting.policy is None else None
        how = setting.options(half, losses, iterations=self.iterations, seed=self.seed)
        scores = self._score(half, how, f"{dial.name} at {tuned.budget:g}: held out")
        return self._measured(planned, setting.policy, scores, learned), scores

    def own_depth(self) -> float:
        """Returns the mean depth of the tuning half under the method's own policy."""
        return float(self._score(self.halves.tuning, ScoringOptions(seed=self.seed), TRAINED).depth.mean())

    def untuned(self, name: str, policy: Policy, *, tuning_depth: float | None = None) -> Measurement:
        """Measures an untuned policy on the held-out half."""
        scores = self._score(self.halves.held_out, ScoringOptions(policy=policy, seed=self.seed), f"{name}: held out")
        planned = Measurement(name, policy.causal, None, policy.spelling, policy.as_line(), 0, None, tuning_depth)
        return self._measured(planned, policy, scores, None)

    def _score(self, half: Half, how: ScoringOptions, what: str) -> Scores:
        advance = self.show(what, half.tokens)
        return half.score(self.model, how, batch_size=self.batch_size, shape=self.shape, advance=advance)

    def trained(self, own_depth: float) -> Measurement:
        return self.untuned(TRAINED, self.model.method.default_policy(training=False), tuning_depth=own_depth)

    def dials(self, rates: Sequence[float] = RATES) -> list[Dial]:
        """Returns a :class:`Dial` for each policy to compare: first the learned gate, last the oracle."""
        for rate in rates:
            if not 0.0 < rate <= 1.0:
                raise InputError(f"--rates {rate:g} must be above 0 and at most 1")
        full = self.full_depth
        scheduled: list[Dial] = []
        for ranked in (False, True):
            scheduled += [dials.uniform_dial(full, ranked=ranked), dials.geometric_dial(full, ranked=ranked)]
            scheduled += [dials.decaying_dial(full, rate, ranked=ranked) for rate in rates]
        learned, *signals = (dials.threshold_dial(full, rule) for rule in dials.RULES)
        return [learned, *scheduled, *signals, dials.oracle_dial(full)]

    def budgets(self, requested: Sequence[float] | None, own_depth: float) -> tuple[float, ...]:
        """Returns the requested budgets; by default ``own_depth``, the mean depth of the method's own policy.

        Raises for a budget outside 1 … K; also if ``own_depth`` is needed and so near 1 or K that all policies agree.
        """
        for budget in requested or ():
            check_budget(budget, self.iterations, "--budgets")
        if requested:
            return tuple(requested)
        if not 1.02 <= own_depth <= self.iterations - 0.02:
            raise InputError(
                f"--budgets: as trained, the mean depth on this text is {own_depth:.3f}, where all policies agree; "
                f"pass mean depths between 1 and {self.iterations}, as in --budgets 1.5,2.5"
            )
        return (own_depth,)

    def compare(
        self, budgets: Sequence[float], *, rates: Sequence[float] = RATES, journal: Journal | None = None
    ) -> Iterator[Measurement]:
        """Yields a measurement of each policy at each budget, the learned gate first.

        Measurements are saved in ``journal``; measurements already in it are not repeated.
        """
        learned_dial, *others = self.dials(rates)
        for budget in budgets:
            learned: Scores | None = None
            for dial in (learned_dial, *others):
                name = f"{dial.name} at {budget!r}"
                if journal is not None and (saved := journal.load(name)) is not None:
                    yield Measurement.from_dict(saved.facts)
                    continue
                if learned is None and dial is not learned_dial:
                    # The journal has no losses of the learned gate, with which all other policies are paired.
                    learned = self.held_out(self.tune(learned_dial, budget))[1]
                measurement, scores = self.held_out(self.tune(dial, budget), learned)
                learned = scores if dial is learned_dial else learned
                if journal is not None:
                    journal.save(name, measurement.as_dict())
                yield measurement

    def _measured(
        self, planned: Measurement, policy: Policy | None, scores: Scores, learned: Scores | None
    ) -> Measurement:
        """Returns ``planned`` with the results of the held-out ``scores``.

        If the learned gate's scores are given as ``learned``, the results include the difference from them.
        """
        half = self.halves.held_out
        summary = summarise(half.own_text, scores.nll, scores.depth, seed=self.seed)
        difference = None
        if learned is not None:
            difference = paired_difference(half.own_text, learned.nll, scores.nll, seed=self.seed)
        active = tuple(float((scores.depth > i).mean()) for i in range(self.iterations))
        spent = scores.spent
        # After iteration i the policy decides about the tokens that were active in iteration i.
        decided = [sum(spent.histogram[i:]) for i in range(self.iterations - 1)]
        deciding = deciding_flops(policy, decided, self.shape) / spent.tokens
        return replace(
            planned,
            depth=summary.depth,
            depth_interval=half.depth_interval(scores, seed=self.seed),
            loss=summary.loss,
            loss_interval=summary.interval,
            difference=difference,
            active=active,
            mflops=spent.cost.flops / spent.tokens / 1e6,
            deciding_mflops=deciding / 1e6,
            flops_ratio=spent.cost.ratio,
        )


def require_halting(model: AdaPonderForCausalLM) -> None:
    """Raises for methods that give all tokens the same depth, and for models of one iteration."""
    method = model.config.method
    if model.config.iterations < 2:
        raise InputError(f"{method} with one iteration has no depth to choose")
    if not model.method.halts:
        raise InputError(f"{method} gives every token the same depth; adaponder eval --depths 1,2,… shows their costs")


def check_budget(budget: float, iterations: int, option: str) -> None:
    """Raises unless ``budget`` is from 1 to ``iterations``; the error names the command-line ``option``."""
    if not 1.0 <= budget <= iterations:
        raise InputError(f"{option} {budget:g} must be a mean depth from 1 to {iterations}, the model's iterations")


ONE, EACH, FIXED = "one tau for all gates", "a tau per iteration", "fixed depth"
# Maximum number of proposals, and of the tokens that they are computed from.
_PROPOSALS, _SAMPLE = 2, 20_000


@dataclass(frozen=True)
class Choice:
    """A policy tuned to a calibration's budget: held-out measurement, tuning loss, and whether it was chosen."""

    row: Measurement
    tuning_loss: float | None
    chosen: bool

    def as_dict(self) -> dict[str, Any]:
        return self.row.as_dict() | {"tuning_loss": self.tuning_loss, "chosen": self.chosen}


@dataclass(frozen=True)
class Calibration:
    """A budget and the policies that were tuned to it (``choices``), the chosen one first."""

    budget: float
    choices: tuple[Choice, ...]

    @property
    def chosen(self) -> Measurement:
        return self.choices[0].row

    def as_dict(self) -> dict[str, Any]:
        return {"budget": self.budget, "choices": [choice.as_dict() for choice in self.choices]}


def calibrate(lab: Lab, budget: float, *, rule: str = "gate") -> Calibration:
    """Tunes the candidates of :func:`meet`, chooses the best by tuning loss, and measures each on the held-out half.

    Raises if the best candidate does not meet the budget.
    """
    candidates = meet(lab, budget, rule=rule)
    best = candidates[0]
    if best.missed is not None:
        raise InputError(f"--budget {budget:g}: {rule} cannot meet it on this text ({best.missed})")
    choices = []
    for candidate in candidates:
        assert candidate.scores is not None  # a rule with several candidates can reach depth 1, so all were scored
        choices.append(Choice(lab.held_out(candidate)[0], candidate.scores.loss, candidate is best))
    return Calibration(budget, tuple(choices))


def meet(lab: Lab, budget: float, *, rule: str = "gate") -> list[Tuned]:
    """Tunes the candidate policies of ``rule`` to ``budget`` on the tuning half; returns them best first.

    Candidates of ``gate`` are one tau for all gates, and up to two sets of taus per iteration (see :func:`propose`);
    any other rule gives one candidate.
    """
    check_budget(budget, lab.iterations, "--budget")
    check_rule(rule, budget)
    full = lab.full_depth
    if rule == "gate":
        proposals = [dials.shares_dial(full, shape, EACH) for shape in propose(full, budget)]
        candidates = [dials.threshold_dial(full, rule, ONE), *proposals]
    elif rule in dials.RULES:
        candidates = [dials.threshold_dial(full, rule)]
    else:
        candidates = [dials.uniform_dial(full) if rule == "uniform" else dials.geometric_dial(full)]
    return ordered([lab.tune(dial, budget) for dial in candidates], lab.halves.tuning.own_text, seed=lab.seed)


def check_rule(rule: str, budget: float) -> None:
    """Raises if the rule's smallest mean depth is above ``budget``."""
    shallowest = dials.RULES[rule].shallowest if rule in dials.RULES else 1.0
    if (reason := dials.too_shallow(budget, shallowest)) is not None:
        raise InputError(f"--budget {budget:g}: {rule} {reason}")


def ordered(candidates: Sequence[Tuned], own_text: Text, *, seed: int = 0) -> list[Tuned]:
    """Sorts candidates, best first; those that missed the budget come last.

    ``candidates[0]`` is the simplest; another candidate precedes it only with a significantly lower loss.
    """
    simplest = candidates[0]

    def merit(candidate: Tuned) -> tuple[bool, int, float]:
        if candidate.scores is None:
            return True, 2, math.inf
        rank = 1 if candidate is simplest else 2
        if simplest.scores is not None and candidate is not simplest:
            gain = paired_difference(own_text, simplest.scores.nll, candidate.scores.nll, seed=seed)
            rank = 0 if gain.significant and gain.mean < 0 else 2
        return candidate.missed is not None, rank, candidate.scores.loss

    return sorted(candidates, key=merit)


def propose(full: FullDepth, budget: float) -> list[tuple[float, ...]]:
    """Returns up to two proposals of the shares of tokens active in iterations 1 … K-1, with mean depth ``budget``.

    Hill climbing from several starts lowers the expected loss: it increases the share of one iteration at the expense
    of another. Shares close to those of one tau for all gates are not proposed.
    """
    gates = full.iterations - 1
    if gates < 2 or not 1.0 < budget < full.iterations:
        return []  # with one gate, or at depth 1 or K, a tau per iteration adds nothing
    sample = FullDepth(full.nll[:_SAMPLE], {"gate": full.signals["gate"][:_SAMPLE]})
    starts = [tuple(rate**i for i in range(gates)) for rate in (1.0, 0.7, 0.3)]
    results = [_climb(sample, dials.scaled_shares(start, budget - 1.0)) for start in starts]
    results.sort(key=lambda result: result[1])
    gate = sample.signals["gate"]
    active = np.logical_and.accumulate(gate >= dials.threshold_at(gate, budget), axis=1).mean(0)
    distinct = [tuple(active.tolist())]
    for shares, _ in results:
        if all(max(abs(a - b) for a, b in zip(shares, other, strict=True)) > 0.02 for other in distinct):
            distinct.append(shares)
    return distinct[1 : 1 + _PROPOSALS]


def expected_loss(full: FullDepth, shares: tuple[float, ...]) -> float:
    """Estimates the mean loss under ``Shares(shares)``.

    For a token that halts after d iterations, the loss after d iterations at full depth is taken.
    """
    thresholds = torch.tensor(thresholds_for(Shares(shares=shares), full.gates), dtype=torch.float32)
    depth = 1 + (full.gates >= thresholds).long().cumprod(1).sum(1)
    return float(np.take_along_axis(full.nll, depth.numpy()[:, None] - 1, axis=1).mean())


def _climb(full: FullDepth, shares: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    """Improves the shares of active tokens by hill climbing at a fixed mean depth; returns shares and expected loss."""
    loss = expected_loss(full, shares)
    for step in (0.2, 0.1, 0.05, 0.02):
        while moved := next((to for to in _moves(shares, step) if expected_loss(full, to) < loss - 1e-6), None):
            shares, loss = moved, expected_loss(full, moved)
    return shares, loss


def _moves(shares: tuple[float, ...], step: float) -> Iterator[tuple[float, ...]]:
    for source, target in itertools.permutations(range(len(shares)), 2):
        moved = list(shares)
        moved[source] -= step
        moved[target] += step
        # Halting is monotone: shares never rise from one iteration to the next.
        if moved[0] <= 1.0 and moved[-1] >= 0.0 and all(a >= b for a, b in itertools.pairwise(moved)):
            yield tuple(moved)


def frontier(lab: Lab, budgets: Sequence[float], *, journal: Journal | None = None) -> Iterator[Measurement]:
    """Yields a measurement of the best candidate of :func:`meet` for each budget, then of each fixed depth.

    Measurements that ``journal`` holds are not repeated; others are saved in it.
    """
    measures: dict[str, Callable[[], Measurement]] = {
        f"budget {budget!r}": lambda budget=budget: lab.held_out(meet(lab, budget)[0])[0] for budget in budgets
    }
    depths = range(1, lab.iterations + 1)
    measures |= {f"depth {depth}": lambda depth=depth: lab.untuned(FIXED, FixedDepth(depth)) for depth in depths}
    for name, measure in measures.items():
        saved = None if journal is None else journal.load(name)
        measurement = measure() if saved is None else Measurement.from_dict(saved.facts)
        if journal is not None and saved is None:
            journal.save(name, measurement.as_dict())
        yield measurement


def budgets_between(iterations: int, step: float) -> list[float]:
    """Returns the budgets ``1, 1 + step, …`` and K."""
    if not 0.0 < step <= iterations - 1:
        raise InputError(f"--step {step:g} must be above 0 and at most {iterations - 1}")
    budgets = [round(1.0 + i * step, 6) for i in range(int((iterations - 1) / step + 1e-9) + 1)]
    return budgets if budgets[-1] == iterations else [*budgets, float(iterations)]
