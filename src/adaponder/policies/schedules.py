"""Policies that keep a prescribed share of tokens after each iteration: the tokens with the highest gates.

:class:`Schedule` decides by calibrated thresholds and is causal; :class:`Ranked` ranks the tokens of a sequence, as in
the paper's experiment, and depends on later tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.halting import stays_active
from adaponder.policies.base import Policy, PolicyInput, PolicyLine, number_text, numbers_of, registered_policies
from adaponder.policies.values import as_floats, as_share, at, set_fields


@dataclass(frozen=True)
class Schedule(Policy):
    """Keeps the tokens with the highest gates, a prescribed share after each iteration.

    It decides causally and per token, by ``thresholds`` (see :func:`thresholds_for`); without thresholds only
    :class:`Ranked` can use it. Subclasses store their shares in the field that ``value_field`` names.
    """

    thresholds: tuple[float, ...] = ()
    reads_seed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = self.value_field
        shares = self.checked_shares(name, getattr(self, name))
        set_fields(self, **{"thresholds": as_floats("thresholds", self.thresholds), name: shares})

    def checked_shares(self, name: str, value: Any) -> Any:
        """Returns ``value``, a share or several, as floats; raises unless each is between 0 and 1."""
        return as_share(name, value)

    @abstractmethod
    def share(self, iteration: int) -> float:
        """Returns the share of all tokens of a sequence that continue after this iteration."""

    def check(self, method: str, iterations: int) -> None:
        if self.thresholds:
            self.check_one_per_gate("thresholds", iterations)

    def check_batch(self, sequences: int, slots: int) -> None:
        if not self.thresholds:
            name = type(self).__name__
            raise InputError(
                f"{name} needs calibrated thresholds: {name}(…, thresholds=thresholds_for(policy, gates)), or a "
                f"profile (adaponder calibrate --rule {name.lower()}); or Ranked({name}(…)) ranks within the "
                "sequence, for evaluation only"
            )

    @classmethod
    def parse(cls, line: PolicyLine) -> Policy | None:
        schedule = cls.parse_shares(line)
        if not schedule.thresholds:
            raise InputError(
                f"it needs calibrated thresholds: adaponder calibrate --rule {line.word} makes a --profile with them; "
                f"or ranked-{line.word}:{line.value} ranks within the sequence, for evaluation only"
            )
        return schedule

    @classmethod
    def parse_shares(cls, line: PolicyLine) -> Self:
        """Parses the text ``word:shares`` or ``word:shares@thresholds``, such as ``uniform:0.5@0.1,0.2``."""
        thresholds = numbers_of(line.thresholds) if line.thresholds else ()
        return cls(thresholds, **{cls.value_field: cls.parse_value(line.value)})

    def as_line(self) -> str:
        return super().as_line() + (f"@{number_text(self.thresholds)}" if self.thresholds else "")

    def __call__(self, rows: PolicyInput) -> Tensor:
        return stays_active(rows.gate, at(self.thresholds, rows.iteration, torch.float32))


@dataclass(frozen=True)
class Uniform(Schedule):
    """Keeps the same share ``keep`` of tokens after every iteration (section 5.2)."""

    keep: float = field(default=1.0, kw_only=True)
    word: ClassVar[str] = "uniform"
    value_field: ClassVar[str] = "keep"

    def share(self, iteration: int) -> float:
        return self.keep


@dataclass(frozen=True)
class Geometric(Schedule):
    """Keeps the share ``rate ** (i + 1)`` of tokens after iteration i (section 5.2)."""

    rate: float = field(default=1.0, kw_only=True)
    word: ClassVar[str] = "geometric"
    value_field: ClassVar[str] = "rate"

    def share(self, iteration: int) -> float:
        return self.rate ** (iteration + 1)


@dataclass(frozen=True)
class Shares(Schedule):
    """Keeps the share ``shares[i]`` of all tokens of a sequence after iteration i."""

    shares: tuple[float, ...] = field(default=(), kw_only=True)
    word: ClassVar[str] = "shares"
    value_field: ClassVar[str] = "shares"

    def checked_shares(self, name: str, value: Any) -> tuple[float, ...]:
        if not isinstance(shares := as_floats(name, value), tuple):
            raise InputError(f"shares={shares} must be a list with one share per gate")
        return tuple(as_share(name, share) for share in shares)

    @classmethod
    def parse_value(cls, value: str) -> tuple[float, ...]:
        return numbers_of(value)

    def check(self, method: str, iterations: int) -> None:
        super().check(method, iterations)
        self.check_one_per_gate("shares", iterations)

    def share(self, iteration: int) -> float:
        if iteration >= len(self.shares):
            raise InputError(f"shares has {len(self.shares)} entries, none for gate {iteration}: give one per gate")
        return self.shares[iteration]


class SequencePolicy(Policy):
    """Decides for all tokens of a sequence together, so it depends on later tokens: for evaluation and training only.

    Dense and compact execution, which have whole sequences at one iteration, call :meth:`choose`.
    """

    causal: ClassVar[bool] = False
    row_by_row: ClassVar[bool] = False

    @abstractmethod
    def choose(self, gate: Tensor, active: Tensor, lengths: Tensor, iteration: int) -> Tensor:
        """Returns which tokens continue, bool ``[batch, time]``, after ``iteration`` (from 0).

        ``gate [batch, time]`` is as in :class:`PolicyInput`, undefined where ``active`` is false (halted tokens and
        padding); ``lengths [batch]`` is the number of real tokens of each sequence.
        """

    def __call__(self, rows: PolicyInput) -> Tensor:
        raise InputError(f"policy={self.spelling}: it ranks a whole sequence and cannot decide row by row")


@dataclass(frozen=True)
class Ranked(SequencePolicy):
    """Keeps the schedule's share of each sequence: the tokens with the highest gates. Not causal: cannot generate."""

    schedule: Schedule
    word: ClassVar[str] = "ranked"

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise InputError(f"schedule={self.schedule!r}: Uniform, Geometric or Shares is needed to rank by")

    def check(self, method: str, iterations: int) -> None:
        self.schedule.check(method, iterations)

    def choose(self, gate: Tensor, active: Tensor, lengths: Tensor, iteration: int) -> Tensor:
        # The share is of all real tokens in the sequence, not of the tokens that are still active.
        budget = (self.schedule.share(iteration) * lengths.double() + 1e-9).long()
        candidates = torch.where(active, gate.float(), -math.inf)
        rank = candidates.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (rank < budget[:, None]) & active

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return tuple(_schedules())

    @classmethod
    def parse(cls, line: PolicyLine) -> Policy | None:
        return None if line.thresholds else cls(_schedules()[line.word].parse_shares(line))

    def as_line(self) -> str:
        return f"{self.word}-{replace(self.schedule, thresholds=()).as_line()}"


def thresholds_for(schedule: Schedule, gates: Tensor) -> tuple[float, ...]:
    """Returns one threshold per gate, so that ``schedule`` keeps its shares of the tokens of ``gates [tokens, K-1]``.

    Each is a quantile over tokens that are still active. Gates must come from a run at full depth on typical text.
    """
    active = torch.ones(gates.shape[0], dtype=torch.bool, device=gates.device)
    thresholds = []
    for iteration in range(gates.shape[1]):
        count = int(schedule.share(iteration) * gates.shape[0] + 1e-9)
        candidates = gates[active, iteration].float()
        if count >= candidates.numel():
            threshold = 0.0
        elif count == 0:
            threshold = math.inf
        else:
            threshold = float(candidates.topk(count).values[-1])
        active &= gates[:, iteration].float() >= threshold
        thresholds.append(threshold)
    return tuple(thresholds)


def _schedules() -> dict[str, type[Schedule]]:
    """Maps the names of ranked policies, such as ``ranked-uniform``, to their schedule classes."""
    return {f"{Ranked.word}-{kind.word}": kind for kind in registered_policies() if issubclass(kind, Schedule)}
