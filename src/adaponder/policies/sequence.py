"""Choices among all tokens of a sequence, which no row can answer for itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.policies.base import Policy, PolicyInput, registered_policies
from adaponder.policies.schedules import Schedule
from adaponder.policies.text import PolicyLine


class SequencePolicy(Policy):
    """Chooses among the tokens of each whole sequence, later ones included: for evaluation and training only.

    Dense and compact execution hold whole sequences at one iteration and call :meth:`choose`.
    """

    causal: ClassVar[bool] = False
    row_by_row: ClassVar[bool] = False

    @abstractmethod
    def choose(self, gate: Tensor, active: Tensor, lengths: Tensor, iteration: int) -> Tensor:
        """True for the tokens that are read again, as a grid ``[batch, time]``.

        Args:
            gate: ``[batch, time]``, as in :class:`PolicyInput`; of no meaning for tokens that are not active.
            active: ``[batch, time]``, false for halted tokens and padding.
            lengths: ``[batch]``, how many real tokens each sequence has.
            iteration: the iteration just finished, from 0.
        """

    def __call__(self, rows: PolicyInput) -> Tensor:
        raise InputError(f"policy={self.spelling}: it ranks a whole sequence and cannot be decided row by row")


@dataclass(frozen=True)
class Ranked(SequencePolicy):
    """Prunes the lowest-gate tokens of each sequence down to the schedule's share: for training and evaluation."""

    schedule: Schedule
    word: ClassVar[str] = "ranked"

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

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return tuple(_schedules())

    @classmethod
    def parse(cls, line: PolicyLine) -> Policy | None:
        return None if line.thresholds else cls(_schedules()[line.word].parse_shares(line))

    def as_line(self) -> str:
        return f"{self.word}-{self.schedule.shares_as_line()}"


def _schedules() -> dict[str, type[Schedule]]:
    """Schedules by the word that ranks by them, ``ranked-…``."""
    return {f"{Ranked.word}-{kind.word}": kind for kind in registered_policies() if issubclass(kind, Schedule)}
