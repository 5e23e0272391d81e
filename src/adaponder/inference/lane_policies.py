"""Who decides depth where rows of many requests share one pass: each lane's own policy, by the policy's own rule.

The numbers of all lanes' policies lie in device tensors. Each class of this package's policies that is present is
called once for all rows, with every number replaced by a tensor of one number per row, and each row takes the answer of
its own lane's class. Shapes are static and the host waits for nothing, so a CUDA graph can hold the call; the graph
holds good for as long as :meth:`LanePolicies.key` stays the same. A user's own policy, and one that is more than a few
numbers, runs on the rows of its lane alone, and the host waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from adaponder.config import AdaPonderConfig
from adaponder.errors import InputError
from adaponder.ops.lane_books import force_rows
from adaponder.policies import ForcedDepths, Policy, PolicyInput, as_int64

# Number fields of a policy, at most: a schedule has its thresholds and its shares.
_FIELDS = 2
_PER_ROW = ("iteration", "gate", "hidden", "position", "seed", "slot", "active")


class LanePolicies:
    """The policy, seed, forced depths and last iteration of every lane, and the decision by them.

    Attributes:
        errors: what a user's policy raised, by lane, until the lane is set or cleared; that lane's rows halt.
    """

    def __init__(self, lanes: int, slots: int, config: AdaPonderConfig, device: torch.device | str = "cpu"):
        self.iterations, self.slots, self.device = config.iterations, slots, torch.device(device)
        self.errors: dict[int, Exception] = {}
        shape = (lanes, self.iterations, _FIELDS)
        self._numbers = torch.full(shape, math.nan, dtype=torch.float64, device=self.device)
        # Seed, number of the policy's class, last iteration.
        self._integers = torch.zeros(lanes, 3, dtype=torch.int64, device=self.device)
        self._forced: Tensor | None = None
        self._classes: dict[int, type[Policy]] = {}
        self._callables: dict[int, Policy] = {}
        self._classless: set[int] = set()
        self._forcing: set[int] = set()
        self._forced_before: set[int] = set()
        self._class_numbers: dict[type[Policy], int] = {}

    def set(
        self,
        lane: int,
        policy: Policy,
        seed: int = 0,
        depths: Mapping[int, int] | None = None,
        last_iteration: int | None = None,
    ) -> None:
        """Gives a lane to a request.

        Args:
            lane: the lane.
            policy: who decides; of :class:`ForcedDepths`, the first sequence's depths.
            seed: handed to the policy.
            depths: forced depth by slot, instead of the policy's decision; 0 is not forced.
            last_iteration: no row goes on after this iteration; by default the model's last.
        """
        self.clear(lane)
        last = self.iterations - 1 if last_iteration is None else last_iteration
        forced = {} if not isinstance(policy, ForcedDepths) else _first_sequence(policy)
        forced |= {slot: depth for slot, depth in (depths or {}).items() if depth}
        number = -1
        if _is_built_in(policy):
            self._classes[lane] = type(policy)
            number = self._class_numbers.setdefault(type(policy), len(self._class_numbers))
            self._write(self._numbers, lane, _number_table(policy, self.iterations, last))
        elif isinstance(policy, ForcedDepths):
            self._classless.add(lane)
        else:
            self._callables[lane] = policy
        self._write(self._integers, lane, [as_int64(seed), number, last])
        if forced:
            self._forcing.add(lane)
            if self._forced is None:
                self._forced = torch.zeros(len(self._integers), self.slots, dtype=torch.int32, device=self.device)
        if self._forced is not None and (forced or lane in self._forced_before):
            self._forced_before.add(lane)
            self._write(self._forced, lane, [forced.get(slot, 0) for slot in range(self.slots)])

    def clear(self, lane: int) -> None:
        """Takes a lane back; the answers of its rows have no meaning until it is set."""
        self._classes.pop(lane, None)
        self._callables.pop(lane, None)
        self.errors.pop(lane, None)
        self._forcing.discard(lane)
        self._classless.discard(lane)

    def classes(self) -> tuple[type[Policy], ...]:
        """The classes of this package's policies that any lane has, in the order of their first use."""
        present = set(self._classes.values())
        return tuple(kind for kind in self._class_numbers if kind in present)

    def callables(self) -> tuple[int, ...]:
        """Lanes whose policy is called for them alone: with any of these, a call makes the host wait."""
        return tuple(sorted(self._callables))

    def reads_previous(self) -> bool:
        """Whether any lane's policy looks at the hidden states of the iteration before."""
        return bool(self._callables) or any(kind.reads_previous for kind in self.classes())

    def key(self) -> tuple[Any, ...]:
        """What is built into a captured call: while it stays the same, a CUDA graph of the call holds good."""
        return self.classes(), bool(self._forcing), bool(self._callables), bool(self._classless)

    def __call__(self, rows: PolicyInput) -> Tensor:
        """True for rows whose token is read again, by the policy of each row's lane, ``rows.sequence``.

        ``rows.seed`` is not looked at: each lane has its own. The answers of rows that are not active have no meaning.
        """
        classes, lane = self.classes(), rows.sequence
        if any(kind.reads_seed for kind in classes) or self._callables:
            rows = replace(rows, seed=self._integers[lane, 0])
        keep = self._by_classes(rows, classes)
        for number, policy in self._callables.items():
            keep = self._by_callable(rows, keep, number, policy)
        if self._forcing and self._forced is not None:
            return force_rows(keep, self._forced, lane, rows.slot, rows.iteration, self._integers[:, 2])
        # Numbers end at a lane's last iteration (see _number_table); answers without numbers do not.
        if self._callables or any(not _number_fields(kind) for kind in classes):
            keep = keep & (rows.iteration < self._integers[lane, 2])
        return keep

    def _by_classes(self, rows: PolicyInput, classes: Sequence[type[Policy]]) -> Tensor:
        """The answers of this package's policies; false for rows of lanes that have none."""
        if not classes:
            return torch.zeros_like(rows.active)
        numbers = self._numbers[rows.sequence, rows.iteration]
        answers = [_of_numbers(kind, numbers)(rows) for kind in classes]
        if len(classes) == 1 and not self._callables and not self._classless:
            return answers[0]
        keep, own = torch.zeros_like(rows.active), self._integers[rows.sequence, 1]
        for kind, answer in zip(classes, answers, strict=True):
            keep = torch.where(own == self._class_numbers[kind], answer, keep)
        return keep

    def _by_callable(self, rows: PolicyInput, keep: Tensor, lane: int, policy: Policy) -> Tensor:
        """``keep`` with the answers of a user's policy, asked about the active rows of its lane alone."""
        mine = (rows.sequence == lane) & rows.active
        if lane in self.errors or not bool(mine.any()):
            return keep
        own = {name: getattr(rows, name)[mine] for name in _PER_ROW}
        previous = None if rows.previous is None else rows.previous[mine]
        # To the policy, its request is the only sequence there is.
        sequence = torch.zeros_like(own["slot"])
        try:
            answer = policy(replace(rows, **own, sequence=sequence, previous=previous))
            if not isinstance(answer, Tensor) or answer.shape != sequence.shape or answer.dtype != torch.bool:
                raise InputError(
                    f"policy {policy.fingerprint} must return a bool tensor of shape {tuple(sequence.shape)}"
                )
            return keep.masked_scatter(mine, answer.to(keep.device))
        except Exception as problem:  # whatever it is, other lanes go on
            self.errors[lane] = problem
            return keep

    def _write(self, buffer: Tensor, lane: int, values: Any) -> None:
        buffer[lane].copy_(torch.tensor(values, dtype=buffer.dtype), non_blocking=True)


def shareable(policy: Policy, seed: int) -> tuple[Any, ...] | None:
    """Equal for policies and seeds whose decisions are equal; ``None`` where no two may share a prompt's rows.

    A user's callable, and a class of the user's own that is not made of plain numbers and words, is never shared.
    """
    kind = type(policy)
    if _is_built_in(policy) or kind is ForcedDepths:
        return kind, policy.fingerprint, as_int64(seed) if policy.reads_seed else None
    if not is_dataclass(policy) or kind.__eq__ is object.__eq__:
        return None
    values = tuple(getattr(policy, item.name) for item in fields(policy))
    if not all(_is_plain(value) for value in values):
        return None
    # What a parent class says of the seed need not hold for a rule of the user's own.
    return kind, values, as_int64(seed) if kind.__dict__.get("reads_seed", True) else None


def runs_on_host(policy: Policy) -> bool:
    """Whether it is called for its lane alone, for which the host waits at every tick."""
    return not _is_built_in(policy) and not isinstance(policy, ForcedDepths)


def _is_built_in(policy: Policy) -> bool:
    """Whether its numbers may be replaced by tensors: one of this package that decides by a few, row by row."""
    kind = type(policy)
    if not kind.__module__.startswith("adaponder.policies.") or not kind.row_by_row:
        return False
    names = _number_fields(kind)
    return len(names) <= _FIELDS and all(_is_numbers(getattr(policy, name)) for name in names)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Sequence) and all(isinstance(one, Real) for one in value))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str)) or (isinstance(value, tuple) and all(_is_plain(one) for one in value))


def _number_fields(kind: type[Policy]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))  # type: ignore[arg-type]


def _number_table(policy: Policy, iterations: int, last: int) -> list[list[float]]:
    """``[iterations, fields]``: each number as it stands after each iteration.

    NaN, which no comparison keeps, from the last iteration on and where a list has no entry.
    """
    table = [[math.nan] * _FIELDS for _ in range(iterations)]
    for column, name in enumerate(_number_fields(type(policy))):
        value = getattr(policy, name)
        values = value if isinstance(value, Sequence) else [value] * iterations
        for iteration, number in enumerate(values[:last]):
            table[iteration][column] = float(number)
    return table


def _of_numbers(kind: type[Policy], numbers: Tensor) -> Policy:
    """A policy of this class whose numbers are tensors, one number per row; ``numbers`` is ``[…, fields]``."""
    policy = object.__new__(kind)
    for column, name in enumerate(_number_fields(kind)):
        object.__setattr__(policy, name, numbers[..., column])
    return policy


def _first_sequence(policy: ForcedDepths) -> dict[int, int]:
    """Depth by slot; a token is read once where less is asked for."""
    return {slot: max(depth, 1) for slot, depth in enumerate(policy.depths[0].tolist())}
