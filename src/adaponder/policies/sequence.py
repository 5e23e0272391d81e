"""Choices among all tokens of a sequence, which no row can answer for itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from adaponder.errors import InputError
from adaponder.policies.base import Policy, PolicyInput


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
        raise InputError(
            f"policy={self.fingerprint}: {type(self).__name__} ranks a whole sequence and cannot be decided row by row"
        )
