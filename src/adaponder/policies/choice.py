"""Chooses the policy of a request, which may name it by a line, a threshold of the gate, a profile or a mean depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from adaponder.errors import InputError
from adaponder.policies.base import Policy, parse_policy
from adaponder.policies.depth import FixedDepth
from adaponder.policies.gate import LearnedGate

Profiles = Mapping[str, Mapping[str, Any]]


def choose_policy(
    default: Policy,
    iterations: int,
    *,
    policy: Policy | str | None = None,
    tau: float | None = None,
    budget: str | float | None = None,
    profiles: Profiles = MappingProxyType({}),
    name: Callable[[str], str] = str,
) -> Policy | None:
    """Returns the policy of ``policy``, ``tau`` or ``budget``; ``None`` if none of them is given.

    Args:
        default: the method's own policy; ``tau`` needs it to be a learned gate.
        policy: a policy, or its line such as ``fixed:2``.
        budget: the name of a profile, or a mean depth between those of calibrated profiles.
        profiles: the checkpoint's profiles by name, as ``profiles.json`` stores them.
        name: what the caller calls each of the three fields, for errors.
    """
    given = [field for field, value in (("policy", policy), ("tau", tau), ("budget", budget)) if value is not None]
    if len(given) > 1:
        raise InputError(f"{name(given[1])}: {name(given[0])} is given too; give one of them")
    if tau is not None:
        if not isinstance(default, LearnedGate):
            raise InputError(f"{name('tau')}: this model has no learned threshold; leave it out")
        return LearnedGate(tau)
    if budget is not None:
        return _budget_policy(budget, iterations, profiles, name("budget"))
    return parse_policy(policy) if isinstance(policy, str) else policy


def _budget_policy(budget: str | float, iterations: int, profiles: Profiles, name: str) -> Policy:
    known = ", ".join(profiles) or "none"
    if isinstance(budget, str):
        if budget not in profiles:
            raise InputError(f"{name}: unknown profile {budget!r}; profiles of this checkpoint: {known}")
        return parse_policy(profiles[budget]["policy"])
    if not 1 <= budget <= iterations:
        raise InputError(f"{name}={budget:g} must be a mean depth between 1 and {iterations}")
    points = _calibrated(profiles, iterations)
    if not points:
        raise InputError(
            f"{name}={budget:g}: the checkpoint has no calibrated thresholds of the learned gate (profiles: {known}); "
            "make them with adaponder calibrate"
        )
    if budget in (1, iterations):
        return FixedDepth(int(budget))
    gates = iterations - 1
    return LearnedGate(_interpolate([(1.0, (1.0,) * gates), *points, (float(iterations), (0.0,) * gates)], budget))


def _calibrated(profiles: Profiles, iterations: int) -> list[tuple[float, tuple[float, ...]]]:
    """Returns mean depth and thresholds of each profile of the learned gate, sorted by depth."""
    points = {}
    for profile in profiles.values():
        policy, depth = parse_policy(profile["policy"]), profile.get("depth", profile.get("budget"))
        if isinstance(policy, LearnedGate) and isinstance(depth, (int, float)) and 1 < depth < iterations:
            taus = policy.tau if isinstance(policy.tau, tuple) else (policy.tau,) * (iterations - 1)
            if all(math.isfinite(tau) for tau in taus):
                points[float(depth)] = taus
    return sorted(points.items())


def _interpolate(points: Sequence[tuple[float, tuple[float, ...]]], depth: float) -> tuple[float, ...]:
    """Returns the thresholds of a mean depth, linearly between the two nearest calibrated ones."""
    above = next(index for index, (reached, _) in enumerate(points) if reached >= depth)
    (low, before), (high, after) = points[above - 1], points[above]
    share = (depth - low) / (high - low)
    return tuple((1 - share) * left + share * right for left, right in zip(before, after, strict=True))
