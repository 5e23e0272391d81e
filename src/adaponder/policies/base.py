"""A policy looks at each row, one token after one iteration, and says whether the token is read again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError


@dataclass(frozen=True)
class PolicyInput:
    """What a policy may look at: one entry per row, all of one shape (hidden states and logits have one more axis).

    Rows of one call may stand at different iterations and have different seeds, so a policy compares tensors
    (``rows.iteration + 1 < 3``) and never branches on them (``if rows.iteration == 0``).

    Attributes:
        iteration: int64, the iteration that the row has just finished, from 0.
        gate: how much the model wants to read on, in (0, 1): the learned gate's ``s`` (mor: the router's sigmoid;
            ouro: the probability of not having exited yet).
        hidden: final-normed hidden states.
        position: position of the token in its document.
        seed: int64, the caller's seed.
        sequence: row of the batch that the token belongs to.
        slot: index of the token in its row, padding and cached tokens counted.
        active: tokens still in play; the others' answers do not matter.
        head: computes logits from hidden states; use :attr:`logits`.
        previous: final-normed hidden states of the same tokens one iteration earlier, of no meaning for rows at
            iteration 0; ``None`` where no row has one.
    """

    iteration: Tensor
    gate: Tensor
    hidden: Tensor
    position: Tensor
    seed: Tensor
    sequence: Tensor
    slot: Tensor
    active: Tensor
    head: Callable[[Tensor], Tensor] = field(repr=False)
    previous: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The next-token logits at this iteration, computed when asked for: most policies never pay for them."""
        return self.head(self.hidden)


class Policy(ABC):
    """Decides the mask only: the update stays weighted by the learned ``s``.

    ``causal`` promises that a token's answer never depends on later tokens; a policy without it is for evaluation
    and is refused in generation. ``row_by_row`` promises that a row's answer depends on that row alone; a
    :class:`SequencePolicy` cannot, and chooses among the tokens of a whole sequence instead.
    ``fingerprint`` names policy and settings: equal fingerprints, equal decisions.
    ``method`` names the one method whose signal it reads; ``None``: any that halts.
    """

    causal: ClassVar[bool] = True
    row_by_row: ClassVar[bool] = True
    method: ClassVar[str | None] = None

    @abstractmethod
    def __call__(self, rows: PolicyInput) -> Tensor:
        """True for rows whose token is read again."""

    @property
    def fingerprint(self) -> str:
        return repr(self)

    def heads(self, iteration: int) -> int:
        """How often it computes a token's logits to decide after this iteration: a cost that is its own."""
        return 0

    def check(self, method: str, iterations: int) -> None:
        """Raises where it cannot decide for a model of ``method`` that reads a token up to ``iterations`` times."""
        if self.method not in (None, method):
            raise InputError(
                f"policy={self.fingerprint}: it reads a signal of {self.method}, and this model is {method} "
                f"(K={iterations}); LearnedGate, FixedDepth or Entropy can decide for it"
            )

    def check_batch(self, sequences: int, slots: int) -> None:  # noqa: B027 (most policies fit every batch)
        """Raises where it cannot decide for so many sequences of so many slots, padding and cached tokens counted.

        Called once before a forward's first iteration: what can be known on the host is checked here, so that no
        decision has to wait for the device.
        """

    def _one_per_gate(self, name: str, value: float | Sequence[float], iterations: int) -> None:
        """Raises where a list of numbers is not one for each of the model's gates."""
        if isinstance(value, Sequence) and len(value) != iterations - 1:
            raise InputError(
                f"policy={self.fingerprint}: {name} has {len(value)} entries, a model of K={iterations} has "
                f"{iterations - 1} gates: give one number, or one per gate"
            )


def as_policy(policy: Policy | Callable[[PolicyInput], Tensor]) -> Policy:
    """The policy itself, or the user's own callable made one."""
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return Custom(policy)
    raise InputError(f"policy={policy!r}: a Policy object or a callable taking PolicyInput is needed")


@dataclass(frozen=True)
class Custom(Policy):
    """The user's own callable. It is trusted to be causal and per token; law 1 can be tested on it."""

    function: Callable[[PolicyInput], Tensor]

    def __call__(self, rows: PolicyInput) -> Tensor:
        keep = self.function(rows)
        if not isinstance(keep, Tensor) or keep.shape != rows.active.shape or keep.dtype != torch.bool:
            raise InputError(f"policy {self.function!r} must return a bool tensor of shape {tuple(rows.active.shape)}")
        return keep


def at(value: float | Sequence[float], iteration: Tensor, dtype: torch.dtype) -> float | Tensor:
    """Equals ``value[iteration]`` row by row, in ``dtype``; or ``value`` itself where one number serves all gates.

    Made of fills and selections only: nothing is copied from the host, so a CUDA graph can capture it. Rows at an
    iteration that has no entry get NaN, which no comparison keeps; :meth:`Policy.check` refuses such settings.
    """
    if not isinstance(value, Sequence):
        return float(value)
    number_of_row = torch.full_like(iteration, math.nan, dtype=dtype)
    for i, number in enumerate(value):
        number_of_row = torch.where(iteration == i, float(number), number_of_row)
    return number_of_row


def as_int64(seed: int) -> int:
    """``seed`` modulo 2**64, in the range of an int64: what wrapping int64 arithmetic makes of it."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise InputError(f"{name}={value}: lies between 0 and 1")


def numbers(name: str, value: float | Sequence[float]) -> float | tuple[float, ...]:
    """One number or one per gate, as floats: equal settings then have equal fingerprints."""
    several = value if isinstance(value, Sequence) else (value,)
    found = tuple(float(number) for number in several)
    if any(math.isnan(number) for number in found):
        raise InputError(f"{name}={value}: not a number")
    return found if isinstance(value, Sequence) else found[0]


def settle(policy: Policy, **fields: object) -> None:
    """Writes checked values into a frozen policy."""
    for name, value in fields.items():
        object.__setattr__(policy, name, value)
