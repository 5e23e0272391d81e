"""Chooses the policy of a command or request from a line of text, a gate threshold, a profile or a mean depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from adaponder.errors import InputError
from adaponder.policies.base import Policy, parse_policy
from adaponder.policies.depth import FixedDepth
from adaponder.policies.gate import LearnedGate

Profiles = Mapping[str, Mapping[str, Any]]


def choose_policy(
    iterations: int,
    *,
    policy: Policy | str | None = None,
    tau: float | None = None,
    budget: str | float | None = None,
    profiles: Profiles = MappingProxyType({}),
    name: Callable[[str], str] = str,
) -> Policy | None:
    """Returns the policy for ``policy``, ``tau`` or ``budget``; ``None`` (the method's default) if none is given.

    Raises if several of them are given.

    Args:
        iterations: the model's K.
        policy: a policy, or its text such as ``fixed:2``.
        tau: a threshold of the learned gate.
        budget: the name of a profile, or a mean depth. A mean depth needs at least one calibrated profile of the
            learned gate, because thresholds are interpolated between profiles.
        profiles: the checkpoint's profiles by name, as in ``profiles.json``.
        name: maps ``policy``, ``tau`` and ``budget`` to the names used in errors, e.g. command options.
    """
    ways = {"policy": policy, "tau": tau, "budget": budget}
    given = [name(field) for field, value in ways.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{given[1]}: {given[0]} and {given[1]} both choose the policy; give one of them")
    if tau is not None:
        return LearnedGate(tau)
    if isinstance(budget, str):
        return profile_policy(profiles, budget, name("budget"))
    if budget is None:
        return parse_policy(policy, name("policy")) if isinstance(policy, str) else policy
    if not 1 <= budget <= iterations:
        raise InputError(f"{name('budget')}={budget:g} must be a mean depth between 1 and {iterations}")
    points = calibrated(profiles, iterations)
    if not points:
        raise InputError(
            f"{name('budget')}={budget:g}: the checkpoint has no calibrated thresholds of the learned gate "
            f"(profiles: {', '.join(profiles) or 'none'}); make them with adaponder calibrate"
        )
    if budget in (1, iterations):
        return FixedDepth(int(budget))
    gates = iterations - 1
    points = [(1.0, (1.0,) * gates), *points, (float(iterations), (0.0,) * gates)]
    # Between calibrated depths, thresholds are interpolated linearly.
    above = next(index for index, (depth, _) in enumerate(points) if depth >= budget)
    (low, low_taus), (high, high_taus) = points[above - 1], points[above]
    share = (budget - low) / (high - low)
    taus = zip(low_taus, high_taus, strict=True)
    return LearnedGate(tuple((1 - share) * left + share * right for left, right in taus))


def profile_policy(profiles: Profiles, name: str, option: str) -> Policy:
    """Returns the policy of the profile ``name``; errors mention ``option``."""
    if name not in profiles:
        names = ", ".join(profiles) or "none"
        raise InputError(
            f"{option} {name} is not a profile of this checkpoint ({names}); adaponder calibrate makes one"
        )
    return parse_policy(profiles[name]["policy"], f"{option} {name}:")


def calibrated(profiles: Profiles, iterations: int) -> list[tuple[float, tuple[float, ...]]]:
    """Returns (mean depth, thresholds) of the profiles of the learned gate, sorted by depth.

    Leaves out profiles with infinite thresholds, or without a mean depth between 1 and K = ``iterations``.
    """
    points = {}
    for profile in profiles.values():
        policy, depth = parse_policy(profile["policy"]), profile.get("depth", profile.get("budget"))
        if isinstance(policy, LearnedGate) and isinstance(depth, (int, float)) and 1 < depth < iterations:
            taus = policy.tau if isinstance(policy.tau, tuple) else (policy.tau,) * (iterations - 1)
            if all(math.isfinite(tau) for tau in taus):
                points[float(depth)] = taus
    return sorted(points.items())
