"""A policy as one line of text and back: what a command line takes and a profile stores, losing nothing.

``name:value[,value…]``, e.g. ``fixed:2`` or ``gate:0.1,0.2,0.3``; a schedule's calibrated thresholds follow an ``@``.
"""

from __future__ import annotations

from collections.abc import Callable

from adaponder.errors import InputError
from adaponder.policies.base import Policy
from adaponder.policies.rules import (
    Change,
    Divergence,
    Entropy,
    ExitThreshold,
    FixedDepth,
    LearnedGate,
    Random,
    RouterThreshold,
)
from adaponder.policies.schedules import Geometric, Ranked, Schedule, Shares, Uniform

_Numbers = tuple[float, ...]


def parse_policy(text: str) -> Policy:
    """The policy that this line says; ``ranked-…`` ones are for evaluation only."""
    name, _, value = text.partition(":")
    if name == "router" and not value:
        return RouterThreshold()
    value, _, thresholds = value.partition("@")
    ranked = name.startswith("ranked-")
    kind = name.removeprefix("ranked-")
    if name in _SINGLE and not thresholds:
        return _SINGLE[name](_numbers(text, value))
    if kind in _SCHEDULES and not (ranked and thresholds):
        limits = _numbers(text, thresholds) if thresholds else ()
        schedule = _SCHEDULES[kind](_numbers(text, value), limits)
        if ranked:
            return Ranked(schedule)
        if not limits:
            raise InputError(
                f"--policy {text}: a share is kept by calibrated thresholds; adaponder calibrate --rule {kind} makes "
                f"a --profile of them, and ranked-{text} ranks within the sequence, for evaluation only"
            )
        return schedule
    known = (*_SINGLE, "router", *_SCHEDULES, *(f"ranked-{kind}" for kind in _SCHEDULES))
    raise InputError(f"--policy {text}: name one of {', '.join(known)}, then a colon and its value")


def spec_of(policy: Policy) -> str:
    """The line that :func:`parse_policy` turns back into this very policy."""
    if isinstance(policy, RouterThreshold):
        return "router"
    if isinstance(policy, Ranked):
        return f"ranked-{_schedule(policy.schedule)}"
    if isinstance(policy, Schedule):
        return f"{_schedule(policy)}@{_text(policy.thresholds)}"
    for name, (kind, field) in _FIELDS.items():
        if type(policy) is kind:
            return f"{name}:{_text(getattr(policy, field))}"
    raise InputError(f"policy={policy.fingerprint}: it cannot be written as one line of text")


_FIELDS: dict[str, tuple[type[Policy], str]] = {
    "gate": (LearnedGate, "tau"),
    "fixed": (FixedDepth, "depth"),
    "random": (Random, "keep"),
    "entropy": (Entropy, "threshold"),
    "kl": (Divergence, "threshold"),
    "change": (Change, "threshold"),
    "exit": (ExitThreshold, "q"),
}

_SINGLE: dict[str, Callable[[_Numbers], Policy]] = {
    "gate": lambda v: LearnedGate(v[0] if len(v) == 1 else v),
    "fixed": lambda v: FixedDepth(_whole(_only("fixed", v))),
    "random": lambda v: Random(_only("random", v)),
    "entropy": lambda v: Entropy(v[0] if len(v) == 1 else v),
    "kl": lambda v: Divergence(v[0] if len(v) == 1 else v),
    "change": lambda v: Change(v[0] if len(v) == 1 else v),
    "exit": lambda v: ExitThreshold(_only("exit", v)),
}

_SCHEDULES: dict[str, Callable[[_Numbers, _Numbers], Schedule]] = {
    "uniform": lambda v, limits: Uniform(limits, keep=_only("uniform", v)),
    "geometric": lambda v, limits: Geometric(limits, rate=_only("geometric", v)),
    "shares": lambda v, limits: Shares(limits, shares=v),
}


def _schedule(schedule: Schedule) -> str:
    if isinstance(schedule, Uniform):
        return f"uniform:{_text(schedule.keep)}"
    if isinstance(schedule, Geometric):
        return f"geometric:{_text(schedule.rate)}"
    if isinstance(schedule, Shares):
        return f"shares:{_text(schedule.shares)}"
    raise InputError(f"schedule={schedule!r}: it cannot be written as one line of text")


def _text(value: float | _Numbers) -> str:
    # repr of a float is the shortest text that reads back as the same number.
    return ",".join(repr(number) for number in (value if isinstance(value, tuple) else (value,)))


def _numbers(text: str, value: str) -> _Numbers:
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise InputError(f"--policy {text}: {value!r} is not a number or a list of numbers") from None


def _only(name: str, values: _Numbers) -> float:
    if len(values) != 1:
        raise InputError(f"--policy {name}: takes one value, {len(values)} were given")
    return values[0]


def _whole(value: float) -> int:
    if not value.is_integer():
        raise InputError(f"--policy fixed:{value}: a whole number of readings is needed")
    return int(value)
