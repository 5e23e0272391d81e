"""What a request says of depth, made the policy that decides: by line, threshold or budget, never by code or path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaponder.errors import AdaPonderError, in_one_line
from adaponder.policies import FixedDepth, LearnedGate, Policy, parse_policy
from adaponder.serving.errors import ApiError
from adaponder.serving.protocol import DepthControl
from adaponder.serving.served import Served


@dataclass(frozen=True)
class Depth:
    """Who decides: fields of :class:`adaponder.inference.request.Request`."""

    policy: Policy | None = None
    max_iterations: int | None = None
    depths: dict[int, int] | None = None

    def settings(self) -> dict[str, Any]:
        return {"policy": self.policy, "max_iterations": self.max_iterations, "depths": self.depths}


def depth_of(control: DepthControl, served: Served) -> Depth:
    """The request's wish; raises :class:`ApiError` where this model cannot fulfil it."""
    ways = [name for name in ("policy", "tau", "budget") if getattr(control, name) is not None]
    if len(ways) > 1:
        field = f"adaponder.{ways[1]}"
        raise ApiError(400, f"{' and '.join(ways)} both say who halts: give one of them", param=field)
    most = served.iterations
    if control.max_iterations is not None and control.max_iterations > most:
        raise ApiError(
            400,
            f"max_iterations={control.max_iterations}: from 1 to {most}, the model's iterations",
            param="adaponder.max_iterations",
        )
    policy = None
    if ways:
        field = f"adaponder.{ways[0]}"
        try:
            policy = _policy(control, served)
            served.model.check_policy(policy)
        except AdaPonderError as problem:
            raise ApiError(400, in_one_line(problem).replace("--policy ", "policy="), param=field) from None
        if not policy.causal or not policy.row_by_row:
            raise ApiError(
                400,
                f"policy={policy.spelling} looks at other tokens of the sequence: name one that decides for each "
                "token by itself",
                param=field,
            )
    return Depth(policy, control.max_iterations, _forced(control, served))


def _forced(control: DepthControl, served: Served) -> dict[int, int] | None:
    if not control.depths:
        return None
    if not served.model.method.halts:
        raise ApiError(
            400, "depths: this model reads every token equally often; use max_iterations", param="adaponder.depths"
        )
    return {int(slot): depth for slot, depth in control.depths.items()}


def _policy(control: DepthControl, served: Served) -> Policy:
    if control.policy is not None:
        return parse_policy(control.policy)
    if control.tau is not None:
        if not isinstance(served.model.method.default_policy(training=False), LearnedGate):
            raise ApiError(400, "tau: this model has no learned threshold; leave it out", param="adaponder.tau")
        return LearnedGate(control.tau)
    return budget_policy(served, control.budget)


def budget_policy(served: Served, budget: str | float | None) -> Policy:
    """The policy of a profile, or of a mean depth between two calibrated ones of the learned gate."""
    names = ", ".join(served.profiles) or "none"
    if isinstance(budget, str):
        if budget not in served.policies:
            raise ApiError(400, f"budget={budget!r}: no such profile; there are: {names}", param="adaponder.budget")
        return served.policies[budget]
    assert budget is not None
    most = served.iterations
    if not 1 <= budget <= most:
        raise ApiError(400, f"budget={budget:g}: a mean depth from 1 to {most} is needed", param="adaponder.budget")
    points = _calibrated(served)
    if not points:
        raise ApiError(
            400,
            f"budget={budget:g}: the checkpoint has no calibrated thresholds of the learned gate (profiles: {names}); "
            "adaponder calibrate makes them",
            param="adaponder.budget",
        )
    if budget in (1, most):
        return FixedDepth(int(budget))
    return LearnedGate(_between([(1.0, (1.0,) * (most - 1)), *points, (float(most), (0.0,) * (most - 1))], budget))


def _calibrated(served: Served) -> list[tuple[float, tuple[float, ...]]]:
    """Mean depth and thresholds of each profile of the learned gate, the shallowest first."""
    gates, points = served.iterations - 1, {}
    for name, policy in served.policies.items():
        profile = served.profiles[name]
        depth = profile.get("depth", profile.get("budget"))
        if isinstance(policy, LearnedGate) and isinstance(depth, (int, float)) and 1 < depth < served.iterations:
            tau = policy.tau if isinstance(policy.tau, tuple) else (policy.tau,) * gates
            if all(math.isfinite(one) for one in tau):
                points[float(depth)] = tau
    return sorted(points.items())


def _between(points: Sequence[tuple[float, tuple[float, ...]]], depth: float) -> tuple[float, ...]:
    """The thresholds of a mean depth, on the straight line between the nearest two calibrated ones."""
    above = next(number for number, (reached, _) in enumerate(points) if reached >= depth)
    (low, before), (high, after) = points[above - 1], points[above]
    share = (depth - low) / (high - low)
    return tuple((1 - share) * left + share * right for left, right in zip(before, after, strict=True))
