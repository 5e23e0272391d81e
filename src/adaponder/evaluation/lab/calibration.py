"""The budget dial: finds thresholds at which a checkpoint has a given mean depth on a text, and the loss there.

One tau for all gates is tuned first. A tau for each iteration can spend the same depth differently: losses at full
depth propose how, and a proposal is chosen where its loss on the tuning half is lower than one tau's by more than
chance. The held-out half is not used to choose, only to measure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adaponder.errors import InputError
from adaponder.evaluation.lab import dials
from adaponder.evaluation.lab.dials import Dial, FullDepth, Tuned, scaled_shares, threshold_at, too_shallow
from adaponder.evaluation.lab.lab import Lab, Measurement, check_budget
from adaponder.evaluation.summary import paired_difference
from adaponder.evaluation.text import Text
from adaponder.journal import Journal
from adaponder.policies import FixedDepth, Policy, Shares, parse_policy, thresholds_for

ONE, EACH, FIXED = "one tau for all gates", "a tau per iteration", "fixed depth"
PROPOSALS = 2
# Number of tokens that proposals are computed from.
_SAMPLE = 20_000

RULES = ("gate", "uniform", "geometric", *(name for name in dials.RULES if name != "gate"))


@dataclass(frozen=True)
class Choice:
    """One way to meet the budget: its loss on the tuning half, which decides, and its held-out measurement."""

    row: Measurement
    tuning_loss: float | None
    chosen: bool

    def as_dict(self) -> dict[str, Any]:
        return self.row.as_dict() | {"tuning_loss": self.tuning_loss, "chosen": self.chosen}


@dataclass(frozen=True)
class Calibration:
    """A budget and the ways tried to meet it, the chosen one first."""

    budget: float
    choices: tuple[Choice, ...]

    @property
    def chosen(self) -> Measurement:
        return self.choices[0].row

    @property
    def policy(self) -> Policy:
        assert self.chosen.spec is not None  # calibrate chooses among policies that can be written down
        return parse_policy(self.chosen.spec)

    def as_dict(self) -> dict[str, Any]:
        return {"budget": self.budget, "choices": [choice.as_dict() for choice in self.choices]}


def calibrate(lab: Lab, budget: float, *, rule: str = "gate") -> Calibration:
    """Meets ``budget`` on the tuning half in one or several ways, chooses there, and measures each way held out."""
    ways = meet(lab, budget, rule=rule)
    if ways[0].missed is not None:
        raise InputError(f"--budget {budget:g}: {rule} cannot meet it on this text ({ways[0].missed})")
    choices = []
    for way in ways:
        assert way.scores is not None  # a rule that was not run has no second way
        choices.append(Choice(lab.held_out(way)[0], way.scores.loss, way is ways[0]))
    return Calibration(budget, tuple(choices))


def meet(lab: Lab, budget: float, *, rule: str = "gate") -> list[Tuned]:
    """Returns the ways to meet ``budget`` on the tuning half, best first (see :func:`ordered`)."""
    check_budget(budget, lab.iterations, "--budget")
    check_rule(rule, budget)
    ways = [lab.tune(dial, budget) for dial in _dials(lab.full_depth, budget, rule)]
    return ordered(ways, lab.halves.tuning.own_text, seed=lab.seed)


def check_rule(rule: str, budget: float) -> None:
    """Raises for an unknown rule, and for one whose smallest mean depth is above ``budget``."""
    if rule not in RULES:
        raise InputError(f"--rule {rule} must be one of {', '.join(RULES)}")
    shallowest = dials.RULES[rule].shallowest if rule in dials.RULES else 1.0
    if (why := too_shallow(budget, shallowest)) is not None:
        raise InputError(f"--budget {budget:g}: {rule} {why}")


def ordered(ways: Sequence[Tuned], own_text: Text, *, seed: int = 0) -> list[Tuned]:
    """Sorts ``ways``: those that reach the budget first. Among them only ways with a significantly lower loss come
    before ``ways[0]``, the simplest; the rest follow by their loss."""
    simplest = ways[0]

    def merit(way: Tuned) -> tuple[bool, int, float]:
        if way.scores is None:
            return True, 2, math.inf
        rank = 1 if way is simplest else 2
        if simplest.scores is not None and way is not simplest:
            gain = paired_difference(own_text, simplest.scores.nll, way.scores.nll, seed=seed)
            rank = 0 if gain.told_apart and gain.mean < 0 else 2
        return way.missed is not None, rank, way.scores.loss

    return sorted(ways, key=merit)


def _dials(full: FullDepth, budget: float, rule: str) -> list[Dial]:
    if rule == "gate":
        proposals = [dials.shares_dial(full, shape, EACH) for shape in propose(full, budget)]
        return [dials.threshold_dial(full, rule, ONE), *proposals]
    if rule in dials.RULES:
        return [dials.threshold_dial(full, rule)]
    return [dials.uniform_dial(full) if rule == "uniform" else dials.geometric_dial(full)]


def propose(full: FullDepth, budget: float, *, count: int = PROPOSALS) -> list[tuple[float, ...]]:
    """Proposes shares of tokens active at iteration 2 … K that cost ``budget`` and have the lowest expected loss.

    The expected loss of a token that halts after d iterations is its loss there at full depth. From several starts,
    depth is moved between iterations as long as the expected loss falls. Shares that one tau for all gates gives
    anyway are not proposed.
    """
    gates = full.iterations - 1
    if gates < 2 or not 1.0 < budget < full.iterations:
        return []  # with one gate, or nothing to choose, a tau per iteration is one tau
    few = FullDepth(full.nll[:_SAMPLE], {"gate": full.signals["gate"][:_SAMPLE]})
    starts = [tuple(rate**i for i in range(gates)) for rate in (1.0, 0.7, 0.3)]
    ends = [_climb(few, scaled_shares(start, budget - 1.0)) for start in starts]
    ends.sort(key=lambda end: end[1])
    gate = few.signals["gate"]
    active = np.logical_and.accumulate(gate >= threshold_at(gate, budget), axis=1).mean(0)
    chosen = [tuple(active.tolist())]
    for shares, _ in ends:
        if all(max(abs(a - b) for a, b in zip(shares, other, strict=True)) > 0.02 for other in chosen):
            chosen.append(shares)
    return chosen[1 : 1 + count]


def expected_loss(full: FullDepth, shares: tuple[float, ...]) -> float:
    """Returns the mean over tokens of the full-depth loss at the depth that these shares give each token."""
    thresholds = torch.tensor(thresholds_for(Shares(shares=shares), full.gates), dtype=torch.float32)
    depth = 1 + (full.gates >= thresholds).long().cumprod(1).sum(1)
    return float(np.take_along_axis(full.nll, depth.numpy()[:, None] - 1, axis=1).mean())


def _climb(full: FullDepth, shares: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    """Moves ever smaller shares from one iteration to another while the expected loss falls."""
    loss = expected_loss(full, shares)
    for step in (0.2, 0.1, 0.05, 0.02):
        better = True
        while better:
            better = False
            for moved in _moves(shares, step):
                if (moved_loss := expected_loss(full, moved)) < loss - 1e-6:
                    shares, loss, better = moved, moved_loss, True
                    break
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
    """Yields a measurement for each budget, met in the way that :func:`meet` prefers; then one for each fixed depth.

    Measurements are saved in ``journal``; those that it holds already are not repeated.
    """
    measures: dict[str, Callable[[], Measurement]] = {
        f"budget {budget!r}": lambda budget=budget: lab.held_out(meet(lab, budget)[0])[0] for budget in budgets
    }
    for depth in range(1, lab.iterations + 1):
        measures[f"depth {depth}"] = lambda depth=depth: lab.untuned(FIXED, FixedDepth(depth))
    for name, measure in measures.items():
        part = None if journal is None else journal.load(name)
        measurement = measure() if part is None else Measurement.from_dict(part.facts)
        if journal is not None and part is None:
            journal.save(name, measurement.as_dict())
        yield measurement


def budgets_between(iterations: int, step: float) -> list[float]:
    """Returns 1, 1 + step, … K."""
    if not 0.0 < step <= iterations - 1:
        raise InputError(f"--step {step:g} must be above 0 and at most {iterations - 1}")
    budgets = [round(1.0 + i * step, 6) for i in range(int((iterations - 1) / step + 1e-9) + 1)]
    return budgets if budgets[-1] == iterations else [*budgets, float(iterations)]
