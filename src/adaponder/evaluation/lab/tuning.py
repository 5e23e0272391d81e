"""Tunes a dial by scoring the tuning half: quantiles at full depth give the first setting, measured depths the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from adaponder.evaluation.lab.dials import Dial, Setting
from adaponder.evaluation.scoring import Scores

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
