"""A policy looks at each row, one token after one iteration, and decides whether the token is read again.

A policy can be written as one line of text, ``word:value[,value…]``, e.g. ``fixed:2`` or ``gate:0.1,0.2,0.3``; a
schedule's calibrated thresholds follow an ``@``. Command lines take such a line and profiles store it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from adaponder.errors import InputError, shown


@dataclass(frozen=True)
class PolicyInput:
    """What a policy may look at: one entry per row, all of one shape (hidden states and logits have one more axis).

    Rows of one call may stand at different iterations and have different seeds, so a policy compares tensors and never
    branches on them.

    Attributes:
        iteration: int64, the iteration that the row has just finished, from 0.
        gate: the model's signal to continue, in (0, 1): the learned gate's ``s``, a router's sigmoid, or the
            probability of not having exited yet.
        hidden: final-normed hidden states.
        position: position of the token in its document.
        seed: int64, the caller's seed.
        sequence: index in the batch of the token's sequence.
        slot: index of the token in its sequence, padding and cached tokens counted.
        active: tokens that have not halted; the policy's result for other tokens is ignored.
        head: computes logits from hidden states; use :attr:`logits`.
        previous: final-normed hidden states of the same tokens one iteration earlier; undefined for rows at
            iteration 0, ``None`` where no row has one.
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
        """Computes the next-token logits at this iteration; most policies do not need them."""
        return self.head(self.hidden)


class PolicyLine(NamedTuple):
    """A line of text split up: ``uniform:0.5@0.1,0.2`` has word ``uniform``, value ``0.5``, thresholds ``0.1,0.2``."""

    word: str
    value: str
    thresholds: str


def numbers_of(text: str) -> tuple[float, ...]:
    """Returns the numbers in a part of a line, between commas."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{text!r} is not a number or a list of numbers") from None


def number_text(value: float | Sequence[float]) -> str:
    """Formats one number, or several with commas between them, as text that parses back to the same numbers."""
    # repr of a float is the shortest such text.
    return ",".join(repr(number) for number in (value if isinstance(value, Sequence) else (value,)))


class Policy(ABC):
    """Decides which tokens are read again; how an update is weighted is up to the method.

    A class with a ``word`` is registered when it is defined: ``--policy`` takes ``word:value`` and a profile stores it.

    Attributes:
        causal: promises that a token's decision never depends on later tokens; others cannot generate.
        row_by_row: promises that a row's decision depends on that row alone.
        reads_seed: whether a decision may depend on the row's seed.
        reads_previous: whether it reads ``previous``; the engine keeps those states only where a policy does.
        signal: the kind of ``gate`` that it needs (the ``signal`` of a method's class); ``None``: any.
        word: its name in a line of text; empty where it has no such form.
        value_field: the field that the value of a line sets; empty where it takes none.
        per_gate: whether that value may have one number for each gate.
    """

    causal: ClassVar[bool] = True
    row_by_row: ClassVar[bool] = True
    reads_seed: ClassVar[bool] = True
    reads_previous: ClassVar[bool] = False
    signal: ClassVar[str | None] = None
    word: ClassVar[str] = ""
    value_field: ClassVar[str] = ""
    per_gate: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        word = cls.__dict__.get("word", "")
        if any(mark in word for mark in ":@,"):
            raise InputError(f"{cls.__qualname__}.word={word!r} must not contain a colon, a comma or @")
        other = _BY_WORD.get(word)
        # A class defined again (a notebook's cell run twice, dataclass(slots=True)) replaces itself.
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InputError(f"{cls.__qualname__}.word={word!r} is the word of {other.__qualname__}; choose another")
        if word:
            _BY_WORD[word] = cls

    @abstractmethod
    def __call__(self, rows: PolicyInput) -> Tensor:
        """Returns True for rows whose token is read again; settings are refused in ``check`` and ``check_batch``."""

    @property
    def fingerprint(self) -> str:
        """Names the policy and its settings: equal fingerprints, equal decisions."""
        return repr(self)

    @property
    def spelling(self) -> str:
        """Returns the policy as typed, ``fixed:2``, for tables and errors; its fingerprint where it has no line."""
        try:
            return self.as_line()
        except InputError:
            return self.fingerprint

    def heads(self, iteration: int) -> int:
        """Returns how often the policy computes a token's logits to decide after this iteration."""
        return 0

    def check(self, method: str, iterations: int) -> None:
        """Raises where it cannot decide for a model of ``method`` that reads a token up to ``iterations`` times."""
        if self.per_gate:
            self.check_one_per_gate(self.value_field, iterations)

    def check_one_per_gate(self, name: str, iterations: int) -> None:
        """Raises if the field ``name`` is a list without one number for each gate of a model of K iterations."""
        value = getattr(self, name)
        if isinstance(value, Sequence) and len(value) != iterations - 1:
            raise InputError(
                f"policy={self.spelling}: {name} has {len(value)} entries, a model of K={iterations} has "
                f"{iterations - 1} gates: give one number, or one per gate"
            )

    def check_signal(self, signal: str, method: str, iterations: int) -> None:
        """Raises where it needs another signal than the one that a model of ``method`` provides as ``gate``."""
        if self.signal not in (None, signal):
            raise InputError(
                f"policy={self.spelling}: it reads the signal of {self.signal}, and this model is {method} "
                f"(K={iterations}), whose signal is {signal}; gate, fixed or entropy can decide for it"
            )

    def check_batch(self, sequences: int, slots: int) -> None:  # noqa: B027 (most policies fit every batch)
        """Raises where it cannot decide for a batch of this shape, padding and cached tokens counted.

        Called once before a forward, so that no decision has to wait for the device.
        """

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """Returns the words that a line of this policy may start with."""
        return (cls.word,)

    @classmethod
    def parse(cls, line: PolicyLine) -> Policy | None:
        """Returns the policy that a line describes; ``None`` where the line does not have the form of one."""
        if line.thresholds or (line.value and not cls.value_field):
            return None
        return cls(**{cls.value_field: cls.parse_value(line.value)}) if cls.value_field else cls()

    @classmethod
    def parse_value(cls, value: str) -> Any:
        """Returns the value of a line as ``value_field`` takes it."""
        values = numbers_of(value)
        if len(values) > 1 and not cls.per_gate:
            raise InputError(f"{cls.word} takes one value, {len(values)} were given")
        return values[0] if len(values) == 1 else values

    def as_line(self) -> str:
        """Returns the line of text that :meth:`parse` turns back into this policy."""
        # A subclass without a word of its own would be read back as its parent.
        if _BY_WORD.get(self.word) is not type(self):
            raise InputError(f"policy={self.fingerprint}: it cannot be written as one line of text")
        return f"{self.word}:{number_text(getattr(self, self.value_field))}" if self.value_field else self.word


# Filled when a class is defined: see Policy.__init_subclass__.
_BY_WORD: dict[str, type[Policy]] = {}


def registered_policies() -> tuple[type[Policy], ...]:
    """Returns every policy class that has a word, in the order in which they were defined."""
    return tuple(_BY_WORD.values())


def parse_policy(text: str, option: str = "--policy") -> Policy:
    """Returns the policy that a line of text describes; ``ranked-…`` ones are for evaluation only.

    ``option`` is named in errors.
    """
    word, _, numbers = text.partition(":")
    value, _, thresholds = numbers.partition("@")
    by_word = {word: kind for kind in registered_policies() for word in kind.words()}
    try:
        policy = by_word[word].parse(PolicyLine(word, value, thresholds)) if word in by_word else None
    except InputError as error:
        raise InputError(f"{option} {text}: {error}") from None
    if policy is None:
        raise InputError(f"{option} {text}: name one of {', '.join(by_word)}, then a colon and its value")
    return policy


def as_policy(policy: Policy | Callable[[PolicyInput], Tensor]) -> Policy:
    """Returns the policy itself, or wraps a user's callable."""
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return Custom(policy)
    cure = "; adaponder.policies.parse_policy makes one of a text" if isinstance(policy, str) else ""
    raise InputError(f"policy={shown(policy)}: a Policy object or a callable taking PolicyInput is needed{cure}")


@dataclass(frozen=True)
class Custom(Policy):
    """A user's callable. It is trusted to be causal and per token; law 1 can be tested on it."""

    function: Callable[[PolicyInput], Tensor]

    def __call__(self, rows: PolicyInput) -> Tensor:
        keep = self.function(rows)
        if not isinstance(keep, Tensor) or keep.shape != rows.active.shape or keep.dtype != torch.bool:
            raise InputError(f"policy {self.function!r} must return a bool tensor of shape {tuple(rows.active.shape)}")
        return keep
