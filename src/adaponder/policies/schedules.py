"""Rules that keep a prescribed share of tokens after each iteration, those of highest gate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.halting import stays_active
from adaponder.policies.base import Policy, PolicyInput, at, check_share, numbers, settle
from adaponder.policies.sequence import SequencePolicy


@dataclass(frozen=True)
class Schedule(Policy):
    """Keeps the tokens of highest gate, a prescribed share of the sequence at each iteration.

    With ``thresholds`` (see :func:`thresholds_for`) the rule is causal and per token. :class:`Ranked` ranks within
    the sequence, exactly the paper's experiment, and looks at the future.
    """

    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        settle(self, thresholds=numbers("thresholds", self.thresholds))

    def share(self, iteration: int) -> float:
        raise NotImplementedError

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        if self.thresholds:
            self._one_per_gate("thresholds", self.thresholds, iterations)

    def __call__(self, rows: PolicyInput) -> Tensor:
        if not self.thresholds:
            name = type(self).__name__
            raise InputError(
                f"{name} needs calibrated thresholds: {name}(…, thresholds=thresholds_for(policy, gates)), or a "
                f"profile (adaponder calibrate --rule {name.lower()}); or Ranked({name}(…)) ranks within the "
                "sequence, for evaluation only"
            )
        return stays_active(rows.gate, at(self.thresholds, rows.iteration, torch.float32))


@dataclass(frozen=True)
class Uniform(Schedule):
    """After every iteration the same share ``keep`` of tokens reads on (section 5.2)."""

    keep: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("keep", self.keep)
        settle(self, keep=float(self.keep))

    def share(self, iteration: int) -> float:
        return self.keep


@dataclass(frozen=True)
class Geometric(Schedule):
    """After iteration i the share ``rate ** (i + 1)`` of tokens reads on (section 5.2)."""

    rate: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("rate", self.rate)
        settle(self, rate=float(self.rate))

    def share(self, iteration: int) -> float:
        return self.rate ** (iteration + 1)


@dataclass(frozen=True)
class Shares(Schedule):
    """A share of its own for each iteration: mor's capacities are this."""

    shares: tuple[float, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for share in self.shares:
            check_share("shares", share)

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        self._one_per_gate("shares", self.shares, iterations)

    def share(self, iteration: int) -> float:
        if iteration >= len(self.shares):
            raise InputError(f"shares has {len(self.shares)} entries, none for gate {iteration}: give one per gate")
        return float(self.shares[iteration])


@dataclass(frozen=True)
class Ranked(SequencePolicy):
    """Prunes the lowest-gate tokens of each sequence down to the schedule's share: non-causal, evaluation only."""

    schedule: Schedule

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise InputError(f"schedule={self.schedule!r}: Uniform, Geometric or Shares is needed to rank by")

    def check(self, method: str, iterations: int) -> None:
        self.schedule.check(method, iterations)

    def choose(self, gate: Tensor, active: Tensor, lengths: Tensor, iteration: int) -> Tensor:
        # The share is of the whole sequence, as read at iteration 0, not of what pruning has left of it.
        budget = (self.schedule.share(iteration) * lengths.double() + 1e-9).long()
        candidates = torch.where(active, gate.float(), -math.inf)
        rank = candidates.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (rank < budget[:, None]) & active


def thresholds_for(schedule: Schedule, gates: Tensor) -> tuple[float, ...]:
    """Thresholds at which ``schedule`` keeps its shares of these tokens: quantiles of ``gates`` among survivors.

    ``gates`` is ``[tokens, K-1]``, from a run at full depth on text like that to come. The thresholds are then causal.
    """
    alive = torch.ones(gates.shape[0], dtype=torch.bool, device=gates.device)
    thresholds = []
    for iteration in range(gates.shape[1]):
        count = int(schedule.share(iteration) * gates.shape[0] + 1e-9)
        survivors = gates[alive, iteration].float()
        if count >= survivors.numel():
            threshold = 0.0
        elif count == 0:
            threshold = math.inf
        else:
            threshold = float(survivors.topk(count).values[-1])
        alive &= gates[:, iteration].float() >= threshold
        thresholds.append(threshold)
    return tuple(thresholds)
