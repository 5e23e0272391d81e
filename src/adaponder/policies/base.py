"""The base class of policies: after each iteration, a policy decides for each row whether its token continues.

A policy can be written as one line of text, ``word:value[,value…]``, e.g. ``fixed:2`` or ``gate:0.1,0.2,0.3``; in
a line of a ``Schedule``, thresholds follow an ``@``. ``--policy`` takes such a line and profiles store it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from adaponder.errors import InputError, did_you_mean, shown


@dataclass(frozen=True)
class PolicyInput:
    """The inputs of a policy: tensors with one entry per row, all of one shape (hidden states have one more axis).

    Rows of one call may be at different iterations and have different seeds, so a policy must compare tensors and not
    branch on their values.

    Attributes:
        iteration, seed: int64: the iteration that the row has just finished (from 0), and the caller's seed.
        gate: the model's signal to continue, in (0, 1): the learned gate's ``s``, a router's sigmoid, or the
            probability of no exit so far.
        hidden: final-normed hidden states.
        position: position of the token in its document.
        sequence: batch index of the token's sequence.
        slot: index of the token in its sequence, including padding and cached tokens.
        active: bool, true for tokens that have not halted; the policy's result for other tokens is ignored.
        head: computes logits from hidden states; use :attr:`logits`.
        previous: final-normed hidden states of the same tokens one iteration earlier; undefined for rows at
            iteration 0, ``None`` if all rows are at iteration 0 or no policy ``reads_previous``.
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
        """Next-token logits after this iteration, computed when read: expensive, and most policies do not need them."""
        return self.head(self.hidden)


class PolicyLine(NamedTuple):
    """The parts of a policy that is written as text.

    ``uniform:0.5@0.1,0.2`` has the word ``uniform``, the value ``0.5`` and the thresholds ``0.1,0.2``.
    """

    word: str
    value: str
    thresholds: str


def numbers_of(text: str) -> tuple[float, ...]:
    """Parses comma-separated numbers."""
    if not text:
        raise InputError("a value is needed after the word, as in fixed:2")
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{text!r} is not a number or a list of numbers") from None


def number_text(value: float | Sequence[float]) -> str:
    """Formats one number, or several separated by commas, such that :func:`numbers_of` returns exactly the same."""
    # repr of a float is the shortest text that parses to it.
    return ",".join(repr(number) for number in (value if isinstance(value, Sequence) else (value,)))


class Policy(ABC):
    """Decides which tokens continue to the next iteration; the method decides how a token's update is weighted.

    A class with a ``word`` is registered when it is defined: ``--policy`` takes ``word:value`` and profiles store it.

    Attributes:
        causal: whether a token's decision never depends on later tokens; only causal policies can generate.
        row_by_row: whether a row's decision depends on that row alone.
        reads_seed: whether a decision may depend on the row's seed.
        reads_previous: whether the policy reads ``previous``; the engine keeps these states only for such policies.
        signal: the kind of ``gate`` that the policy needs (the ``signal`` of a method's class); ``None``: any.
        word: the policy's name in text, before the colon; empty if the policy cannot be written as text.
        value_field: the field that the value after the colon sets; empty if the policy has no value.
        per_gate: whether the value may be a list with one number per gate.
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
        # A class that is defined again (a notebook cell run twice, dataclass(slots=True)) replaces the earlier one.
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InputError(f"{cls.__qualname__}.word={word!r} is the word of {other.__qualname__}; choose another")
        if word:
            _BY_WORD[word] = cls

    @abstractmethod
    def __call__(self, rows: PolicyInput) -> Tensor:
        """Returns a bool per row: whether its token continues; callers call ``check`` and ``check_batch`` before."""

    @property
    def fingerprint(self) -> str:
        """The policy's name with its settings; policies with equal fingerprints make equal decisions."""
        return repr(self)

    @property
    def spelling(self) -> str:
        """The policy as text, e.g. ``fixed:2``, or its fingerprint if it has no such text; for tables and errors."""
        try:
            return self.as_line()
        except InputError:
            return self.fingerprint

    def heads(self, iteration: int) -> int:
        """Returns how many times the policy computes a token's logits to decide after this iteration."""
        return 0

    def check(self, method: str, iterations: int) -> None:
        """Raises if the policy's settings do not fit a model of ``method`` with K = ``iterations``."""
        if self.per_gate:
            self.check_one_per_gate(self.value_field, iterations)

    def check_one_per_gate(self, name: str, iterations: int) -> None:
        """Raises if the field ``name`` is a list whose length is not ``iterations - 1``, the number of gates."""
        value = getattr(self, name)
        if isinstance(value, Sequence) and len(value) != iterations - 1:
            raise InputError(
                f"policy={self.spelling}: {name} has {len(value)} entries, a model of K={iterations} has "
                f"{iterations - 1} gates: give one number, or one per gate"
            )

    def check_signal(self, signal: str, method: str, iterations: int) -> None:
        """Raises unless the policy accepts ``signal``, the kind of ``gate`` that models of ``method`` have."""
        if self.signal not in (None, signal):
            raise InputError(
                f"policy={self.spelling}: it needs the signal {self.signal!r}, but this model ({method}, "
                f"K={iterations}) has the signal {signal!r}; use gate, fixed or entropy instead"
            )

    def check_batch(self, sequences: int, slots: int) -> None:  # noqa: B027 (most policies fit every batch)
        """Raises if the policy does not fit a batch of this shape, including padding and cached tokens.

        Called once before each forward, so that decisions need no check that synchronises with the device.
        """

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """Returns the names that select this policy in text such as ``fixed:2``: the part before the colon."""
        return (cls.word,)

    @classmethod
    def parse(cls, line: PolicyLine) -> Policy | None:
        """Builds a policy of this class from ``line``; returns ``None`` if ``line`` has parts that the class lacks."""
        if line.thresholds or (line.value and not cls.value_field):
            return None
        return cls(**{cls.value_field: cls.parse_value(line.value)}) if cls.value_field else cls()

    @classmethod
    def parse_value(cls, value: str) -> Any:
        """Parses the value after the colon: one number, or with ``per_gate`` also several, separated by commas."""
        values = numbers_of(value)
        if len(values) > 1 and not cls.per_gate:
            raise InputError(f"{cls.word} takes one value, {len(values)} were given")
        return values[0] if len(values) == 1 else values

    def as_line(self) -> str:
        """Returns the text from which :func:`parse_policy` builds this policy; raises if there is none."""
        # The line of a subclass that inherits its word would be parsed as the parent class.
        if _BY_WORD.get(self.word) is not type(self):
            raise InputError(f"policy={self.fingerprint}: it cannot be written as one line of text")
        return f"{self.word}:{number_text(getattr(self, self.value_field))}" if self.value_field else self.word


# Filled by Policy.__init_subclass__ when a class is defined.
_BY_WORD: dict[str, type[Policy]] = {}


def registered_policies() -> tuple[type[Policy], ...]:
    """Returns every policy class that has a word, in order of definition."""
    return tuple(_BY_WORD.values())


def parse_policy(text: str, option: str = "--policy") -> Policy:
    """Builds a policy from text such as ``fixed:2``; errors name ``option``, the option that the text was given for."""
    word, _, numbers = text.partition(":")
    value, _, thresholds = numbers.partition("@")
    by_word = {word: kind for kind in registered_policies() for word in kind.words()}
    try:
        policy = by_word[word].parse(PolicyLine(word, value, thresholds)) if word in by_word else None
    except InputError as error:
        raise InputError(f"{option} {text}: {error}") from None
    if policy is None:
        near = "" if word in by_word else did_you_mean(word, by_word)
        words = f"name one of {', '.join(by_word)}, then a colon and a value"
        raise InputError(f"{option} {text}: {f'no policy is called {word}{near}' if near else words}")
    return policy


def as_policy(policy: Policy | Callable[[PolicyInput], Tensor]) -> Policy:
    """Returns the policy itself, or wraps a user's callable."""
    if isinstance(policy, Policy):
        return policy
    if callable(policy) and not isinstance(policy, type):
        return Custom(policy)
    cure = "; adaponder.policies.parse_policy builds one from text" if isinstance(policy, str) else ""
    raise InputError(f"policy={shown(policy)}: a Policy object or a callable taking PolicyInput is needed{cure}")


@dataclass(frozen=True)
class Custom(Policy):
    """Wraps a user's callable, which must be causal and decide per token. This is not checked."""

    function: Callable[[PolicyInput], Tensor]

    def __call__(self, rows: PolicyInput) -> Tensor:
        decision = self.function(rows)
        if not isinstance(decision, Tensor) or decision.shape != rows.active.shape or decision.dtype != torch.bool:
            raise InputError(f"policy {self.function!r} must return a bool tensor of shape {tuple(rows.active.shape)}")
        return decision
