"""A policy looks at each row, one token after one iteration, and says whether the token is read again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError, shown
from adaponder.policies.text import PolicyLine, number_text


@dataclass(frozen=True)
class PolicyInput:
    """What a policy may look at: one entry per row, all of one shape (hidden states and logits have one more axis).

    Rows of one call may stand at different iterations and have different seeds, so a policy compares tensors
    (``rows.iteration + 1 < 3``) and never branches on them (``if rows.iteration == 0``).

    Attributes:
        iteration: int64, the iteration that the row has just finished, from 0.
        gate: how much the model wants to read on, in (0, 1): the learned gate's ``s``, a router's sigmoid, or the
            probability of not having exited yet.
        hidden: final-normed hidden states.
        position: position of the token in its document.
        seed: int64, the caller's seed.
        sequence: index in the batch of the token's sequence.
        slot: index of the token in its sequence, padding and cached tokens counted.
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
    """Decides the mask only; how an update is weighted is the method's affair.

    A policy is one class in one file. With a ``word`` it has a form in one line of text, ``word:value``, as soon as its
    class is defined: ``--policy`` takes it and a profile stores it.

    Attributes:
        causal: promises that a token's answer never depends on later tokens; a policy without it may train and evaluate
            and is refused in generation.
        row_by_row: promises that a row's answer depends on that row alone; a :class:`SequencePolicy` cannot, and
            chooses among the tokens of a whole sequence instead.
        reads_seed: whether an answer may depend on the row's seed.
        reads_previous: whether it looks at ``previous``; an engine keeps those states only where a policy does.
        signal: the kind of ``gate`` it must be given (the ``signal`` of a method's class); ``None``: any.
        word: names it in a line of text; empty where it has no such form.
        value_field: the field that the value of a line sets; empty where it takes none.
    """

    causal: ClassVar[bool] = True
    row_by_row: ClassVar[bool] = True
    reads_seed: ClassVar[bool] = True
    reads_previous: ClassVar[bool] = False
    signal: ClassVar[str | None] = None
    word: ClassVar[str] = ""
    value_field: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__dict__.get("word"):
            _register(cls)

    @abstractmethod
    def __call__(self, rows: PolicyInput) -> Tensor:
        """True for rows whose token is read again.

        A policy that asks another one passes on ``check`` and ``check_batch`` to it: settings are refused there, before
        anything is computed, and not here.
        """

    @property
    def fingerprint(self) -> str:
        """Names the policy and its settings: equal fingerprints, equal decisions."""
        return repr(self)

    @property
    def spelling(self) -> str:
        """The policy as it is typed, ``fixed:2``, for tables and errors; its fingerprint where no line says it."""
        try:
            return self.as_line()
        except InputError:
            return self.fingerprint

    def heads(self, iteration: int) -> int:
        """How often it computes a token's logits to decide after this iteration: a cost that is its own."""
        return 0

    def check(self, method: str, iterations: int) -> None:  # noqa: B027 (many policies fit every model)
        """Raises where it cannot decide for a model of ``method`` that reads a token up to ``iterations`` times."""

    def check_signal(self, signal: str, method: str, iterations: int) -> None:
        """Raises where it reads another signal than the one that a model of ``method`` gives it as ``gate``."""
        if self.signal not in (None, signal):
            raise InputError(
                f"policy={self.spelling}: it reads the signal of {self.signal}, and this model is {method} "
                f"(K={iterations}), whose signal is {signal}; gate, fixed or entropy can decide for it"
            )

    def check_batch(self, sequences: int, slots: int) -> None:  # noqa: B027 (most policies fit every batch)
        """Raises where it cannot decide for so many sequences of so many slots, padding and cached tokens counted.

        Called once before a forward's first iteration: what can be known on the host is checked here, so that no
        decision has to wait for the device.
        """

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """The words that a line of this policy may start with."""
        return (cls.word,)

    @classmethod
    def parse(cls, line: PolicyLine) -> Policy | None:
        """The policy that a line says; ``None`` where the line does not have the form of one."""
        if line.thresholds or (line.value and not cls.value_field):
            return None
        return cls(**{cls.value_field: cls.parse_value(line)}) if cls.value_field else cls()

    @classmethod
    def parse_value(cls, line: PolicyLine) -> object:
        """What the line's value makes of ``value_field``: one number, unless a policy says otherwise."""
        return line.number()

    def as_line(self) -> str:
        """The line of text that :meth:`parse` turns back into this policy."""
        # A subclass without a word of its own would be read back as its parent.
        if _BY_WORD.get(self.word) is not type(self):
            raise InputError(f"policy={self.fingerprint}: it cannot be written as one line of text")
        return f"{self.word}:{number_text(getattr(self, self.value_field))}" if self.value_field else self.word


# Enters a class when it is defined: see Policy.__init_subclass__.
_BY_WORD: dict[str, type[Policy]] = {}


def _register(policy: type[Policy]) -> None:
    if any(mark in policy.word for mark in ":@,"):
        raise InputError(f"{policy.__qualname__}.word={policy.word!r}: a word without colon, comma and @ is needed")
    other = _BY_WORD.get(policy.word)
    # A class defined again (a notebook's cell run twice, dataclass(slots=True)) takes its own place.
    if other is not None and (other.__module__, other.__qualname__) != (policy.__module__, policy.__qualname__):
        raise InputError(
            f"{policy.__qualname__}.word={policy.word!r}: {other.__module__}.{other.__qualname__} has it already; "
            "choose another"
        )
    _BY_WORD[policy.word] = policy


def registered_policies() -> tuple[type[Policy], ...]:
    """Every class of policies that has a word, in the order in which they were defined."""
    return tuple(_BY_WORD.values())


def as_policy(policy: Policy | Callable[[PolicyInput], Tensor]) -> Policy:
    """The policy itself, or the user's own callable made one."""
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return Custom(policy)
    cure = "; adaponder.policies.parse_policy makes one of a text" if isinstance(policy, str) else ""
    raise InputError(f"policy={shown(policy)}: a Policy object or a callable taking PolicyInput is needed{cure}")


@dataclass(frozen=True)
class Custom(Policy):
    """The user's own callable. It is trusted to be causal and per token; law 1 can be tested on it."""

    function: Callable[[PolicyInput], Tensor]

    def __call__(self, rows: PolicyInput) -> Tensor:
        keep = self.function(rows)
        if not isinstance(keep, Tensor) or keep.shape != rows.active.shape or keep.dtype != torch.bool:
            raise InputError(f"policy {self.function!r} must return a bool tensor of shape {tuple(rows.active.shape)}")
        return keep
